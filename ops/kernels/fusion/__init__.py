"""Fusion of nodes into kernels, and the loop nests of these kernels."""
