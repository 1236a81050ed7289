"""The `graphflow` command: its arguments, keys and status pages."""
