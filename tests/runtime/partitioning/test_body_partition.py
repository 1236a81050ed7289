"""Bodies pinned to several devices: bit-equal to one device, over threads and over processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow import errors
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph, bodies
from graphflow.passes import optimize
from graphflow.passes.bodies import spans_devices
from graphflow.runtime.partitioning.partition import partition
from graphflow.runtime.wire.graph_codec import decode, encode

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
HERE = ("/worker:0/cpu:0", "/worker:0/cpu:1")
PROCESSES = ("/worker:0/cpu:0", "/worker:1/cpu:0")
Pin = Callable[[], Any]


def model(pins: Sequence[str | None]) -> tuple[gf.Tensor, gf.Tensor, list[gf.Tensor]]:
    """Loops in loops, branches in loops, calls, and gradients; the pins are used in turn."""
    left = list(pins)

    def pin() -> Any:
        name = left.pop(0) if left else None
        return gf.device(name) if name else contextlib.nullcontext()

    x, p = gf.placeholder("float32", (4, 3), "x"), gf.placeholder("bool", (), "p")
    w = gf.variable(np.full((3, 3), 0.1, np.float32), "w")

    def body(carry: Any, row: gf.Tensor) -> Any:
        a, b = carry
        with pin():
            a = gf.tanh(a @ w + row)
        with pin():
            b = b * 0.5 + gf.sum(a)
        return (b * gf.ones((3,)), gf.sum(a * b)), a * b  # the carries come back exchanged

    (c, d), ys = gf.scan(body, (gf.zeros((3,)), 1.0), x)

    def grow(state: Any) -> Any:
        n, v = state
        with pin():
            v = v * 1.5 + gf.sum(w) * 0.01
        return n + 1, v

    n, v = gf.while_loop(lambda s: gf.sum(s[1] ** 2) < 100.0, grow, (0, gf.sum(x, axis=0)), 20)

    def yes(a: gf.Tensor) -> gf.Tensor:
        with pin():
            total: gf.Tensor = gf.sum(gf.sin(a) @ w)
        return total

    def no(a: gf.Tensor) -> gf.Tensor:
        with pin():
            q = gf.sum(a**3)
        with pin():
            total: gf.Tensor = q * gf.sum(w)
        return total

    y = gf.cond(p, yes, no, x)

    def inner(carry: gf.Tensor, row: gf.Tensor) -> Any:
        def double(c: gf.Tensor) -> gf.Tensor:
            with pin():
                product: gf.Tensor = c * gf.sin(row)
            return product

        return gf.cond(gf.sum(carry) > 0, double, lambda c: c + row * gf.sum(w), carry), None

    def outer(carry: gf.Tensor, row: gf.Tensor) -> Any:
        with pin():
            last, _ = gf.scan(inner, carry, gf.stack([row, row * 2]))
        with pin():
            return last, gf.sum(last * 2)

    e, zs = gf.scan(outer, gf.ones((3,)), x)

    @gf.function
    def layer(a: gf.Tensor) -> gf.Tensor:
        with pin():
            h = gf.tanh(a @ w)
        return h + gf.random.normal((4, 3))

    h = layer(layer(x))
    loss = gf.sum(c**2) + gf.sum(ys**2) + gf.sum(v**2) + y**2 + gf.sum(e**2) + gf.sum(zs)
    loss = loss + d + gf.sum(h**2)
    first = gf.gradients(loss, [w, x])
    return x, p, [c, d, ys, n, v, y, e, zs, h, loss, *first]


def evaluate_model(pins: Sequence[str | None], choice: bool) -> list[bytes]:
    with gf.random.seed(0):
        x, p, outputs = model(pins)
    feeds = {x: X, p: np.array(choice)}
    return [np.asarray(v).tobytes() for v in evaluate(outputs, feeds)]


def run_on_cluster(cluster: gf.Cluster, pins: Sequence[str | None], choice: bool) -> list[bytes]:
    with gf.random.seed(0):
        x, p, outputs = model(pins)
    with gf.Session(cluster) as s:
        return [v.tobytes() for v in s.run(outputs, {x: X, p: choice})]


@pytest.mark.slow
@given(
    pins=st.lists(st.sampled_from([None, *HERE]), min_size=12, max_size=12),
    choice=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_pins_inside_bodies_change_no_bit(pins: list[str | None], choice: bool) -> None:
    cluster = gf.Cluster.here(devices=("cpu:0", "cpu:1"), threads=1)
    assert run_on_cluster(cluster, pins, choice) == evaluate_model([None] * 12, choice)


@pytest.mark.parametrize("choice", [True, False])
def test_bodies_over_two_processes_give_the_bits_of_one(choice: bool) -> None:
    a, b = PROCESSES
    pins = [b, a, b, b, a, b, b, a, b, b]
    cluster = gf.Cluster.local(workers=2, threads=1)
    assert run_on_cluster(cluster, pins, choice) == evaluate_model([None] * 12, choice)


def test_each_device_gets_its_part_and_operands_that_it_reads_only() -> None:
    a, b = PROCESSES
    x, unread = gf.placeholder("float32", (4, 3)), gf.placeholder("float32", (4, 3))

    def body(c: gf.Tensor, rows: Any) -> Any:
        with gf.device(b):
            d = gf.sin(c + rows[0])
        return d, gf.sum(d + rows[1])

    with gf.device(a):
        c, ys = gf.scan(body, gf.zeros((3,)), (x, unread))
    graph = optimize(Graph([c, ys]))
    parts = partition(graph, {node: a for node in graph.nodes if node.inputs}, None, None, [a, b])
    (home,), (away,) = (parts[d].graph.of_op("scan") for d in (a, b))
    assert (home.attrs["items"], away.attrs["items"]) == (1, 1)
    assert [n.op.name for n in bodies(away)[0].graph.nodes] == [
        "placeholder", "placeholder", "add", "sin", "send",
    ]  # fmt: skip


def test_a_loop_whose_parts_are_all_pinned_to_one_device_runs_there() -> None:
    def body(c: gf.Tensor, _: Any) -> Any:
        with gf.device("/worker:1"):
            return gf.sin(c), None

    c, _ = gf.scan(body, gf.zeros((3,)), length=3)
    assert str(c.node.device) == "/worker:1"
    assert not spans_devices(c.node)


def test_a_pin_inside_a_body_that_fits_no_device_names_the_line() -> None:
    def body(c: gf.Tensor, _: Any) -> Any:
        with gf.device("/worker:7"):
            d = gf.sin(c)
        with gf.device("/worker:0"):
            return d + 1, None

    c, _ = gf.scan(body, gf.zeros((3,)), length=3)
    with (
        gf.Session() as s,
        pytest.raises(errors.DeviceError, match=r"sin.*test_body_partition\.py:\d+"),
    ):
        s.run(c)


def test_bodies_survive_the_wire() -> None:
    graph = optimize(Graph(model([None] * 12)[2]))
    device = HERE[0]
    placed = {n: device for n in graph.nodes if n.op.name not in ("constant", "placeholder")}
    (part,) = partition(graph, placed).values()
    header, buffers = encode([part])
    (again,) = decode(header, buffers)
    # Parameters come first, and everything is on the device now.
    before, after = (
        sorted(line.removesuffix(f" @ {device}") for line in str(p.graph).splitlines())
        for p in (part, again)
    )
    assert after == before


def test_a_body_from_the_wire_holds_no_state() -> None:
    y = gf.call(gf.tanh, gf.constant(1.0))
    (part,) = partition(Graph([y]), {y.node: HERE[0]}).values()
    header, buffers = encode([part])
    plain = msgpack.unpackb(header)
    body = next(n for n in plain[0]["nodes"] if n[0] == "call")[2]["body"]["body"]
    body["nodes"][0][0] = "variable"
    with pytest.raises(errors.ProtocolError):
        decode(msgpack.packb(plain), buffers)
    body["nodes"][0][0] = "placeholder"
    body["results"] = 7
    with pytest.raises(errors.ProtocolError):
        decode(msgpack.packb(plain), buffers)


def test_bodies_from_the_wire_are_not_too_deep() -> None:
    f: Any = gf.tanh
    for _ in range(40):
        f = _within(f)
    y = f(gf.constant(1.0))
    (part,) = partition(Graph([y]), {y.node: HERE[0]}).values()
    header, buffers = encode([part])
    with pytest.raises(errors.ProtocolError, match="deep"):
        decode(header, buffers)


def _within(f: Any) -> Any:
    return lambda a: gf.call(f, a)


def test_what_is_pinned_in_a_body_to_a_lost_worker_goes_to_those_that_remain() -> None:
    x = gf.placeholder("float32", (4,), name="x")

    def body(state: Any) -> Any:
        turn, y = state
        with gf.device("/worker:1"):
            doubled = y * 2.0
        with gf.device("/worker:2"):
            more = doubled + gf.tanh(y)
        return turn + 1, more

    with gf.device("/worker:0"):
        start = gf.constant(0) + 0
    y = gf.while_loop(lambda state: state[0] < 3, body, (start, x))[1]
    three = gf.Cluster.local(workers=3, threads=1)
    fed = {x: np.arange(4, dtype="float32")}
    found = []
    for lost in ((), (1,), (2,), (1, 2), (0, 1)):
        with gf.Session(three.without(lost), trial=False) as s:
            found.append(s.run(y, fed).tobytes())
    assert len(set(found)) == 1
