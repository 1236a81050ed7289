from __future__ import annotations

import contextlib
import copy
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, GraphError, GraphLimitError, ProtocolError
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Op, Sample
from graphflow.ir.spec import TensorSpec, kind
from graphflow.placement.clusters.machine.host_facts import host_memory
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, Partition, partition
from graphflow.runtime.wire.graph_codec import LIMITS, decode, encode
from graphflow.runtime.wire.graph_limits import GraphLimits
from tests.properties.random_graphs import has_same_bits, random_case
from tests.runtime.programs import CPU, OTHER, compile_program, make_partition, place_nodes

CASES = [
    pytest.param(op, sample, id=f"{op.name}-{i}")
    for op in REGISTRY.values()
    for i, sample in enumerate(op.samples)
    if op.name != "print"
]


def send_over_wire(part: Partition) -> Partition:
    (twin,) = decode(*encode([part]))
    return twin


def draw_array(sample: Sample, spec: TensorSpec, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if kind(spec.dtype) == "float":
        return np.asarray(rng.uniform(sample.low, sample.high, spec.shape)).astype(spec.dtype)
    return np.asarray(rng.integers(0, 2, spec.shape)).astype(spec.dtype)


# Round trips ------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("op, sample", CASES)
def test_every_op_arrives_with_its_specs_and_gives_the_same_bits(op: Op, sample: Sample) -> None:
    rng = np.random.default_rng(0)
    xs = [gf.placeholder(s.dtype, s.shape, name=f"x{i}") for i, s in enumerate(sample.inputs)]
    outputs = op(*xs, **sample.attrs)
    part = make_partition(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    twin = send_over_wire(part)
    assert [n.specs for n in twin.graph.nodes] == [n.specs for n in part.graph.nodes]
    arrays = [draw_array(sample, x.spec, rng) for x in xs]
    if sample.make is not None:
        arrays = sample.make(arrays)
    feeds = {x.name: array for x, array in zip(xs, arrays, strict=True)}
    mine = compile_program(part).compute(feeds, 1, 0)
    theirs = compile_program(twin).compute(feeds, 1, 0)
    assert mine.keys() == theirs.keys()
    assert all(has_same_bits(mine[name], theirs[name]) for name in mine)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_a_partition_arrives_as_it_was_sent(seed: int) -> None:
    graph = random_case(seed).graph
    rng = np.random.default_rng(seed)
    devices: dict[Any, str] = {}
    for node in graph.nodes:
        if node.op.name == "assign":
            devices[node] = devices[node.inputs[0].node]
        elif node.op.name not in UNPLACED_OPS:
            devices[node] = (CPU, OTHER)[rng.integers(2)]
    sent = list(partition(graph, devices).values())
    for part, twin in zip(sent, decode(*encode(sent)), strict=True):
        assert (twin.device, twin.feeds) == (part.device, part.feeds)
        assert str(twin.graph) == str(part.graph)
        assert [(n.name, n.location, n.specs) for n in twin.graph.nodes] == [
            (n.name, n.location, n.specs) for n in part.graph.nodes
        ]
        assert {k: twin.graph.names[t.node] for k, t in twin.fetches.items()} == {
            k: part.graph.names[t.node] for k, t in part.fetches.items()
        }


def test_sizes_made_of_sizes_arrive_equal() -> None:
    x = gf.placeholder("float32", ("n", "m"), name="x")
    n, m = x.shape
    sizes = [n * m + 2 * n - 1, n // 3, (n * 2 + m) // (m + 1)]
    outputs = [gf.sum(gf.zeros((size,))) + gf.sum(x) for size in sizes]
    part = make_partition(*outputs)
    assert [node.specs for node in send_over_wire(part).graph.nodes] == [
        node.specs for node in part.graph.nodes
    ]


def test_an_attribute_that_is_no_plain_data_is_not_sent() -> None:
    part = make_partition(
        Op("odd", infer=lambda thing: TensorSpec((), np.dtype("float32")))(thing=object())
    )
    with pytest.raises(GraphError, match="type object cannot be sent"):
        encode([part])


# What is refused --------------------------------------------------------------------------------


def message() -> tuple[list[Any], list[Any]]:
    """A decoded header to spoil, and its buffers."""
    x = gf.placeholder("float32", ("n", 4), name="x")
    w = gf.variable(gf.init.normal((4, 3)), name="w")
    b = gf.variable(np.zeros(3, "float32"), name="b")
    y = gf.reshape(gf.tanh(gf.matmul(x, w) + b + gf.constant([1.0, 2.0, 3.0])), (-1,))
    far = gf.exp(y, name="far")
    graph = Graph([gf.sum(y), gf.assign(b, b - 1.0), far])
    part = partition(graph, place_nodes(graph, far="/worker:1/cpu:0"))[CPU]
    header, buffers = encode([part])
    return msgpack.unpackb(header), buffers


def encode_spoiled(change: Callable[[Any], Any]) -> tuple[bytes, list[Any]]:
    header, buffers = message()
    change(header[0])
    return msgpack.packb(header), buffers


def node_of(part: Any, op: str) -> Any:
    return next(node for node in part["nodes"] if node[0] == op)


def set_node(op: str, field: int, value: Any) -> Callable[[Any], None]:
    return lambda part: node_of(part, op).__setitem__(field, value)


def set_attr(op: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda part: node_of(part, op)[2].__setitem__(name, value)


def set_part(name: str, value: Any) -> Callable[[Any], None]:
    return lambda part: part.__setitem__(name, value)


OP, INPUTS, ATTRS, NAME, UNIQUE, LOCATION = range(6)


def part_of(whole: list[int], spans: list[Any]) -> dict[str, Any]:
    """An initial value of shape (4, 3) that is a part of a larger one."""
    return {"init": ["normal", [4, 3], "float32", 0.0, 1.0, [0, 0], whole, spans]}


HUGE = {"init": ["normal", [10**12], "float32", 0.0, 1.0, [0, 0]]}

WRONG: dict[str, Callable[[Any], Any]] = {
    "a forward reference": set_node("matmul", INPUTS, [[0, 0], [9, 0]]),
    "a reference to itself": lambda p: p["nodes"][2].__setitem__(INPUTS, [[2, 0]]),
    "a negative index": set_node("tanh", INPUTS, [[-1, 0]]),
    "a negative output": set_node("tanh", INPUTS, [[0, -1]]),
    "an index beyond the end": set_part("outputs", [[10**6, 0]]),
    "a fractional index": set_part("outputs", [[0.5, 0]]),
    "a boolean index": set_part("outputs", [[True, 0]]),
    "a missing input": set_node("matmul", INPUTS, [[0, 0]]),
    "an input too many": set_node("matmul", INPUTS, [[0, 0], [1, 0], [1, 0]]),
    "wrong shapes": set_node("matmul", INPUTS, [[0, 0], [0, 0]]),
    "a wrong dtype": set_attr("placeholder", "dtype", "int8"),
    "an unknown dtype": set_attr("placeholder", "dtype", "object"),
    "an attribute too many": set_attr("matmul", "surprise", 1),
    "an attribute of no name": lambda p: node_of(p, "tanh").__setitem__(ATTRS, {1: 2}),
    "a missing attribute": lambda p: node_of(p, "placeholder")[ATTRS].pop("dtype"),
    "a shape that is no shape": set_attr("placeholder", "shape", "many"),
    "a negative size": set_attr("placeholder", "shape", [-3, 4]),
    "attributes that are a list": set_node("tanh", ATTRS, [1]),
    "a buffer that was not sent": set_attr("constant", "value", {"array": 99}),
    "a negative buffer": set_attr("constant", "value", {"array": -1}),
    "a constant that is no array": set_attr("constant", "value", 3),
    "an unknown kind of attribute": set_attr("constant", "value", {"pickle": "x"}),
    "an attribute of two kinds": set_attr("constant", "value", {"array": 0, "dim": []}),
    "an initializer of an unknown kind": set_attr(
        "variable", "initial", {"init": ["zipf", [4, 3], "float32", 0.0, 1.0, [0, 0]]}
    ),
    "an initializer that is not finite": set_attr(
        "variable", "initial", {"init": ["normal", [4, 3], "float32", 0.0, float("inf"), [0, 0]]}
    ),
    "an initializer of another shape": set_attr(
        "variable", "initial", {"init": ["normal", [4, 4], "float32", 0.0, 1.0, [0, 0]]}
    ),
    "an initializer of a negative shape": set_attr(
        "variable", "initial", {"init": ["normal", [-4, -3], "float32", 0.0, 1.0, [0, 0]]}
    ),
    "an initializer of a negative stream": set_attr(
        "variable", "initial", {"init": ["normal", [4, 3], "float32", 0.0, 1.0, [-1, 0]]}
    ),
    "an initializer of a part of another shape": set_attr(
        "variable", "initial", part_of([9, 3], [[0, 3, 1, []], [0, 3, 1, []]])
    ),
    "an initializer of a part beyond the whole": set_attr(
        "variable", "initial", part_of([3, 3], [[0, 4, 1, []], [0, 3, 1, []]])
    ),
    "an initializer of overlapping ranges": set_attr(
        "variable", "initial", part_of([9, 3], [[0, 4, 1, [[0, 2], [1, 3]]], [0, 3, 1, []]])
    ),
    "an initializer of ranges beyond the whole": set_attr(
        "variable", "initial", part_of([9, 3], [[0, 4, 1, [[0, 2], [8, 10]]], [0, 3, 1, []]])
    ),
    "an initializer of too few parts": set_attr(
        "variable", "initial", part_of([9, 3], [[0, 4, 1, []]])
    ),
    "no initial value": set_attr("variable", "initial", None),
    "a size that is no polynomial": set_attr("placeholder", "shape", [{"dim": [["n"]]}, 4]),
    "a size of an unknown function": set_attr(
        "placeholder", "shape", [{"dim": [[[["eval", 1, 2]], 1]]}, 4]
    ),
    "an assignment to no variable": lambda p: node_of(p, "assign")[INPUTS].__setitem__(
        0, node_of(p, "assign")[INPUTS][1]
    ),
    "sizes within sizes": set_attr("reshape", "shape", [[[[12]]]]),
    "a size that is a truth value": set_attr("reshape", "shape", [True]),
    "an edge that is no number": set_attr("send", "edge", "x'); import os; ('"),
    "a target that is no device": set_attr("send", "target", "the moon"),
    "a device that is none": set_part("device", "tpu"),
    "a feed that nobody reads": set_part("feeds", ["x", "y"]),
    "a feed that is missing": set_part("feeds", []),
    "a fetch that no output needs": lambda p: (
        p["fetches"].update({"9": [0, 0]}) or p["outputs"].clear()
    ),
    "fetches without names": set_part("fetches", [1]),
    "a name that is a number": set_node("tanh", NAME, 3),
    "a name twice": lambda p: [node.__setitem__(UNIQUE, "x") for node in p["nodes"]],
    "a line that is no number": set_node("tanh", LOCATION, ["f.py", "x"]),
    "an infinite line": set_node("tanh", LOCATION, ["f.py", float("inf")]),
    "a file's name that is none": set_node("tanh", LOCATION, ["f\0.py", 1]),
    "no location": set_node("tanh", LOCATION, None),
    "nodes that are no list": set_part("nodes", 7),
    "a node that is no list": set_part("nodes", [7]),
    "an op that is no text": set_node("tanh", OP, ["tanh"]),
    "nothing but a device": lambda p: [p.pop(k) for k in list(p) if k != "device"],
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_malformed_graph_is_refused(what: str) -> None:
    header, buffers = encode_spoiled(WRONG[what])
    with pytest.raises(ProtocolError):
        decode(header, buffers)


TOO_MUCH: dict[str, Callable[[Any], Any]] = {
    "an op that is not registered": set_node("tanh", OP, "system"),
    "an initializer of a terabyte": lambda p: node_of(p, "variable")[ATTRS].update(
        initial=HUGE, shape=[10**12]
    ) or p.update(outputs=[[1, 0]], fetches={}),
    "a tensor of an exabyte": set_attr("placeholder", "shape", [10**9, 10**9]),
    "a shape of too many axes": set_attr("placeholder", "shape", [1] * 65),
    "a shape of too many terms": set_attr(
        "placeholder", "shape", [{"dim": [[[f"n{i}"], 1] for i in range(10)]}] * 40
    ),
    "a size of too many terms": set_attr(
        "placeholder", "shape", [{"dim": [[[f"n{i}"], 1] for i in range(1000)]}]
    ),
    "a very long attribute": set_attr("reshape", "shape", [2**62] * 100_000),
    "too many nodes": set_part("nodes", [None] * (LIMITS.nodes + 1)),
    "ten million nodes": set_part("nodes", [None] * 10_000_000),
}  # fmt: skip


@pytest.mark.parametrize("what", TOO_MUCH)
def test_a_graph_beyond_the_limits_is_refused_before_anything_is_made(what: str) -> None:
    header, buffers = encode_spoiled(TOO_MUCH[what])
    with pytest.raises(GraphLimitError):
        decode(header, buffers)


def test_variables_that_fit_alone_but_not_together_are_refused() -> None:
    size = host_memory() // 4 // 4
    v = [gf.variable(gf.init.zeros((size,)), name=f"v{i}") for i in range(5)]
    header, buffers = encode([make_partition(*v)])
    with pytest.raises(GraphLimitError, match=r"its variables take .* GB"):
        decode(header, buffers)
    small = encode([make_partition(gf.variable(np.zeros(10), name="v"))])
    assert len(decode(*small, GraphLimits(nbytes=80))) == 1
    with pytest.raises(GraphLimitError):
        decode(*small, GraphLimits(nbytes=79))


@pytest.mark.parametrize("forms", [0, 15, 1025, -1, True, 16.0, "16", None, [16]])
def test_a_program_is_kept_for_a_sane_number_of_sizes(forms: Any) -> None:
    header, buffers = message()
    header[0]["forms"] = forms
    with pytest.raises(ProtocolError, match=r"kept for .* combinations of sizes; they are 16 to"):
        decode(msgpack.packb(header), buffers)


@pytest.mark.parametrize("flush", [0, 1, None, "yes", [True]])
def test_whether_denormal_numbers_count_as_zero_is_a_bool(flush: Any) -> None:
    header, buffers = message()
    header[0]["flush_denormals"] = flush
    with pytest.raises(ProtocolError, match=r"flush_denormals .*, no bool"):
        decode(msgpack.packb(header), buffers)


def loop(test: Callable[[Any], Any], body: Callable[[Any], Any], **more: Any) -> Any:
    return gf.while_loop(test, body, gf.constant(np.float32(1)), **more)


def nest_scans(lengths: Sequence[int], x: Any) -> Any:
    """Loops in loops, which add one each time."""
    if not lengths:
        return x + 1.0
    return gf.scan(lambda c, _: (nest_scans(lengths[1:], c), ()), x, length=lengths[0])[0]


def on_captured(go: Any) -> Any:
    return loop(lambda v: go, lambda v: v + 1.0)


ENDLESS: dict[str, Callable[[], Any]] = {
    "a condition that is true": lambda: loop(lambda v: gf.constant(True), lambda v: v + 1.0),
    "a condition on what is captured": lambda: on_captured(gf.placeholder("bool", (), name="go")),
    "a body that changes nothing": lambda: loop(lambda v: v > 0.0, lambda v: v),
    "a loop in a loop": lambda: loop(
        lambda v: v < 9.0, lambda v: loop(lambda w: w > 0.0, lambda w: w) + v
    ),
    "loops in loops beyond the limit": lambda: nest_scans([10_000] * 4, gf.constant(np.float32(0))),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_loop_that_cannot_end_is_refused(what: str) -> None:
    part = make_partition(ENDLESS[what]())
    with pytest.raises(GraphLimitError, match=r"cannot end|run 1,000,100,010,000 times"):
        send_over_wire(part)


def test_a_loop_that_may_end_is_taken_on_unless_the_worker_wants_a_bound() -> None:
    while_changes = loop(lambda v: v < 9.0, lambda v: v + 1.0)
    by_chance = loop(lambda v: gf.random.uniform(()) < 0.5, lambda v: v)
    bounded = loop(lambda v: v > 0.0, lambda v: v, max_iterations=5)
    for each in (while_changes, by_chance, bounded, nest_scans([100, 100], gf.constant(1.0))):
        assert send_over_wire(make_partition(each)).graph.nodes
    strict = GraphLimits(iterations=10_100)
    for each in (bounded, nest_scans([100, 100], gf.constant(1.0))):
        assert decode(*encode([make_partition(each)]), strict)
    for each in (while_changes, by_chance, nest_scans([101, 100], gf.constant(1.0))):
        with pytest.raises(GraphLimitError, match=r"max_iterations|limit is 10,100"):
            decode(*encode([make_partition(each)]), strict)


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"nbytes": -1}, {"iterations": 1.5}])
def test_limits_are_whole_numbers(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="whole number"):
        GraphLimits(**wrong)


def test_a_graph_that_no_worker_takes_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphflow.runtime.wire.graph_codec.LIMITS", GraphLimits(nodes=3))
    x = gf.placeholder("float32", (), name="x")
    with pytest.raises(GraphLimitError, match=r"has 4 nodes, and workers take 3"):
        encode([make_partition(gf.exp(gf.tanh(gf.sin(x))))])


BOMBS = {
    "maps": b"\xdd\x00\x0f\x42\x00" + b"\x80" * 1_000_000,
    "maps in lists": b"\x91" + (b"\xdc\xff\xff" + b"\x80" * 0xFFFF) * 300,
    "lists": b"\xdd\x00\x0f\x42\x00" + b"\x90" * 1_000_000,
    "a header too long": bytes(300 << 20),
    "a claim of many": b"\xdd\xff\xff\xff\xff",
    "a map with a key twice": b"\x91\x82\xa1a\x01\xa1a\x02",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_header_that_unpacks_to_much_is_refused_in_little_memory(what: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(BOMBS[what], [], GraphLimits(nodes=10_000))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("depth", [100, 400, 10_000, 1_000_000])
def test_nesting_without_end_is_refused(depth: int) -> None:
    header = b"\x91" * depth + b"\xc0"
    with pytest.raises(ProtocolError):
        decode(header, [])


@pytest.mark.parametrize("depth", [10, 200, 400])
def test_a_deeply_nested_attribute_is_refused(depth: int) -> None:
    value: Any = 12
    for _ in range(depth):
        value = [value]
    with pytest.raises(ProtocolError):
        decode(*encode_spoiled(set_attr("reshape", "shape", value)))


# Fuzzing ----------------------------------------------------------------------------------------

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from(["", "x", "n", "float32", "normal", "add", "variable", "/worker:0/cpu:0"])
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["array", "dim", "init", "shape", "device", "nodes", "value"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=8,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a structure."""
    found, stack = [], [value]
    while stack:
        each = stack.pop()
        keys = range(len(each)) if isinstance(each, list) else list(each)
        for key in keys:
            found.append((each, key))
            if isinstance(each[key], list | dict):
                stack.append(each[key])
    return found


MESSAGE = message()


@given(st.data())
@settings(max_examples=200)  # make fuzz has a million
def test_any_structure_in_any_place_gives_a_partition_or_a_protocol_error(
    data: st.DataObject,
) -> None:
    header, buffers = copy.deepcopy(MESSAGE[0]), MESSAGE[1]
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(header)))
        container[key] = data.draw(plain)
    with contextlib.suppress(ProtocolError):
        decode(msgpack.packb(header), buffers, GraphLimits(nbytes=10**6))


@given(st.data())
@settings(max_examples=200)  # make fuzz has a million
def test_any_bytes_give_a_partition_or_a_protocol_error(data: st.DataObject) -> None:
    header = bytearray(msgpack.packb(MESSAGE[0]))
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(header)))
    for spoilt in (bytes(header), bytes(header[:cut]), bytes(header) + b"\x00"):
        with contextlib.suppress(ProtocolError):
            decode(spoilt, MESSAGE[1], GraphLimits(nbytes=10**6))


@pytest.mark.every(2)
@pytest.mark.parametrize("op", [op for op in REGISTRY.values() if op.samples], ids=lambda o: o.name)
def test_no_shape_rule_makes_more_of_hostile_attributes_than_a_protocol_error(op: Op) -> None:
    rng = np.random.default_rng(0)
    hostile = [None, True, -1, 2**63, 1e308, float("nan"), "", "x", [], [[]], [2**63] * 3, [-1] * 9,
               {"dim": [[["n"], 1]]}, {"array": 0}]  # fmt: skip
    sample = op.samples[0]
    xs = [gf.placeholder(s.dtype, s.shape, name=f"x{i}") for i, s in enumerate(sample.inputs)]
    outputs = op(*xs, **sample.attrs)
    header, _ = encode([make_partition(*(outputs if isinstance(outputs, tuple) else (outputs,)))])
    node = next(i for i, n in enumerate(msgpack.unpackb(header)[0]["nodes"]) if n[0] == op.name)
    for name in sample.attrs:
        for value in hostile:
            spoilt = msgpack.unpackb(header)
            spoilt[0]["nodes"][node][ATTRS][name] = value
            with contextlib.suppress(ProtocolError):
                decode(msgpack.packb(spoilt), [rng.random(3)], GraphLimits(nbytes=10**6))
