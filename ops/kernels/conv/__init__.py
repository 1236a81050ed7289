"""Convolution and batch-norm kernels: direct, im2col, implicit GEMM, Winograd."""
