"""onnx's own backend test suite: every case that is not excluded by name passes."""

from __future__ import annotations

import re
import unittest
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx.backend.test import BackendTest
from onnx.backend.test.loader import load_model_tests

from graphflow.errors import OnnxError
from graphflow.onnx.backend import Backend
from tests.onnx.exclusions import EXCLUDED
from tests.onnx.models import perceptron

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = "OnnxBackendRealModelTest"  # test_light.py runs them, over two workers


def _classes() -> dict[str, type[unittest.TestCase]]:
    """The suite as test classes: without the copies of each case for a device we do not claim."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite divides by zero on purpose as it is made
        suite = BackendTest(Backend, __name__)
    for name in EXCLUDED:
        suite.exclude(f"^{name}_cpu$")
    classes: dict[str, type[unittest.TestCase]] = suite.test_cases
    for case in classes.values():
        for name, method in list(vars(case).items()):
            if name.endswith("_cuda"):
                delattr(case, name)
            elif "_expanded" in name:  # the same cases again, as functions of other operators
                setattr(case, name, pytest.mark.slow(method))
    return {name: case for name, case in classes.items() if name != NETWORKS}


globals().update(_classes())


def cases() -> list[Any]:
    """The node cases, which were made with the classes."""
    return list(load_model_tests(kind="node"))


def test_the_published_list_is_what_is_excluded() -> None:
    page = (ROOT / "docs" / "onnx.md").read_text(encoding="utf-8")
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
