"""Image ops: resizing, grid and region sampling, deformable convolution, box suppression."""
