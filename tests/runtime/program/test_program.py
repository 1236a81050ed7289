from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import CheckError, OpError, StepTimeout
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Op, Tensor, register
from graphflow.runtime.memory.backend import CpuBackend
from graphflow.runtime.partitioning.partition import partition
from graphflow.runtime.program.program import Program
from graphflow.runtime.program.span_recorder import Span
from tests.properties.random_graphs import has_same_bits, random_case, reference
from tests.runtime.programs import (
    CPU,
    OTHER,
    Mailbox,
    compile_program,
    initial_state,
    make_partition,
    place_nodes,
)


class CountingBackend(CpuBackend):
    """Remembers the memory it gave, other than copies of what came in."""

    def __init__(self) -> None:
        super().__init__(1)
        self.arenas: list[np.ndarray[Any, Any]] = []
        self._plain = CpuBackend(1)

    def empty(self, nbytes: int) -> np.ndarray[Any, Any]:
        self.arenas.append(super().empty(nbytes))
        return self.arenas[-1]

    def to_device(self, array: Any) -> np.ndarray[Any, Any]:
        return self._plain.to_device(array)


@pytest.fixture
def fragile() -> Iterator[Op]:
    """An op whose kernel fails where its input is negative."""

    def kernel(xp: Any, x: Any) -> Any:
        if (x < 0).any():
            raise FloatingPointError("below zero")
        return x + 1

    op = register(Op("fragile", infer=lambda x: x, kernel=kernel))
    yield op
    del REGISTRY["fragile"]


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def feeds(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.full((2, 3), value, np.float32)}


# Memory -----------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.sampled_from([0x00, 0xFF, 0xCD]))
@settings(max_examples=40)
def test_what_the_arena_held_before_a_step_does_not_matter(seed: int, poison: int) -> None:
    case = random_case(seed)
    part = make_partition(*case.fetches)
    backend = CountingBackend()
    state = initial_state(part)
    steps = [case.feeds(i) for i in range(3)]
    programs: dict[int, Program] = {}
    want = reference(case, 3)
    for i, arrays in enumerate(steps):
        named = {part_name(case.graph, t): a for t, a in arrays.items()}
        batch = next(a.shape[0] for a in arrays.values() if a.ndim)
        if batch not in programs:
            programs[batch] = compile_program(part, state, {"batch": batch}, backend)
        for arena in backend.arenas:
            arena.fill(poison)  # 0xFF…: NaN
        have = programs[batch].compute(named, i + 1, i)
        programs[batch].commit()
        for name, array in have.items():
            assert has_same_bits(array, want.fetched[i][int(name)]), (seed, i, name)


def part_name(graph: Graph, tensor: Tensor) -> str:
    return graph.names.get(tensor.node, "unused")


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_the_predicted_peak_is_what_is_allocated(seed: int) -> None:
    part = make_partition(*random_case(seed).fetches)
    backend = CountingBackend()
    program = compile_program(part, bindings={"batch": 5}, backend=backend)
    specs = {t: t.spec.bind({"batch": 5}) for n in part.graph.nodes for t in n.outputs}

    def total(op: str) -> int:
        return sum(int(specs[n.outputs[0]].nbytes) for n in part.graph.of_op(op))  # type: ignore[call-overload]

    assert [a.nbytes for a in backend.arenas] == [program.memory.arena]
    assert program.memory.variables == total("variable")
    assert program.memory.constants == total("constant")
    assert program.memory.feeds == total("placeholder")
    assert backend.shared_scratch(0).nbytes == program.memory.shared_scratch
    assert program.memory.resident == program.memory.arena + program.memory.scratch + sum(
        map(total, ("variable", "constant", "placeholder", "recv"))
    )


def test_fetched_arrays_belong_to_the_caller() -> None:
    v = gf.variable(np.zeros(3, "float32"), name="v")
    part = make_partition(v, v + 1.0, gf.assign(v, v + 2.0))
    program = compile_program(part)
    first = program.compute({}, 1, 0)
    program.commit()
    for array in first.values():
        array.fill(99)
    second = program.compute({}, 2, 1)
    assert [second[str(i)].tolist() for i in range(3)] == [[2] * 3, [3] * 3, [4] * 3]


def test_computing_changes_no_state_until_it_commits() -> None:
    v = gf.variable(np.zeros(3, "float32"), name="v")
    part = make_partition(REGISTRY["group"](gf.assign(v, v + 1.0)))
    state = initial_state(part)
    program = compile_program(part, state)
    program.compute({}, 1, 0)
    program.compute({}, 2, 0)
    assert state["v"].tolist() == [0, 0, 0]
    program.commit()
    assert state["v"].tolist() == [1, 1, 1]


def test_a_fed_or_received_value_that_is_assigned_is_taken_in_the_commit() -> None:
    v = gf.variable(np.zeros((2, 3), "float32"), name="v")
    w = gf.variable(np.zeros((2, 3), "float32"), name="w")
    x = gf.placeholder("float32", (2, 3), name="x")
    y = gf.exp(x, name="y")
    graph = Graph([REGISTRY["group"](gf.assign(v, x), gf.assign(w, w - y))])
    channel = Mailbox()
    parts = partition(graph, place_nodes(graph, y=OTHER))
    there = compile_program(parts[OTHER], channel=channel)
    state = initial_state(parts[CPU])
    here = compile_program(parts[CPU], state, channel=channel)
    for step in (1, 2):
        there.compute(feeds(0.0), step, 0)
        here.compute(feeds(5.0), step, 0)
        here.commit()
    assert (state["v"] == 5).all() and (state["w"] == -2).all()
    assert here.memory.recvs == 24


# Plain kernels, tracing -------------------------------------------------------------------------


def test_jit_off_runs_each_ops_plain_kernel_and_is_read_when_a_program_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    op = Op(
        "spy",
        infer=lambda x: x,
        kernel=lambda xp, x: calls.append("kernel") or x * 2,
        into=lambda xp, out, x: calls.append("into") or xp.multiply(x, 2, out=out),
    )
    part = make_partition(op(gf.placeholder("float32", (2, 3), name="x")))
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)
    fast = compile_program(part)
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    plain = compile_program(part)
    monkeypatch.delenv("GRAPHFLOW_JIT")
    results = [program.compute(feeds(3.0), 1, 0)["0"] for program in (fast, plain)]
    assert calls == ["into", "kernel"]
    assert has_same_bits(*results)


def test_a_traced_step_gives_the_same_and_a_span_for_each_node() -> None:
    x = gf.placeholder("float32", (2, 3), name="x")
    part = make_partition(gf.sum(gf.tanh(x, name="t"), name="s"))
    program = compile_program(part)
    spans: list[Span] = []
    traced = program.compute(feeds(0.3), 1, 0, spans)
    assert has_same_bits(traced["0"], program.compute(feeds(0.3), 2, 0)["0"])
    assert [(track, name) for track, name, _, _ in spans] == [(CPU, n) for n in ("x", "t", "s")]
    times = [t for _, _, start, end in spans for t in (start, end)]
    assert times == sorted(times)


# Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
def test_a_failure_names_node_line_device_and_the_shapes_of_its_inputs(
    fragile: Op, traced: bool
) -> None:
    x = gf.placeholder("float32", ("n", 3), name="x")
    here = line() + 1
    y = fragile(gf.negative(gf.tanh(x)), name="culprit")
    program = compile_program(make_partition(gf.exp(y) + 1.0), bindings={"n": 2})
    with pytest.raises(OpError) as caught:
        program.compute(feeds(1.0), 1, 0, [] if traced else None)
    text = str(caught.value)
    assert text == (
        f"fragile 'culprit' (made at {__file__}:{here}) failed on {CPU}: "
        "FloatingPointError: below zero; its inputs are [float32(2, 3)]"
    )
    assert isinstance(caught.value.__cause__, FloatingPointError)


@pytest.mark.parametrize("traced", [False, True])
def test_every_node_of_a_program_is_the_one_its_failure_names(fragile: Op, traced: bool) -> None:
    for position in range(5):
        x = gf.placeholder("float32", (2, 3), name="x")
        y = x
        for i in range(5):
            y = fragile(gf.negative(gf.abs(y)), name="culprit") if i == position else gf.exp(y)
        program = compile_program(
            make_partition(gf.assign(gf.variable(np.zeros((2, 3), "float32")), y))
        )
        with pytest.raises(OpError, match="fragile 'culprit'"):
            program.compute(feeds(1.0), 1, 0, [] if traced else None)


@pytest.mark.parametrize("traced", [False, True])
def test_a_false_check_stays_a_check_error_with_its_message(traced: bool) -> None:
    x = gf.placeholder("float32", (2, 3), name="x")
    y = gf.debug.check(x, x > 0, "positive", name="guard")
    program = compile_program(make_partition(y))
    with pytest.raises(CheckError, match=r"check 'guard' .*positive.*false for 6 of 6") as caught:
        program.compute(feeds(-1.0), 1, 0, [] if traced else None)
    assert "CheckError" not in str(caught.value)


def test_a_program_goes_on_after_a_failure(fragile: Op) -> None:
    x = gf.placeholder("float32", (2, 3), name="x")
    program = compile_program(make_partition(fragile(x)))
    with pytest.raises(OpError):
        program.compute(feeds(-1.0), 1, 0)
    assert (program.compute(feeds(1.0), 2, 0)["0"] == 2).all()


def test_a_wait_that_was_given_up_is_passed_on_as_it_is() -> None:
    class Late(Mailbox):
        def recv(self, step: int, edge: int) -> Any:
            raise StepTimeout("too late")

    x = gf.placeholder("float32", (2, 3), name="x")
    y = gf.exp(x, name="y")
    graph = Graph([gf.tanh(y)])
    program = compile_program(partition(graph, place_nodes(graph, y=OTHER))[CPU], channel=Late())
    with pytest.raises(StepTimeout, match="too late"):
        program.compute({}, 1, 0)


def test_numpy_does_not_warn_of_what_ieee_754_defines(recwarn: pytest.WarningsRecorder) -> None:
    x = gf.placeholder("float32", (2, 3), name="x")
    program = compile_program(
        make_partition(gf.log(x), gf.divide(x, x), gf.exp(x + 1e30), gf.sqrt(x - 1.0))
    )
    program.compute(feeds(0.0), 1, 0)
    large = gf.placeholder("float32", (600, 600), name="x")
    split = compile_program(
        make_partition(large @ large), backend=CpuBackend(3)
    )  # on threads of its own, too
    split.compute({"x": np.full((600, 600), [[np.inf], [-np.inf]] * 300, np.float32)}, 1, 0)
    assert not recwarn.list
