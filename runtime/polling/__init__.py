"""Polling of sockets: the thread that does it, and how others wake it."""
