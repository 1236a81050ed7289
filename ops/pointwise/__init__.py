"""Elementwise ops: arithmetic, activations, special functions, comparisons, conversions."""
