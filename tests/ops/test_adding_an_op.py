"""An op with a kernel is one new file: nothing else knows its name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.fusion.fusion import regions_of
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.placement.calibration.roofline import Rates, op_class
from tests.placement.speeds import speeds

OPS = '''
"""Two ops: a product with a kernel of its own, and an elementwise one."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphflow as gf
from graphflow.op import Op, register

PAIR = (gf.spec("float32", (4, 3)), gf.spec("float32", (3, 5)))


def _into(xp: Any, out: Any, a: Any, b: Any) -> None:
    xp.matmul(a, b, out=out)
    xp.multiply(out, np.float32(2), out=out)


def _kernel(xp: Any, a: Any, b: Any) -> Any:
    out = xp.empty((a.shape[0], b.shape[1]), a.dtype)
    _into(xp, out, a, b)
    return out


def _infer(a: gf.TensorSpec, b: gf.TensorSpec) -> gf.TensorSpec:
    return a.with_shape((a.shape[0], b.shape[1]))


doubled_product = register(Op(
    "new.doubled_product",
    infer=_infer,
    kernel=_kernel,
    into=_into,
    vjp=lambda g, y, a, b: (doubled_product(g, b.T), doubled_product(a.T, g)),
    sharding=lambda a, b: "ik,kj->ij",
    cost=lambda a, b: gf.Cost(flops=2 * a.shape[0] * a.shape[1] * b.shape[1]),
    rate="product",
    samples=(gf.sample(*PAIR),),
))
cubed = register(Op(
    "new.cubed",
    infer=lambda x: x,
    expr=lambda xp, x: x * x * x,
    vjp=lambda g, y, x: (3 * g * gf.square(x),),
    cost=lambda x: gf.Cost(flops=2 * x.size),
    elementwise=True,
    samples=(gf.sample(PAIR[0]),),
))
'''


@pytest.fixture
def new_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of a new file, whose ops leave the registry after the test."""
    (tmp_path / "new_ops.py").write_text(OPS)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(REGISTRY)
    yield importlib.import_module("new_ops")
    for name in REGISTRY.keys() - before.keys():
        del REGISTRY[name]
    sys.modules.pop("new_ops", None)


def test_it_keeps_the_promises_of_all_ops(new_ops: ModuleType) -> None:
    gf.check_op(new_ops.doubled_product)
    gf.check_op(new_ops.cubed)


def test_a_session_trains_with_it(new_ops: ModuleType) -> None:
    x = gf.placeholder("float32", (8, 3))
    w = gf.variable(np.ones((3, 5), "float32"))
    loss = gf.mean(gf.square(new_ops.cubed(new_ops.doubled_product(x, w))))
    train = gf.optim.SGD(1e-5).minimize(loss)
    feeds = {x: np.linspace(0, 1, 24, dtype="float32").reshape(8, 3)}
    with gf.Session() as session:
        losses = [session.run([loss, train], feeds)[0] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


@pytest.mark.skipif(not is_jit_enabled(), reason="kernels are not generated")
def test_it_fuses_with_its_neighbours(new_ops: ModuleType) -> None:
    x = gf.placeholder("float32", (4, 6), name="x")
    graph = Graph(gf.tanh(new_ops.cubed(x * 2)))
    specs = {t: t.spec for node in graph.nodes for t in node.outputs}
    (region,) = regions_of(graph, "cpu", specs, {})
    assert [node.op.name for node in region] == ["multiply", "new.cubed", "tanh"]


def test_it_is_priced_as_a_product(new_ops: ModuleType) -> None:
    a, b = gf.spec("float32", (200, 300)), gf.spec("float32", (300, 100))
    c = gf.spec("float32", (200, 100))
    assert op_class(new_ops.doubled_product) == "matmul"
    rates = Rates(speeds())
    mine, usual = (
        rates.seconds(op, (a, b), (c,), {}) for op in (new_ops.doubled_product, REGISTRY["matmul"])
    )
    assert mine == pytest.approx(usual)


def test_strategies_cut_it_over_devices(new_ops: ModuleType) -> None:
    x = gf.placeholder("float32", (8, 6))
    w = gf.variable(np.ones((6, 4), "float32"), name="w")
    loss = gf.mean(new_ops.doubled_product(x, w))
    strategy = gf.parallel.Shard({"m": 2}, {"w": (None, "m")})
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    plan = gf.plan([loss, train], gf.Cluster.hypothetical("2xa100"))
    devices = {node.device for node in plan.nodes if node.op == "new.doubled_product"}
    assert len(devices) == 2
