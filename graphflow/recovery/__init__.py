"""Survival of sessions: recovery from lost workers, periodic checkpoints, SIGTERM."""
