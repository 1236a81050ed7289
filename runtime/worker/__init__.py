"""A worker: a process that computes for sessions of others.

`python -m graphflow.runtime.worker` is what launchers start.
"""
