"""Parameter servers: windows of turns in which workers push gradients and servers update."""
