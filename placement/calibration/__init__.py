"""Speeds of the hardware: measured, kept on disk, corrected by traces."""
