"""Reductions along axes: sums, extrema, softmax, cumulative ops and linear recurrences."""
