"""Communication between shards: layout changes, halos, fused collectives, gradient buckets."""
