"""Pipeline stages: splitting a chain or a graph over devices, with bounds and memory."""
