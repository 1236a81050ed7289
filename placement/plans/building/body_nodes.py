"""Nodes of bodies (of `call`, `cond`, `scan`, `while_loop`, …), for a plan to
tell. They run where the node that holds them runs, and as a part of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from graphflow.ir.graph import Body
from graphflow.ir.op import Node
from graphflow.placement.plans.plan_records import BodyNode

_UNTOLD = ("constant", "group")


def body_nodes(node: Node) -> tuple[BodyNode, ...]:
    """The nodes of a node's bodies, and of their bodies, producers first.

    Names begin with that of the body where there are several ("then/mul"), and with that of the
    node around them where bodies are nested ("scan/mul").
    """
    return tuple(_walk_bodies(node, ""))


def _walk_bodies(node: Node, prefix: str) -> Iterator[BodyNode]:
    found = {name: value for name, value in node.attrs.items() if isinstance(value, Body)}
    for name, body in found.items():
        inside = f"{prefix}{name}/" if len(found) > 1 else prefix
        names = _names(node, body)
        for inner in body.graph.nodes:
            if inner.op.name in _UNTOLD:
                continue
            yield BodyNode(
                name=f"{inside}{names[inner]}",
                op=inner.op.name,
                output=", ".join(map(str, inner.specs)),
                inputs=tuple(
                    f"{inside}{names[source]}"
                    for source in dict.fromkeys(t.node for t in inner.inputs)
                    if source.op.name not in _UNTOLD
                ),
                location=f"{os.path.basename(inner.location.file)}:{inner.location.line}",
            )
            yield from _walk_bodies(inner, f"{inside}{names[inner]}/")


def _names(node: Node, body: Body) -> dict[Node, str]:
    """Names in a body, without the scope that all of it shares with the node around it."""
    names = dict(body.graph.names)
    scope = node.name.rpartition("/")[0]
    short = {inner: name.removeprefix(f"{scope}/") for inner, name in names.items()}
    return short if scope and len(set(short.values())) == len(names) else names
