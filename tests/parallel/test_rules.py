"""Every op, cut along every axis of every sample, gives what it gives whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.device import DeviceName
from graphflow.graph import Graph
from graphflow.interpret import evaluate
from graphflow.op import REGISTRY, Op, Sample
from graphflow.opcheck import draw
from graphflow.parallel.mesh import Mesh, Split
from graphflow.parallel.moves import Layout, whole
from graphflow.parallel.shard import Sharded, divided

AXIS = "m"
OPS = [op for op in REGISTRY.values() if op.samples and op.name not in ("print", "check")]


def mesh_of(count: int) -> Mesh:
    names = [DeviceName.parse(f"/worker:{i}/cpu:0") for i in range(count)]
    return Mesh({AXIS: count}, names)


def cut_along(axis: int, rank: int) -> Layout:
    return whole(rank).with_dim(axis, Split((AXIS,)))


def run(division: Sharded, feeds: dict[Any, Any]) -> list[Any]:
    """The outputs of a divided graph, on one device."""
    sizes: dict[str, int] = {}
    arrays = {t.node: a for t, a in feeds.items()}
    own = {t: a for t, a in feeds.items() if t.node in division.graph.names}
    own |= {n.outputs[0]: a for n, a in division.feeds(arrays, sizes).items()}
    own = {t: a for t, a in own.items() if t.node in division.graph.names}
    return list(evaluate(list(division.graph.outputs), own))


def cases(op: Op) -> list[tuple[int, int, int, int]]:
    """Sample, input (-1: the output), axis, shards."""
    found = []
    for s, sample in enumerate(op.samples):
        specs = list(sample.inputs)
        if not specs:
            made = op.infer(**sample.attrs)
            specs = [made if not isinstance(made, tuple) else made[0]]
        for i, spec in enumerate(specs):
            for d, size in enumerate(spec.shape):
                for count in (2, 3):
                    if isinstance(size, int) and size >= count:
                        found.append((s, i if sample.inputs else -1, d, count))
    return found


def close(have: Any, want: Any, sample: Sample) -> bool:
    if have.dtype.kind not in "fcV":
        return bool(np.array_equal(have, want))
    wide = np.complex128 if have.dtype.kind == "c" else np.float64
    return bool(
        np.allclose(have.astype(wide), want.astype(wide), rtol=2e-5, atol=2e-5, equal_nan=True)
    )


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_cut_along_any_axis_gives_what_it_gives_whole(op: Op) -> None:
    for s, i, d, count in cases(op):
        sample = op.samples[s]
        arrays = draw(sample, op.name)
        xs = [gf.placeholder(a.dtype, a.shape) for a in arrays]
        made = op(*xs, **sample.attrs)
        outputs = list(made) if isinstance(made, tuple) else [made]
        target = xs[i] if i >= 0 else outputs[0]
        graph = Graph(outputs)
        division = divided(graph, mesh_of(count), {target: cut_along(d, target.ndim)})
        feeds = dict(zip(xs, arrays, strict=True))
        with np.errstate(all="ignore"):
            want = evaluate(outputs, feeds)
            have = run(division, feeds)
        told = f"sample {s}, input {i}, axis {d}, {count} shards"
        for a, b in zip(have, want, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), told
            assert close(a, b, sample), f"{told}: {a!r} is not {b!r}"
