"""Reports, comparisons and sweeps of plans, as tables that print themselves."""
