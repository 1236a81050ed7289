"""Reductions along axes: sums, extrema, softmax, cumulative and linear recurrences."""
