"""Compression of what replicas exchange: filters, their state, and the exchange that runs them."""
