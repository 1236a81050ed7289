"""Every op, its inputs and outputs laid out anyhow over meshes of one and two axes, gives what it
gives whole, and so do its gradients."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import GraphflowError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Op, Sample, Tensor
from graphflow.ir.spec import evaluate as evaluate_size
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import Layout, whole
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph
from graphflow.parallel.sharding.partitioner import partition_graph
from graphflow.transforms.op_testing import draw, infer_specs, to_double

MESHES: list[dict[str, int]] = [{"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 3, "b": 2}]
OPS = [op for op in REGISTRY.values() if op.samples and op.name not in ("print", "check")]
AS_THEY_ARE = ("searchsorted", "attention_packed_grad")
"""Ops whose samples' sizes, or numbers, belong together in a way that their specs do not say."""


def mesh_of(sizes: Mapping[str, int]) -> Mesh:
    names = [DeviceName.parse(f"/worker:{i}/cpu:0") for i in range(prod(sizes.values()))]
    return Mesh(sizes, names)


def resize_sample(op: Op, sample: Sample, rng: random.Random) -> Sample:
    """The sample with other sizes, if the op takes such."""
    sizes = sorted({evaluate_size(n, {}) for spec in sample.inputs for n in spec.shape})
    others: dict[Any, int] = {
        n: n if n < 2 else rng.choice([n, n, n + 1, 2 * n, n + 3, 5, 7]) for n in sizes
    }
    inputs = tuple(s.with_shape(tuple(others[n] for n in s.shape)) for s in sample.inputs)
    return accept_sample(op, replace(sample, inputs=inputs)) or sample


def to_float64(op: Op, sample: Sample) -> Sample:
    """The sample in float64, if the op takes that."""
    return accept_sample(op, to_double(sample)) or sample


def accept_sample(op: Op, sample: Sample) -> Sample | None:
    """The sample, if the op takes it."""
    try:
        infer_specs(op, sample, sample.inputs)
        op.run(np, draw(sample, op.name), sample.attrs)
    except (GraphflowError, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return sample


def laid_out(
    targets: list[Tensor], mesh: Mapping[str, int], rng: random.Random
) -> dict[Tensor, Layout]:
    """Some of the tensors cut along the axes of a mesh, anyhow."""
    cuts = SizePartitioner(mesh_of(mesh))
    given: dict[Tensor, Layout] = {}
    for tensor in rng.sample(targets, rng.randint(1, len(targets))):
        layout = whole(tensor.ndim)
        for axis in rng.sample(list(mesh), len(mesh)):
            d = rng.randrange(tensor.ndim)
            split = AxisSplit((*layout.dims[d].axes, axis))
            if cuts.can_split(tensor.shape[d], split):
                layout = layout.with_dim(d, split)
        if any(layout.dims):
            given[tensor] = layout
    return given


def run(division: ShardedGraph, feeds: Mapping[Tensor, Any]) -> list[Any]:
    """The outputs of a divided graph, on one device."""
    arrays = {t.node: a for t, a in feeds.items()}
    own = {n.outputs[0]: a for n, a in division.feeds(arrays, {}).items()} | dict(feeds)
    used = {t: a for t, a in own.items() if t.node in division.graph.names}
    return list(evaluate(list(division.graph.outputs), used))


def assert_near(have: Any, want: Any, told: str) -> None:
    assert (have.shape, have.dtype) == (want.shape, want.dtype), told
    if want.dtype.kind not in "fcV":
        assert np.array_equal(have, want), told
        return
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    have, exact = have.astype(wide), want.astype(wide)
    finite = np.abs(exact[np.isfinite(exact)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    near = 1e-11 if want.dtype == wide else 2e-5 if want.dtype.itemsize >= 4 else 2e-2
    assert np.allclose(have / scale, exact / scale, rtol=0, atol=near, equal_nan=True), told


def with_gradients(op: Op, sample: Sample, xs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of a weighted sum of all their elements."""
    floats = ("float32", "float64")
    ends = [t for t in outputs if t.dtype.name in floats]
    into = [x for i, x in enumerate(xs) if x.dtype.name in floats and i not in sample.fixed]
    if op.vjp is None or op.random or not ends or not into:
        return outputs
    rng = np.random.default_rng(0)
    sums = [gf.sum(t * rng.normal(size=tuple(t.shape)).astype(t.dtype)) for t in ends]  # type: ignore[arg-type]
    try:
        return [*outputs, *gf.gradients(sum(sums[1:], sums[0]), into)]
    except GraphflowError:  # as attributes have it: no gradient, or one of whole tensors only
        return outputs


def check(op: Op, number: int, seed: int) -> None:
    """One sample, in one random layout."""
    rng = random.Random(f"{op.name} {number} {seed}")
    sample = op.samples[number]
    if sample.make is None and op.name not in AS_THEY_ARE and rng.random() < 0.8:
        sample = resize_sample(op, sample, rng)
    sample = to_float64(op, sample)
    arrays = draw(sample, op.name)
    xs: list[Tensor] = [gf.placeholder(a.dtype, a.shape) for a in arrays]
    made = op(*xs, **sample.attrs)
    outputs = list(made) if isinstance(made, tuple) else [made]
    targets = [t for t in (*xs, *outputs) if t.ndim]
    mesh = rng.choice(MESHES)
    given = laid_out(targets, mesh, rng) if targets else {}
    if not given:
        return
    fetches = with_gradients(op, sample, xs, outputs)
    feeds = dict(zip(xs, arrays, strict=True))
    told = ", ".join(f"{t.node.name} {t.shape} {layout}" for t, layout in given.items())
    wanted = evaluate(fetches, feeds)
    division = partition_graph(Graph(fetches), mesh_of(mesh), given)
    for i, (have, want) in enumerate(zip(run(division, feeds), wanted, strict=True)):
        assert_near(have, want, f"sample {number}, seed {seed}, result {i} on {mesh}: {told}")


@pytest.mark.every(2)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_op_and_its_gradients_in_any_layout_give_what_they_give_whole(op: Op) -> None:
    with np.errstate(all="ignore"):
        for number in range(min(3, len(op.samples))):
            check(op, number, seed=0)


@pytest.mark.slow  # thousands of layouts
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_op_and_its_gradients_in_many_layouts_give_what_they_give_whole(op: Op) -> None:
    with np.errstate(all="ignore"):
        for number in range(len(op.samples)):
            for seed in range(1, 12):
                check(op, number, seed)


PLANES = [("a", "b"), ("b", "a"), ("a", None), (None, "a"), ("b", None), (None, "b")]


@pytest.mark.parametrize("after", PLANES, ids=str)
@pytest.mark.parametrize("before", PLANES, ids=str)
def test_windows_of_both_axes_of_images_that_lie_otherwise_than_they_are_wanted(
    before: tuple[str | None, ...], after: tuple[str | None, ...]
) -> None:
    """Where both axes have windows, neighbours along an axis of the mesh may have other rows."""
    x = gf.placeholder("float64", (2, 2, 6, 7))
    w = gf.placeholder("float64", (4, 2, 3, 3))
    y = gf.nn.conv(x, w, padding=1)
    pooled = gf.nn.avg_pool(y, 3, stride=2, padding=1)
    loss = gf.sum(pooled * pooled)
    fetches = [y, pooled, *gf.gradients(loss, [x, w])]

    def layout(axes: tuple[str | None, ...]) -> Layout:
        return Layout(
            (AxisSplit(), AxisSplit(), *(AxisSplit((a,)) if a else AxisSplit() for a in axes))
        )

    random = np.random.default_rng(0)
    feeds = {t: random.normal(size=tuple(t.shape)) for t in (x, w)}  # type: ignore[arg-type]
    given = {x: layout(before), y: layout(after), fetches[2]: layout(after)}
    division = partition_graph(Graph(fetches), mesh_of({"a": 3, "b": 2}), given)
    for have, want in zip(run(division, feeds), evaluate(fetches, feeds), strict=True):
        assert_near(have, want, f"{before} to {after}")
