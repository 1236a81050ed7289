"""Matrix products: tiling, microkernels, macrokernels, small products, matrix times vector."""
