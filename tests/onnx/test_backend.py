"""onnx's own backend test suite: every case that is not excluded by name passes."""

from __future__ import annotations

import importlib
import pkgutil
import re
import unittest
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.backend.test import BackendTest, runner
from onnx.backend.test.case import node as operators
from onnx.backend.test.loader import load_model_tests
from onnx.reference.ops import op_pool_common

from graphflow.errors import OnnxError
from graphflow.onnx.backend import Backend
from tests.onnx.exclusions import EXCLUDED
from tests.onnx.models import perceptron

ROOT = Path(__file__).resolve().parents[2]
STORED = ("simple", "pytorch-converted", "pytorch-operator")  # test_light.py runs the networks
_PREFIX = f"{operators.__name__}."
OPERATORS = [
    found.name.removeprefix(_PREFIX)
    for found in pkgutil.walk_packages(operators.__path__, _PREFIX)
    if not found.ispkg
]
"""What makes the node cases: a module for each operator. Making them takes seconds, so it is done
by the process that runs them, not by all that collect tests."""


def suite(cases: Mapping[str, Sequence[Any]]) -> dict[str, type[unittest.TestCase]]:
    """onnx's suite of these cases, by kind: without the copy of each for a device we do not
    claim."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "load_model_tests", lambda kind: cases.get(kind, ()))
        classes: dict[str, type[unittest.TestCase]] = BackendTest(Backend, __name__).test_cases
    for case in classes.values():
        for name in [name for name in vars(case) if name.endswith("_cuda")]:
            delattr(case, name)
    return classes


globals().update(suite({kind: load_model_tests(kind=kind) for kind in STORED}))


def pool(
    padded: Any, x_shape: Any, kernel: Any, strides: Any, out_shape: Any, pooling_type: str,
    pads_required: Any = None, pads: Any = None, dilations: Any = None,
    count_include_pad: int = 0, p: int = 1,
) -> Any:  # fmt: skip
    """What onnx's function of this name gives, which goes from window to window in Python and took
    half the time that all cases take to make: all windows at once, nan where they have no value."""
    rank = len(x_shape) - 2
    zeros = [0] * (2 * rank)
    around, pads = ([*(given if given is not None else zeros)] for given in (pads_required, pads))
    around, pads = (each * (2 * rank) if len(each) == 1 else each for each in (around, pads))
    strides, dilations = (
        [1] * rank if given is None or not len(given) else given for given in (strides, dilations)
    )
    windows = padded
    for d in range(rank):
        span = 1 + (kernel[d] - 1) * dilations[d]
        count = int((x_shape[2 + d] + around[d] + around[d + rank] - span) / strides[d] + 1)
        at = strides[d] * np.arange(count)[:, None] + dilations[d] * np.arange(kernel[d])
        missing = at >= x_shape[2 + d] + pads[d] + pads[d + rank]
        windows = np.take(windows, np.where(missing, 0, at), axis=2 + 2 * d)
        if missing.any():
            windows[(slice(None),) * (2 + 2 * d) + (missing,)] = np.nan
    windows = np.moveaxis(windows, range(3, 3 + 2 * rank, 2), range(-rank, 0))
    windows = windows.reshape(*windows.shape[: 2 + rank], -1)
    if pooling_type == "LPPOOL":
        found = np.nansum(np.abs(windows) ** p, axis=-1) ** (1.0 / p)
    else:
        found = {"AVG": np.nanmean, "MAX": np.nanmax}[pooling_type](windows, axis=-1)
    assert found.shape == (*x_shape[:2], *out_shape)
    return found.astype(padded.dtype)


@cache
def collect_node_cases() -> dict[str, list[Any]]:
    """The node cases of each operator."""
    every = operators._NodeTestCases
    assert not every, "who made them already has hidden whose they are"
    found = {}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # the suite divides by zero on purpose
        patch.setattr(op_pool_common, "pool", pool)
        for name in OPERATORS:
            before = len(every)
            importlib.import_module(f"{_PREFIX}{name}")
            found[name] = every[before:]
    return found


def cases() -> list[Any]:
    """The node cases of all operators."""
    return [case for of_one in collect_node_cases().values() for case in of_one]


def check(operator: str, *, expanded: bool) -> None:
    """An operator's cases pass, other than those that are excluded by name."""
    chosen = [
        case
        for case in collect_node_cases()[operator]
        if ("_expanded" in case.name) == expanded and case.name not in EXCLUDED
    ]
    tests = suite({"node": chosen}).get("OnnxBackendNodeModelTest")
    for case in chosen:
        try:
            getattr(tests, f"{case.name}_cpu")(None)
        except Exception as error:
            error.add_note(case.name)
            raise


@pytest.mark.every(5)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_cases_of_an_operator_pass(operator: str) -> None:
    check(operator, expanded=False)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_same_cases_as_functions_of_other_operators_pass(operator: str) -> None:
    check(operator, expanded=True)


@settings(max_examples=20)
@given(st.data())
def test_windows_are_pooled_all_at_once_as_onnx_pools_each(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))
    kernel, strides, dilations, before, after, more = (
        data.draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))
        for low, high in ((2, 3), (1, 3), (1, 2), (0, 1), (0, 1), (0, 1))
    )
    beyond = [max(a, m) for a, m in zip(after, more, strict=True)]  # no window sees padding only
    kind, counted = data.draw(st.sampled_from(["AVG", "MAX", "LPPOOL"])), data.draw(st.booleans())
    sizes = [3 + (k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    x = np.random.default_rng(data.draw(st.integers(0, 9))).normal(size=(1, 2, *sizes))
    beside = 0.0 if counted and kind != "MAX" else np.nan
    around = [(0, 0), (0, 0), *zip(before, beyond, strict=True)]
    padded = np.pad(x, around, constant_values=beside)
    out = [
        (n + b + a - (1 + (k - 1) * d)) // s + 1
        for n, b, a, k, d, s in zip(sizes, before, beyond, kernel, dilations, strides, strict=True)
    ]
    have, want = (
        each(
            padded, x.shape, kernel, strides, out, kind, [*before, *beyond], [*before, *after],
            dilations, int(counted), p=2,
        )
        for each in (pool, op_pool_common.pool)
    )  # fmt: skip
    np.testing.assert_allclose(have, want, rtol=1e-12)


def test_the_published_list_is_what_is_excluded() -> None:
    page = (ROOT / "docs" / "models" / "onnx.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(test_\w+)` \| (.+?) \|$", page, re.MULTILINE)
    assert dict(rows) == EXCLUDED


def test_more_than_the_cases_with_dtypes_of_numpy_run() -> None:
    plain = [case.name for case in cases() if "_expanded" not in case.name]
    assert len(plain) - len(set(plain) & EXCLUDED.keys()) >= 1221


@pytest.mark.parametrize("name", sorted(EXCLUDED))
def test_what_is_excluded_would_not_pass(name: str) -> None:
    (case,) = [case for case in cases() if case.name == name]
    model = Backend.prepare(case.model)
    with pytest.raises((AssertionError, TypeError)):
        for inputs, expected in case.data_sets:
            outputs = model.run(list(inputs))
            BackendTest.assert_similar_outputs(expected, outputs, case.rtol, case.atol)


def test_a_sequence_that_begins_with_a_scalar_grows_in_a_loop() -> None:
    """Excluded from the suite, which cannot compare it."""
    (case,) = [case for case in cases() if case.name == "test_loop16_seq_none"]
    ((inputs, (expected,)),) = case.data_sets
    (got,) = Backend.run_model(case.model, list(inputs))
    for mine, other in zip(got, expected, strict=True):
        assert mine.dtype == other.dtype and np.array_equal(mine, other)


def test_a_node_runs_by_itself_under_the_opset_that_is_named() -> None:
    node = helper.make_node("Softmax", ["x"], ["y"])
    x = np.arange(8, dtype="float32").reshape(2, 2, 2)
    (new,) = Backend.run_node(node, [x])
    (old,) = Backend.run_node(node, [x], opset_version=11)
    assert np.allclose(new.sum(-1), 1) and np.allclose(old.reshape(2, 4).sum(-1), 1)


def test_only_the_cpu_is_claimed() -> None:
    assert Backend.supports_device("CPU")
    assert not Backend.supports_device("CUDA:1")
    with pytest.raises(OnnxError, match="not on 'CUDA'"):
        Backend.prepare(perceptron(), "CUDA")


def test_a_model_with_an_unknown_operator_is_not_compatible() -> None:
    node = helper.make_node("Unheard", ["x"], ["y"], domain="somewhere")
    value = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [value("x", 1, [1])], [value("y", 1, [1])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("somewhere", 1)])
    assert not Backend.is_compatible(model)
