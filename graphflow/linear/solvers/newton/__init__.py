"""Newton's method: products with second derivatives, conjugate gradients, line searches."""
