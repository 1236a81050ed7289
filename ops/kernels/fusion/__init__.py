"""Which nodes run as one kernel, and the loop nests that those kernels are."""
