"""Log events, metric counters, and the HTTP endpoint that serves the metrics."""
