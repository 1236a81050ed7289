"""Nodes that run on the host, between the graphs of an imported model."""
