"""The client's side of a session: connections to workers, the I/O loop, membership."""
