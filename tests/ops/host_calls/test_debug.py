"""Printing and checking in a running graph."""

from __future__ import annotations

import numpy as np
import pytest

from graphflow.errors import ArgumentError, CheckError, DTypeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.host_calls import debug
from graphflow.ops.pointwise.comparison import greater
from graphflow.transforms.reverse_mode import gradients


def test_print_shows_the_value_and_passes_it_on(capsys: pytest.CaptureFixture[str]) -> None:
    x = placeholder("float32", (2,), name="speed")
    shown = debug.print(x, "now") * 2
    unnamed = debug.print(x)
    assert capsys.readouterr().out == ""
    values = evaluate([shown, unnamed], {x: np.array([1, 2.5], "f")})
    assert [v.tolist() for v in values] == [[2, 5], [1, 2.5]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "now: float32(2,) [1.  2.5]"
    assert lines[1].startswith("speed at ") and "test_debug.py:" in lines[1]


def test_a_check_that_holds_passes_its_input_on_and_its_gradient() -> None:
    x = placeholder("float64", (2,))
    y = debug.check(x, greater(x, 0), "speeds are positive")
    fed = {x: np.array([1.0, 2])}
    assert evaluate([y, *gradients(y * y, [x])], fed)[1].tolist() == [2, 4]


def test_a_check_that_fails_says_what_where_and_how_often() -> None:
    x = placeholder("float64", (2, 2))
    y = debug.check(x, greater(x, 0), "speeds are positive")
    message = r"speeds are positive \(.*test_debug\.py:\d+\): false for 2 of 4 .*index \(0, 1\)"
    with pytest.raises(CheckError, match=message):
        evaluate([y], {x: np.array([[1.0, -2], [3, -1]])})


def test_a_check_takes_a_scalar_condition() -> None:
    x, ok = placeholder("float64", (2,)), placeholder("bool", ())
    y = debug.check(x, ok, "all is well")
    with pytest.raises(CheckError, match=r"all is well .*false for 1 of 1 elements$"):
        evaluate([y], {x: np.zeros(2), ok: np.array(False)})


def test_checks_and_prints_refuse_wrong_arguments() -> None:
    x = placeholder("float64", (2,))
    with pytest.raises(DTypeError, match=r"check at .*condition must be bool, got float64"):
        debug.check(x, x, "m")
    with pytest.raises(ArgumentError, match=r"debug\.check at .*test_debug"):
        debug.check(x, greater(x, 0), "")
    with pytest.raises(ArgumentError, match=r"debug\.print at .*got 3"):
        debug.print(x, 3)  # type: ignore[arg-type]


def test_neither_is_pure() -> None:
    x = placeholder("float64", ())
    assert not debug.print(x).node.op.pure
    assert not debug.check(x, greater(x, 0), "m").node.op.pure
