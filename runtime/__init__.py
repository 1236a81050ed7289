"""The runtime: from placed graphs to programs that run on the devices of one process or of many."""
