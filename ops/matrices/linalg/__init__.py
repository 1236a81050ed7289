"""Linear algebra, public as `gf.linalg`: decompositions, systems, singular values, norms."""
