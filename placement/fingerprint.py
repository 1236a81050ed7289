"""Fingerprint: whether two graphs are the same to a plan, across processes."""

from __future__ import annotations

import hashlib
from typing import Any

from graphflow.graph import Graph, bodies
from graphflow.spec import Dim, Size


def fingerprint(graph: Graph) -> str:
    """A hash of a graph's ops, names, edges, specs and outputs, 16 hex digits.

    Sizes without a name are numbered as they appear, so that it is the same in each process.
    """
    symbols: dict[str, str] = {}
    number = {node: i for i, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.nodes:
        specs = [
            (s.dtype.name, [_canonical(size, symbols) for size in s.shape]) for s in node.specs
        ]
        inputs = [(number[t.node], t.index) for t in node.inputs]
        held = [fingerprint(body.graph) for body in bodies(node)]
        digest.update(repr((node.op.name, graph.names[node], inputs, specs, *held)).encode())
    digest.update(repr([(number[t.node], t.index) for t in graph.outputs]).encode())
    return digest.hexdigest()[:16]


def _canonical(size: Size, symbols: dict[str, str]) -> str:
    if not isinstance(size, Dim):
        return str(size)
    terms = sorted(
        ("*".join(sorted(_atom(atom, symbols) for atom in monomial)), factor)
        for monomial, factor in size.terms.items()
    )
    return repr(terms)


def _atom(atom: Any, symbols: dict[str, str]) -> str:
    if isinstance(atom, str):
        return symbols.setdefault(atom, f"s{len(symbols)}") if atom.startswith("?") else atom
    return f"{atom[0]}({_canonical(atom[1], symbols)},{_canonical(atom[2], symbols)})"
