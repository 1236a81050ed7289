"""Fused kernels and scatters for CUDA, compiled by NVRTC and called through CuPy."""
