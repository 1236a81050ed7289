"""Inner loops of linear models: plain Python that runs as machine code."""
