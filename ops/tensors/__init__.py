"""Ops that create, index, slice, pad, reshape and scatter tensors."""
