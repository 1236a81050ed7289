"""Device meshes, and how tensors are laid out over them."""
