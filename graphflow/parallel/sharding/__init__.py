"""The partitioner: propagate layouts, choose a rule for each op, emit one node for each shard."""
