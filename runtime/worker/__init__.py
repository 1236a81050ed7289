"""The worker: a process that computes for the sessions of other processes.

Launchers start `python -m graphflow.runtime.worker`.
"""
