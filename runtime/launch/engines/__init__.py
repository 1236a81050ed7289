"""The engines that start workers: one a file, each a `WorkerLauncher`."""
