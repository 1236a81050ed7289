"""Attention and LSTM as lists of native calls."""
