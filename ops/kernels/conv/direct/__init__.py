"""Direct convolutions: vector loops over the taps, without a matrix of patches."""
