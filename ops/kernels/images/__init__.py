"""Pooling, resampling and region-of-interest kernels."""
