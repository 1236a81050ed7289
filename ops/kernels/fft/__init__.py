"""Discrete Fourier transforms as vector code."""
