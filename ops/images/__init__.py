"""Image ops: resizing, grid and region sampling, deformable convolution, non-maximum
suppression."""
