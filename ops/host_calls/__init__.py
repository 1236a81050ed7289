"""Python functions of users inside a graph, and debug output."""
