"""Determinants against numpy, and their gradients where matrices are singular."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import CheckError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.transforms.reverse_mode import gradients
from tests.ops.matrices.linalg.test_solve import (
    DTYPES,
    batches,
    close,
    draw_regular_matrices,
    sizes,
)


@given(sizes, batches, st.sampled_from(DTYPES))
def test_determinants_are_numpys(n: int, batch: tuple[int, ...], dtype: str) -> None:
    a = draw_regular_matrices(np.random.default_rng(n), (*batch, n, n), dtype) / (4 * n)
    det, sign, log = evaluate([gf.linalg.det(a), *gf.linalg.slogdet(a)])
    close(det, np.asarray(np.linalg.det(a)), dtype)
    wanted = np.linalg.slogdet(a)
    close(sign, np.asarray(wanted[0]), dtype)
    close(log, np.asarray(wanted[1]), dtype)
    assert (log.dtype, det.dtype, sign.dtype) == (a.real.dtype, a.dtype, a.dtype)


def test_the_logarithm_does_not_overflow_and_singular_matrices_have_minus_infinity() -> None:
    large = 1e200 * np.eye(4)
    large[0, 0] = -1.0
    sign, log, none, least = evaluate(
        [*gf.linalg.slogdet(large), *gf.linalg.slogdet(np.ones((2, 2)))]
    )
    assert (sign, none, least) == (-1, 0, -np.inf)
    assert log == pytest.approx(600 * np.log(10))


def test_the_determinant_of_a_singular_matrix_has_its_cofactors_for_a_gradient() -> None:
    x = gf.placeholder("float64", (3, 3))
    (slope,) = gradients(gf.linalg.det(x), [x])
    a = np.array([[1.0, 2, 3], [2, 4, 6], [0, 1, 5]])
    (value,) = evaluate([slope], {x: a})
    minors = [
        [(-1) ** (i + j) * np.linalg.det(np.delete(np.delete(a, i, 0), j, 1)) for j in range(3)]
        for i in range(3)
    ]
    np.testing.assert_allclose(value, minors, atol=1e-12)


# Bad input --------------------------------------------------------------------------------------


def test_the_gradient_of_the_logarithm_at_a_singular_matrix_names_it() -> None:
    x = gf.placeholder("float64", (None, 3, 3))
    (slope,) = gf.gradients(gf.linalg.slogdet(x)[1], [x])
    batch = np.stack([np.eye(3), np.ones((3, 3))])
    wanted = r"made at .*test_determinant\.py:\d+.*the matrix at index \(1,\).*is singular"
    with gf.Session() as session, pytest.raises(CheckError, match=wanted):
        session.run(slope, {x: batch})


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.linalg.det(np.ones((2, 3))), ShapeError, r"square.*\(2, 3\)"),
        (lambda: gf.linalg.det(np.ones((2, 2), "int32")), DTypeError, "int32"),
        (lambda: gf.linalg.slogdet(np.ones((2, 3))), ShapeError, "square"),
        (lambda: gf.linalg.slogdet(np.ones(2)), ShapeError, "matrices"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_determinant\.py:\d+.*{words}"):
        call()
