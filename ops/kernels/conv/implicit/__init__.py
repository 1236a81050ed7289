"""Implicit GEMM: convolutions as products of gathered rows of channels."""
