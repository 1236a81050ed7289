"""Solvers of linear problems, one method a file."""
