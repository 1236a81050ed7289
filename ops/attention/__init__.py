"""Attention as one op: forward, gradients, block patterns, packed projections."""
