"""Move variables between the devices of a running session: new plans, servers and mirrors."""
