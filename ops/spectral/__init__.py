"""Fourier transforms and signal processing."""
