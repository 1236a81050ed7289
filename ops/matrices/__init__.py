"""Linear algebra: products, decompositions, solvers, norms, einsum, sparse matrices."""
