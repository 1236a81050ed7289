"""Which thread polls the sockets, and how others wake it."""
