"""Sparse matrices in CSR form, public as `gf.sparse`."""
