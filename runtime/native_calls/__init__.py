"""Runs of kernels as one native call: segments, epilogues, parallel branches."""
