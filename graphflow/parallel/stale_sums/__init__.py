"""Sums over workers that are refreshed once in several turns, and used stale in between."""
