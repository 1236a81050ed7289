"""How a session survives: recovery from lost workers, periodic checkpoints, SIGTERM."""
