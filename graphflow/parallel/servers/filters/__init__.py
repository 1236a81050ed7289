"""Filters of what servers and workers send each other."""
