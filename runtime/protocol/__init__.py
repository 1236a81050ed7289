"""Protocol state machines of the coordinator and of the worker: events in, actions out.

The machines have no clock, socket, thread or process of their own. The same code therefore runs
over sockets, and in a simulator that delays, duplicates and crashes from a seed.
"""
