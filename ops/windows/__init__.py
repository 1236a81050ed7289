"""Ops over sliding windows: convolution, pooling, unfolding."""
