"""Loops as machine code: the same values as Python's, for everything that their subset knows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.errors import CompileError
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

SOURCE = """
from math import exp, log, sqrt

from graphflow.ops.kernels.compiled_loops.memory_hints import prefetch

INF = float("inf")
LIMIT = 7


def whole(a, b):
    return a // b * 1000 + a % b


def smallest(x, first, last):
    least = INF
    for i in range(first, last):
        least = min(least, x[i])
    return least


def down(count):
    total = 0
    for i in range(count, 0, -1):
        if i % 3 == 0:
            continue
        total += i * (1 if i % 2 else -1)
        if total > 40:
            break
    return total


def guarded(x, at):
    return at >= 0 and x[at] > 1.5 or at < -LIMIT


def grows(steps):
    value, turn = 1, 0
    while value < steps:
        value += 1
        turn += 1
        if not turn % 5:
            value = value * 1.5
    return value


def window(x, a, b):
    some, count = x[a:b], 0
    for i in range(len(some)):
        some[i] = some[i] * 2.0 + 1
        count += 1
    return count


def curves(a):
    x = y = abs_(a)
    return exp(-x) + sqrt(y) + log(x + 1.0)


def abs_(a):
    return max(a, -a)


def bits(a, b):
    return (a & b) + (a | b) * 2 + (a ^ b) * 3 + (a << 2) + (b >> 1) + ~a


def swap(x, y):
    x[0], y[0] = y[0], x[0]


def between(a, b, c):
    return int(a < b <= c) + float(a != c)


def strange(a):
    return [a]


def scale(x, index, factor):
    total = 0.0
    for i in range(len(index)):
        at = int(index[i])
        total += float(x[at]) * factor
        x[at] = float(x[at]) * factor
        index[i] = at * 2 - 1
    return total


def flagged(x, wanted: bool):
    n = 0
    for i in range(len(x)):
        n += wanted == (x[i] > 0.0)
    return n


def fetched(x, index):
    total = 0.0
    for i in range(len(x)):
        prefetch(x, i + 1000000)
        prefetch(index, i + 2)
        total += float(x[i]) * int(index[i])
    return total


def fetches_a_number(a):
    prefetch(a, 1)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = Path(tmp_path_factory.mktemp("loops")) / "sample_loops.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("sample_loops", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import sys

    sys.modules["sample_loops"] = module
    return module


def gives_same_result(source: ModuleType, name: str, *arguments: object) -> bool:
    return native(source, name)(*arguments) == getattr(source, name)(*arguments)


@settings(deadline=None)
@given(a=st.integers(-50, 50), b=st.integers(-9, 9).filter(bool), c=st.integers(-50, 50))
def test_whole_numbers_divide_and_compare_as_in_python(
    source: ModuleType, a: int, b: int, c: int
) -> None:
    assert gives_same_result(source, "whole", a, b)
    assert gives_same_result(source, "between", a, b, c)
    assert gives_same_result(source, "bits", a, abs(b))
    assert gives_same_result(source, "down", abs(a))
    assert gives_same_result(source, "grows", abs(a))


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=12))
def test_floats_and_arrays_give_the_same_bits(source: ModuleType, values: list[float]) -> None:
    x = np.array(values)
    assert gives_same_result(source, "smallest", x, 0, len(x))
    assert gives_same_result(source, "curves", values[0])
    assert gives_same_result(source, "flagged", x, True)
    assert gives_same_result(source, "flagged", x, False)
    one, other = x.copy(), x.copy()
    assert native(source, "window")(one, 1, 3) == source.window(other, 1, 3)
    assert np.array_equal(one, other)


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=12),
    st.lists(st.integers(0, 2), max_size=5),
    st.floats(-1e3, 1e3),
)
def test_arrays_of_32_bits_give_the_same_bits(
    source: ModuleType, values: list[float], places: list[int], factor: float
) -> None:
    found = []
    for function in (native(source, "scale"), source.scale):
        x, index = np.array(values, np.float32), np.array(places, np.int32)
        found.append((function(x, index, factor), x.tobytes(), index.tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("item", [np.float32, np.float64])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_hints_to_fetch_change_nothing_even_outside_arrays(
    source: ModuleType, item: type, index: type
) -> None:
    assert gives_same_result(
        source, "fetched", np.linspace(-1, 2, 9, dtype=item), np.arange(9, dtype=index)
    )
    with pytest.raises(CompileError, match=r"fetches_a_number.*prefetch\(a, 1\)"):
        native(source, "fetches_a_number")(3.0)


def test_what_a_condition_need_not_look_at_is_not_read(source: ModuleType) -> None:
    x = np.array([1.0, 2.0])
    for at in (-9, -1, 0, 1):
        assert gives_same_result(source, "guarded", x, at)


def test_values_are_read_before_names_are_given(source: ModuleType) -> None:
    x, y = np.array([1.0]), np.array([2.0])
    native(source, "swap")(x, y)
    assert (x[0], y[0]) == (2.0, 1.0)


def test_what_has_no_native_form_is_named_with_its_line(source: ModuleType) -> None:
    with pytest.raises(CompileError, match=r"sample_loops\.strange, line \d+: '\[a\]' has no"):
        native(source, "strange")(1)
    with pytest.raises(CompileError, match="takes 1 arguments, not 2"):
        native(source, "down")(1, 2)
    with pytest.raises(CompileError, match="flat arrays of int64"):
        native(source, "smallest")(np.zeros((2, 2)), 0, 1)
