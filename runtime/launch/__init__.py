"""Ways to start worker processes: one a file."""
