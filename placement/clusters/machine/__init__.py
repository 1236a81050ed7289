"""This machine: its memory, cores and GPUs, and the devices that a process takes by itself."""
