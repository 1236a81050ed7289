"""Modes of the check for NaN and infinity; `Partition.checks` is one of `CHECKS`.

The checks themselves are in `runtime/program/nonfinite_check.py`. The modes stand here because the
wire format and the memory layout depend on them, and both lie below programs.
"""

RESULTS = "results"
"""Check fetches and new values of variables, once all nodes have run."""

EVERY = "every"
"""Check each node's outputs as soon as it has run; nodes are not fused."""

CHECKS = ("", RESULTS, EVERY)
"""All modes; "" checks nothing."""
