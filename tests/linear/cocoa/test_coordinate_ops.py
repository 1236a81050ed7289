"""Local steps on a part of a table, and the orders in which they visit coordinates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from graphflow.ir.op import REGISTRY
from graphflow.linear.cocoa import part_kernels
from graphflow.linear.loops import coordinate_orders
from graphflow.linear.losses import Loss
from graphflow.linear.problem import LinearProblem, certify
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from tests.linear.problems import LOSSES, random_problem


def order_of(position: int, steps: int, count: int, seed: int = 3) -> Any:
    made, after = REGISTRY["coordinate_order"].run(
        np, [np.asarray(position), np.zeros((steps, 0))], {"count": count, "seed": seed}
    )
    assert int(after) == position + steps
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 65, 1000])
def test_an_order_visits_each_coordinate_once_before_it_visits_one_again(count: int) -> None:
    order = order_of(0, 3 * count, count).reshape(3, count)
    assert (np.sort(order, axis=1) == np.arange(count)).all()
    if count > 6:
        assert len({tuple(each) for each in order}) == 3


def test_an_order_is_the_same_in_one_piece_and_in_several() -> None:
    pieces = [order_of(start, 10, 17) for start in range(0, 60, 10)]
    assert (np.concatenate(pieces) == order_of(0, 60, 17)).all()
    assert (order_of(0, 60, 17, seed=4) != order_of(0, 60, 17)).any()


def test_orders_as_machine_code_are_those_of_python() -> None:
    fast, slow = np.zeros(50, np.int64), np.zeros(50, np.int64)
    native(coordinate_orders, "write_order")(fast, 1_000_003, 23, 5)
    coordinate_orders.write_order(slow, 1_000_003, 23, 5)
    assert (fast == slow).all()


def test_all_permutations_of_four_coordinates_come_about_as_often() -> None:
    found = np.unique([order_of(0, 4, 4, seed) for seed in range(2400)], axis=0, return_counts=True)
    assert len(found[0]) == 24
    assert found[1].min() > 60


def pass_rows(problem: LinearProblem, order: Any, beta: Any, w: Any, sigma: float = 1.0) -> Any:
    x = problem.x
    dense = x.toarray() if problem.is_sparse else x
    matrix = [x.data, x.indices, x.indptr] if problem.is_sparse else [x]
    squares = (dense**2).sum(axis=1) + problem.bias**2
    return REGISTRY["coordinate_pass"].run(
        np, [beta, w, order, problem.y, problem.c, squares, *matrix],
        {"axis": "rows", "loss": problem.loss.code, "parameter": problem.loss.parameter, "l1": 0.0,
         "l2": problem.l2, "sigma": sigma, "bias": problem.bias, "is_positive": False},
    )  # fmt: skip


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_steps_along_rows_solve_a_problem_of_each_loss(loss: Loss, is_sparse: bool) -> None:
    problem = random_problem(1, loss, l2=2.0, bias=0.5, is_sparse=is_sparse)
    beta, w = np.zeros(problem.rows), np.zeros(problem.columns + 1)
    order = np.tile(np.arange(problem.rows), 400)
    beta, w = pass_rows(problem, order, beta, w)
    assert certify(problem, problem.correlate(beta) / 2.0, 0.0, beta).relative_gap < 1e-6
    assert np.allclose(w, problem.correlate(beta) / 2.0)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_steps_along_columns_solve_a_lasso(is_sparse: bool) -> None:
    problem = random_problem(2, LOSSES[0], l1=1.0, has_intercept=True)
    x, c = problem.x, problem.c
    means = c @ x / c.sum()
    squares = c @ x**2 - c.sum() * means**2
    start = problem.y - c @ problem.y / c.sum()
    rows = sp.csr_matrix(x.T)
    matrix = [rows.data, rows.indices, rows.indptr] if is_sparse else [np.ascontiguousarray(x.T)]
    w, residual = REGISTRY["coordinate_pass"].run(
        np,
        [np.zeros(problem.columns), start, np.tile(np.arange(problem.columns), 3000), means, c,
         squares, *matrix],
        {"axis": "columns", "loss": 0, "parameter": 0.0, "l1": 1.0, "l2": 0.0, "sigma": 1.0,
         "bias": 0.0, "is_positive": False},
    )  # fmt: skip
    b = float(c @ (problem.y - x @ w) / c.sum())
    assert np.allclose(residual, problem.y - x @ w - b)
    assert certify(problem, w, b).relative_gap < 1e-8


@pytest.mark.parametrize("is_sparse", [False, True])
def test_steps_outside_of_the_part_are_refused(is_sparse: bool) -> None:
    problem = random_problem(3, LOSSES[0], l2=1.0, is_sparse=is_sparse)
    beta, w = np.zeros(problem.rows), np.zeros(problem.columns + 1)
    for row in (-1, problem.rows):
        with pytest.raises(IndexError, match=f"{problem.rows}"):
            pass_rows(problem, np.array([0, row]), beta, w)


def test_entries_outside_of_the_matrix_are_refused() -> None:
    matrix = [np.ones(3), np.array([0, 1, 2]), np.array([0, 1, 3])]
    ones, w = np.ones(2), np.zeros(3)
    attrs = {"axis": "rows", "loss": 0, "parameter": 0.0, "l1": 0.0, "l2": 1.0, "sigma": 1.0,
             "bias": 0.0, "is_positive": False}  # fmt: skip
    with pytest.raises(IndexError, match="outside of 2 columns"):
        REGISTRY["coordinate_pass"].run(
            np, [ones, w, np.array([0, 1]), ones, ones, ones, *matrix], attrs
        )


def test_row_offsets_that_fall_are_refused_before_a_product_reads_beyond_the_entries() -> None:
    matrix = [np.ones(2), np.array([0, 1], np.int32), np.array([0, 1, 0])]
    sums = {"axis": "rows", "loss": 0, "parameter": 0.0, "l1": 0.0, "bias": 0.0,
            "is_positive": False}  # fmt: skip
    with pytest.raises(IndexError, match="visits row 1 of 2"):
        part_kernels.add_certificate(
            np.ones(2), np.ones(3), np.ones(2), np.ones(2), *matrix, **sums
        )
