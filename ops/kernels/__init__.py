"""Kernels: generated code, and the threads that it shares."""
