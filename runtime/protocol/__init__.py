"""The coordinator's and the worker's protocol as state machines: events in, actions out.

They have no clock, socket, thread or process of their own, so that the same code runs over sockets
and in a simulator that delays, duplicates and crashes from a seed.
"""
