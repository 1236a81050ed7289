"""Pipeline parallelism: stages, schedules of micro-batches, and the graphs that follow them."""
