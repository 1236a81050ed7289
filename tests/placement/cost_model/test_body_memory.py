"""What bodies take of memory, and what updates do not, as placers see it."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphflow as gf
from graphflow.ir.graph import Graph, bodies
from graphflow.ir.op import Tensor
from graphflow.passes import optimize
from graphflow.placement.cost_model.body_memory import body_memory
from graphflow.placement.cost_model.problem_builder import GraphProblem, build_problem
from tests.placement.speeds import profile

ONE = gf.Cluster.local(workers=1, threads=1)
KIB = 1024


def problem_of(fetches: list[Tensor]) -> GraphProblem:
    return build_problem(optimize(Graph(fetches)), ONE, {}, profiles={0: profile()})


def holder(fetch: Tensor) -> Any:
    (node,) = (n for n in Graph(fetch).nodes if bodies(n))
    return node


def test_a_body_takes_what_is_alive_at_once_and_not_all_that_it_makes() -> None:
    x = gf.placeholder("float32", (256,))

    def chain(h: Tensor) -> Tensor:
        for _ in range(50):
            h = gf.tanh(h)
        return h

    assert body_memory(holder(gf.checkpoint(chain)(x)), {}) == 2 * KIB


def test_a_loop_holds_what_it_carries_twice_and_a_cond_its_larger_branch() -> None:
    x = gf.placeholder("float32", (256,))
    end, _ = gf.scan(lambda h, _: (gf.tanh(h), h[0]), x, gf.zeros((3,)))
    assert 3 * KIB <= body_memory(holder(end), {}) < 4 * KIB
    either = gf.cond(x[0] > 0.0, lambda: gf.tanh(x), lambda: gf.tanh(gf.tanh(x)))
    assert body_memory(holder(either), {}) == 2 * KIB


def test_an_alias_in_a_body_keeps_its_memory_alive() -> None:
    x = gf.placeholder("float32", (256,))

    def alias_and_add(h: Tensor) -> Tensor:
        y = gf.tanh(h)
        view = gf.reshape(y, (16, 16))
        return gf.reshape(gf.tanh(gf.tanh(view)) + view, (256,))

    assert body_memory(holder(gf.checkpoint(alias_and_add)(x)), {}) == 3 * KIB


def test_updates_swept_into_their_variables_take_no_memory() -> None:
    x = gf.placeholder("float32", (4, 64))
    w = gf.variable(np.ones((64, 64), "float32"))
    train = gf.optim.Adam(1e-3).minimize(gf.mean(gf.square(x @ w)))
    made = problem_of([train])
    assert made.problem.output_memory is not None
    taking = {
        made.nodes[i].name: int(size)
        for i, size in enumerate(made.problem.output_memory[: len(made.nodes)])
        if size >= 64 * 64 * 4
    }
    assert list(taking) == ["gradients/matmul"]


def test_a_new_value_that_is_fetched_takes_memory() -> None:
    w = gf.variable(np.ones((64, 64), "float32"))
    new = w * 0.5
    gf.assign(w, new)
    made = problem_of([gf.assign(w, new), new])
    assert made.problem.output_memory is not None
    assert made.problem.output_memory[made.index[new.node]] == 64 * 64 * 4
