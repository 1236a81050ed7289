"""Messages as bytes: frames, field checks, chunking, graphs and tensors."""
