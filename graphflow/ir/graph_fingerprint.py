"""Fingerprint: whether two graphs are the same to a plan, across processes."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from graphflow.ir.graph import Graph, bodies
from graphflow.ir.spec import Dim, Size, is_fresh


def fingerprint(graph: Graph) -> str:
    """A hash of a graph's ops, names, edges, specs and outputs, 16 hex digits.

    Sizes without a name are numbered as they appear, so that it is the same in each process. It is
    worked out once: a plan, its devices and its order all ask for it.
    """
    known = _known.get(graph)
    if known is None:
        known = _known[graph] = _fingerprint(graph)
    return known


_known: WeakKeyDictionary[Graph, str] = WeakKeyDictionary()


def _fingerprint(graph: Graph) -> str:
    symbols: dict[str, str] = {}
    number = {node: i for i, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.nodes:
        specs = [
            (_name(s.dtype), [_canonical(size, symbols) for size in s.shape]) for s in node.specs
        ]
        inputs = [(number[t.node], t.index) for t in node.inputs]
        held = [fingerprint(body.graph) for body in bodies(node)]
        digest.update(repr((node.op.name, graph.names[node], inputs, specs, *held)).encode())
    digest.update(repr([(number[t.node], t.index) for t in graph.outputs]).encode())
    return digest.hexdigest()[:16]


@cache
def _name(dtype: np.dtype[Any]) -> str:
    """A dtype's name; numpy takes microseconds to tell it."""
    return dtype.name


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
        return symbols.setdefault(atom, f"s{len(symbols)}") if is_fresh(atom) else atom
    return f"{atom[0]}({_canonical(atom[1], symbols)},{_canonical(atom[2], symbols)})"
