"""Log events and metric counters."""
