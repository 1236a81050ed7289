"""Decides which nodes of a program on a GPU can be captured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping

from graphflow.ir.graph import bind_attrs, bodies
from graphflow.ir.op import Node
from graphflow.ops.control_flow.control import call, scan

_HOST_OPS = ("placeholder", "recv", "send", "collective_start", "collective_finish", "cond",
             "while_loop")  # fmt: skip
"""Ops that exchange data with the host."""

_FFT_OPS = ("fft", "rfft", "irfft")
"""Ops whose plans CuPy may evict, with a workspace that a captured graph would still use."""

_MAX_CAPTURED_NODES = 20_000
"""Nodes of all iterations of a loop, above which it is not captured."""


def is_repeatable(node: Node, bindings: Mapping[str, int]) -> bool:
    """Return True if a node starts the same work in each run, so that it can be captured.

    Such a node does not exchange data with the host and draws no random numbers.
    """
    op = node.op
    if op.name in (*_HOST_OPS, *_FFT_OPS):
        return False
    if not bodies(node):
        return op.pure and not op.random
    if op is scan:
        attrs = bind_attrs(node.attrs, bindings)
        size = int(attrs["length"]) * sum(1 for _ in attrs["body"].graph.walk())
        if attrs["counted"] or size > _MAX_CAPTURED_NODES:
            return False
    elif op is not call:
        return False
    return all(
        is_repeatable(each, bindings)
        for body in bodies(node)
        for each in body.graph.nodes
        if each.op.name not in ("placeholder", "constant")
    )
