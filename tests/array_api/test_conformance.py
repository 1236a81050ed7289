"""The functions of the array API standard give numpy's numbers, in the dtypes of the standard."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from tests.array_api import (
    edge_cases,
    elementwise_cases,
    matrix_cases,
    reduction_cases,
    shape_cases,
)
from tests.array_api.case import Case
from tests.array_api.eager_arrays import EagerArray, EagerNamespace

PARTS = (
    elementwise_cases.elementwise, elementwise_cases.operators, reduction_cases.reductions,
    shape_cases.shapes, shape_cases.creation, matrix_cases.matrices, matrix_cases.transforms,
    edge_cases.edges, edge_cases.limits,
)  # fmt: skip
CASES = [case for part in PARTS for case in part()]
GROUPS = {
    name: list(cases)
    for name, cases in groupby(sorted(CASES, key=attrgetter("name")), lambda c: c.name)
}
EAGER = EagerNamespace(gf.array_api)
DEFAULTS = {"float": "real floating", "complex": "complex floating", "int": "integral"}


def flatten(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [leaf for each in result for leaf in flatten(each)]
    return [result]


def check(xp: Any, case: Case, arrays: list[Any]) -> None:
    """Call the function of a case, and compare with numpy's results."""
    with np.errstate(all="ignore"):
        wanted = flatten((case.oracle or case.call)(np, *case.arrays))
    found = flatten(case.call(xp, *arrays))
    assert len(found) == len(wanted), case
    defaults = xp.__array_namespace_info__().default_dtypes()
    for have, want in zip(found, wanted, strict=True):
        kind = DEFAULTS.get(case.dtype)
        dtype = defaults[kind] if kind else np.asarray(want).dtype
        assert (have.dtype, have.shape) == (dtype, np.shape(want)), case
        compare(case, np.asarray(have), np.asarray(want))


def compare(case: Case, have: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    if have.dtype.kind not in "fc":
        assert np.array_equal(have, want), case
        return
    precise = np.finfo(have.dtype).eps * case.loose
    size = min(np.max(np.abs(want), initial=1, where=np.isfinite(want)), 1e3)
    np.testing.assert_allclose(have, want, precise, precise * size, err_msg=str(case))
    if "odd numbers" in case.name and have.dtype.kind == "f":
        zeros = want == 0
        assert np.array_equal(np.signbit(have[zeros]), np.signbit(want[zeros])), case


def check_all(cases: list[Case]) -> None:
    for case in cases:
        check(EAGER, case, [EagerArray(array) for array in case.arrays])


def test_some_calls_of_the_standard_give_the_numbers_of_numpy() -> None:
    check_all(CASES[::97])


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_all_calls_of_the_standard_give_the_numbers_of_numpy(name: str) -> None:
    check_all(GROUPS[name])


@pytest.mark.parametrize("spoilt", ["value", "dtype", "shape"])
def test_the_comparison_sees_wrong_results(spoilt: str) -> None:
    wrong = {
        "value": lambda xp, x: x + (xp is EAGER),
        "dtype": lambda xp, x: xp.astype(x, xp.float64 if xp is EAGER else xp.float32),
        "shape": lambda xp, x: x[:1] if xp is EAGER else x,
    }[spoilt]
    array = np.zeros(2, "float32")
    with pytest.raises(AssertionError):
        check(EAGER, Case(spoilt, wrong, (array,)), [EagerArray(array)])
