"""Graph transforms (reverse mode, forward mode, vectorisation), and the checks of an op's rules."""
