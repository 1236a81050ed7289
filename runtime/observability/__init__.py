"""Traces, traffic, metrics and activity of a running session."""
