"""Write the graph of shards: one node for each place, and the conversions between layouts."""
