"""A worker's side of a session: state, edges between devices, and what a host offers."""
