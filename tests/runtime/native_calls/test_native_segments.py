"""Runs of kernels as one native call: the bits of the nodes one by one, wherever operands are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import OpError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.kernels.jit.call_table_driver import copy_task, driver_sources
from graphflow.ops.kernels.jit.compiler import compiler
from graphflow.runtime.native_calls.native_segments import NativeSegment
from graphflow.runtime.program.program import Program
from graphflow.runtime.program.span_recorder import Span
from tests.properties.random_graphs import has_same_bits, random_case, reference
from tests.runtime.programs import CPU, compile_program, initial_state, make_partition

pytestmark = pytest.mark.usefixtures("jit")


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)


def segments(program: Program) -> list[NativeSegment]:
    return program._code.compute.segments


def lines(program: Program) -> int:
    """Lines of the compute part but for feeds."""
    return len(program._code.compute.lines)


def test_kernels_that_stand_together_are_one_native_call() -> None:
    x = gf.placeholder("float32", (4, 3), name="x")
    y = x
    for i in range(6):
        y = gf.reshape(gf.tanh(y) * (1.0 + i), (3, 4) if y.shape[0] == 4 else (4, 3))
    program = compile_program(make_partition(y))
    assert lines(program) == 1
    (segment,) = segments(program)
    assert len(segment.calls) == 6
    value = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
    have = program.compute({"x": value}, 1, 0)["0"]
    assert has_same_bits(have, evaluate([y], {x: value})[0])


@pytest.mark.parametrize("length", [1, 3])
def test_traced_calls_of_a_segment_are_spans_of_their_nodes(length: int) -> None:
    x = gf.placeholder("float32", (4, 3), name="x")
    y = x
    for i in range(length):
        y = gf.reshape(gf.tanh(y, name=f"t{i}"), (3, 4) if y.shape[0] == 4 else (4, 3))
    program = compile_program(make_partition(y))
    value = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
    spans: list[Span] = []
    traced = program.compute({"x": value}, 1, 0, spans)["0"]
    assert has_same_bits(traced, program.compute({"x": value}, 2, 0)["0"])
    told = [name for track, name, _, _ in spans if track == CPU]
    assert [n for n in told if n.startswith("t")] == [f"t{i}" for i in range(length)]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_generated_and_plain_kernels_agree_on_random_graphs(seed: int) -> None:
    """As exactly as other roundings of exp and sums of other order allow."""
    case = random_case(seed)
    results = []
    for setting in ("on", "off"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRAPHFLOW_JIT", setting)
            part = make_partition(*case.fetches)
            state = initial_state(part)
            named = {case.graph.names.get(t.node, "unused"): a for t, a in case.feeds(0).items()}
            batch = next((a.shape[0] for a in named.values() if a.ndim), 3)
            program = compile_program(part, state, {"batch": batch})
            results.append(program.compute(named, 1, 0))
            program.commit()
            results[-1].update(state)
    for name, have in results[0].items():
        want = results[1][name]
        assert have.dtype == want.dtype
        if have.dtype.kind == "f":
            np.testing.assert_allclose(have, want, rtol=2e-3, atol=2e-4, err_msg=f"{seed} {name}")


def test_what_is_fed_may_lie_anywhere() -> None:
    x = gf.placeholder("float32", (4, 6), name="x")
    y = gf.exp(gf.reshape(gf.tanh(x), (6, 4))) * 2.0
    program = compile_program(make_partition(y))
    base = np.linspace(-2, 2, 400, dtype="float32")
    want = None
    for start in (0, 1, 3, 7):
        value = base[start : start + 24].reshape(4, 6)
        want = evaluate([y], {x: value})[0]
        assert has_same_bits(program.compute({"x": value}, 1, 0)["0"], want)
    columns = np.asfortranarray(base[7:31].reshape(4, 6))
    assert has_same_bits(program.compute({"x": columns}, 1, 0)["0"], want)


def test_a_feed_of_another_shape_or_dtype_never_reaches_a_native_call() -> None:
    x = gf.placeholder("float32", (4, 6), name="x")
    program = compile_program(make_partition(gf.tanh(x)))
    for wrong in (np.zeros((3, 6), "float32"), np.zeros((4, 6)), np.zeros(24, "float32")):
        with pytest.raises((ShapeError, OpError), match=r"expected float32\(4, 6\), got"):
            program.compute({"x": wrong}, 1, 0)


def test_a_fed_value_that_the_commit_reads_is_there_until_then() -> None:
    v = gf.variable(np.ones(1000, "float32"), name="v")
    x = gf.placeholder("float32", (1000,), name="x")
    part = make_partition(gf.assign(v, v - 0.5 * x))
    state = initial_state(part)
    program = compile_program(part, state)
    value = np.full(1000, 2.0, "float32")
    program.compute({"x": value}, 1, 0)
    del value
    junk = [np.full(1000, 9.0, "float32") for _ in range(50)]
    program.commit()
    assert state["v"].tolist() == [0.0] * 1000 and len(junk) == 50


def test_a_call_of_native_kernels_joins_what_is_around_it() -> None:
    @gf.function
    def layer(h: Any) -> Any:
        return gf.tanh(h) + 1.0, h

    x = gf.placeholder("float32", (5,), name="x")
    y, again = layer(gf.reshape(gf.exp(x), (5,)))
    z, _ = layer(y)
    program = compile_program(make_partition(z, again, y))
    assert lines(program) == 1
    value = np.linspace(-1, 1, 5, dtype="float32")
    have = program.compute({"x": value}, 1, 0)
    want = evaluate([z, again, y], {x: value})
    assert all(has_same_bits(have[str(i)], want[i]) for i in range(3))


def test_a_copy_copies_any_number_of_bytes() -> None:
    name, text = copy_task(0).name, copy_task(0).text
    function = compiler().function(name, text)
    for count in (0, 1, 31, 32, 33, 100, 257):
        source = np.arange(300, dtype=np.uint8)
        target = np.full(300, 255, np.uint8)
        table = np.array([source[3:].ctypes.data, target[5:].ctypes.data], np.uint64)
        function.holding_gil(table.ctypes.data, None, 0, count)
        assert target[5 : 5 + count].tolist() == source[3 : 3 + count].tolist()
        assert (target[:5] == 255).all() and (target[5 + count :] == 255).all()


def test_the_driver_is_compiled_once_for_all_programs() -> None:
    x = gf.placeholder("float32", (7,), name="x")
    compile_program(make_partition(gf.tanh(x)))
    before = compiler().compiled
    compiler().functions(driver_sources())
    compile_program(make_partition(gf.tanh(x)))
    assert compiler().compiled == before


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_segments_of_random_graphs_give_the_bits_of_the_interpreter(seed: int) -> None:
    case = random_case(seed)
    want = reference(case, 1)
    part = make_partition(*case.fetches)
    named = {case.graph.names.get(t.node, "unused"): a for t, a in case.feeds(0).items()}
    batch = next((a.shape[0] for a in named.values() if a.ndim), 3)
    program = compile_program(part, initial_state(part), {"batch": batch})
    for name, array in program.compute(named, 1, 0).items():
        assert has_same_bits(array, want.fetched[0][int(name)]), (seed, name)
