"""Rows in use: what nothing reads is not computed, and bits are those of all rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY
from graphflow.ops.communication.rows_in_use import find_rows_in_use
from graphflow.runtime.memory.backend import CpuBackend
from graphflow.runtime.partitioning.check_modes import RESULTS
from graphflow.runtime.program.generated_call_support import received_tensor_check
from tests.runtime.programs import compile_program, initial_state, make_partition

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: gf.optim.SGD(0.1),
    "adagrad": lambda: gf.optim.Adagrad(0.1),
    "rowwise": lambda: gf.optim.RowwiseAdagrad(0.1),
    "adam": lambda: gf.optim.Adam(0.1, sparse=True),
}
ROWS, WIDTH = 5000, 40  # so many that SGD and Adagrad update rows


class DirtyBackend(CpuBackend):
    """Gives memory that is full of NaN, which are also negative row numbers."""

    def empty(self, nbytes: int) -> np.ndarray[Any, Any]:
        memory = super().empty(nbytes)
        memory[...] = 255
        return memory


def build_training(optimizer: str, lookups: int) -> tuple[gf.Tensor, gf.Tensor]:
    """The loss and the update of a small table."""
    ids = gf.placeholder("int64", (lookups,), name="ids")
    initial = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    rows = gf.nn.embedding(ids, gf.variable(initial, name="table"))
    loss = gf.mean(gf.tanh(rows) ** 2)
    return loss, OPTIMIZERS[optimizer]().minimize(loss)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("jit", ["on", "off"])
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_nothing_wrote_changes_no_bit(
    optimizer: str, jit: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", jit)
    lookups = 3000 if threads > 1 else 300
    part = make_partition(*build_training(optimizer, lookups))
    states = [initial_state(part) for _ in range(2)]
    checked = replace(part, checks=RESULTS)  # computes all rows
    programs = [
        compile_program(part, states[0], backend=DirtyBackend(threads)),
        compile_program(checked, states[1]),
    ]
    random = np.random.default_rng(1)
    for step, distinct in enumerate((lookups, 20, 1, lookups // 2)):
        ids = random.integers(0, distinct, lookups)
        values = [p.compute({"ids": ids}, step, 0) for p in programs]
        for program in programs:
            program.commit()
        assert values[0]["0"].tobytes() == values[1]["0"].tobytes()
        for name, array in states[0].items():
            assert array.tobytes() == states[1][name].tobytes(), name


def test_what_only_an_update_reads_is_limited_and_what_is_fetched_is_not() -> None:
    loss, train = build_training("adagrad", 300)
    graph = make_partition(loss, train).graph
    specs = {t: t.spec for node in graph.nodes for t in node.outputs}
    used = find_rows_in_use(graph, specs)
    (write, _) = graph.of_op("update_rows")
    root = next(n for n in graph.of_op("sqrt"))
    assert used[write.inputs[1]] is used[root.outputs[0]] is write.inputs[3]
    assert all(t not in used for node in graph.of_op("tanh") for t in node.outputs)
    fetched = Graph((*graph.outputs, root.outputs[0]))
    assert root.outputs[0] not in find_rows_in_use(fetched, specs)


def test_rows_beyond_those_in_use_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    part = make_partition(*build_training("adagrad", 300))
    asked: list[int] = []
    op = REGISTRY["take"]
    into = op.into
    assert into is not None

    def count_rows(xp: Any, out: Any, x: Any, indices: Any, **attrs: Any) -> None:
        asked.append(indices.shape[0])
        into(xp, out, x, indices, **attrs)

    monkeypatch.setitem(op.__dict__, "into", count_rows)
    monkeypatch.setitem(op.__dict__, "native", None)
    program = compile_program(part)
    program.compute({"ids": np.arange(300) % 7}, 1, 0)
    assert sorted(set(asked)) == [7, 300] and asked.count(300) == 1  # that of the model


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_a_ragged_edge_brings_zeros_behind_its_rows(counts: list[int]) -> None:
    spec = gf.placeholder("float32", (6, 2)).spec
    recv = REGISTRY["recv"](
        edge=0, source="/worker:1/cpu:0", shape=spec.shape, dtype="float32", ragged=True
    ).node
    check = received_tensor_check(recv, spec)
    short = received_tensor_check(recv, spec, short=True)
    for count in counts:
        rows = np.full((count, 2), count + 1, "float32")
        padded = check(rows)
        assert padded.shape == spec.shape
        assert (padded[:count] == count + 1).all() and not padded[count:].any()
        assert short(rows) is rows
