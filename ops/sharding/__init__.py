"""How ops may be cut over devices: the sharding rules that op declarations use."""
