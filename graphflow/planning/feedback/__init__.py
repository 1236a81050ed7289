"""Learn from traced steps: seconds of nodes and turns, and the speeds of workers."""
