"""What a session does about lost workers, checkpoints on a schedule and SIGTERM."""
