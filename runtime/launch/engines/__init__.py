"""What starts workers: one engine a file, each a `WorkerLauncher`."""
