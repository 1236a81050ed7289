"""Ops that hold graphs (call, cond, scan, while_loop) and their gradients."""
