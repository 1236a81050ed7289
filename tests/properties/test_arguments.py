"""Every public function and method, each of its arguments spoiled: a clear error of graphflow, or
a result; never one of Python's from inside, never a wait."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.argument_checks import signature_of
from graphflow.errors import ArgumentError, GraphError, GraphflowError
from graphflow.placement.plans.plan import Plan
from tests.properties.calls import OF_THE_HOUSE, call_of, list_public_names, methods

FUNCTIONS = list_public_names()


class Odd:
    """What nothing takes."""


ODD = [
    None, True, -1, 10**20, 1.5, float("nan"), "x", "", b"x", [], {}, [1, 2], [None], [[1], [2, 3]],
    np.int64(2), np.float32(1.5), np.bool_(True), np.array([1, 2]), np.array([None]), np.array(2),
    Odd(), 1j, len, "a" * 100_000,
    gf.placeholder("int8", (7,)), gf.placeholder("complex64", (3, 4)),
]  # fmt: skip
PLAIN_NAMES = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def spoil_calls(name: str) -> Iterator[tuple[str, Any, list[Any], dict[str, Any]]]:
    """Calls with one argument replaced: which, by what, and all of them."""
    args, kwargs = call_of(name, FUNCTIONS[name])
    for place in range(len(args)):
        for odd in ODD:
            yield f"argument {place}", odd, [*args[:place], odd, *args[place + 1 :]], kwargs
    for parameter in signature_of(FUNCTIONS[name]).parameters.values():
        if parameter.kind in PLAIN_NAMES and not args:
            for odd in ODD:
                yield parameter.name, odd, [], kwargs | {parameter.name: odd}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_spoiled_argument_is_an_error_of_ours_at_once(name: str) -> None:
    args, kwargs = call_of(name, FUNCTIONS[name])
    FUNCTIONS[name](*args, **kwargs)
    for what, odd, args, kwargs in spoil_calls(name):
        began = time.monotonic()
        try:
            FUNCTIONS[name](*args, **kwargs)
        except GraphflowError as error:
            told = str(error)
            assert told and len(told) < 25_000
            assert not isinstance(error, GraphError) or len(told) < 2_500
        except Exception as error:
            pytest.fail(f"{what} of {name} by {odd!r:.80}: {type(error).__name__}: {error}")
        assert time.monotonic() - began < 20, f"{what} of {name} by {odd!r:.80}"


HELD = (gf.data.Dataset, gf.Session, Plan, gf.Cluster, gf.Graph)


@pytest.mark.parametrize("kind", HELD)
def test_a_method_refuses_a_spoiled_argument_with_an_error_of_ours(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text('[[workers]]\naddress = "tcp://127.0.0.1:7001"\n')
    for name, (method, good) in methods().items():
        if not name.startswith(kind.__name__):
            continue
        method(**good)
        for argument, odd in product(good, ODD):
            if callable(good[argument]) and callable(odd):
                continue  # a user's function, which may raise what it likes
            try:
                method(**good | {argument: odd})
            except GraphflowError as error:
                assert 0 < len(str(error)) < 25_000
            except Exception as error:
                pytest.fail(f"{argument} of {name} by {odd!r:.80}: {error!r}")


def test_every_method_of_what_users_hold_is_tried() -> None:
    public = {
        f"{kind.__name__}.{name}"
        for kind in HELD
        for base in kind.__mro__
        if base.__module__.startswith("graphflow")
        for name, value in vars(base).items()
        if name[0] != "_"
        and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod))
    }
    assert public == {name.partition(",")[0] for name in methods() if "." in name} | OF_THE_HOUSE


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_that_a_function_has_not_is_named(name: str) -> None:
    args, kwargs = call_of(name, FUNCTIONS[name])
    taken = signature_of(FUNCTIONS[name]).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()) and name == "sample":
        return  # it takes attributes of any name
    with pytest.raises(GraphflowError, match=r"test_arguments.*'misspelt'"):
        FUNCTIONS[name](*args, **kwargs, misspelt=1)


def test_an_argument_that_a_method_has_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (method, good) in methods().items():
        if not inspect.ismethod(method) or name == "Session.run":
            continue  # a step may take some microseconds: Python's own error has to do
        with pytest.raises(GraphflowError, match=r"test_arguments.*'misspelt'.*it takes"):
            method(**good, misspelt=1)


def test_a_misspelt_argument_is_told_what_was_meant() -> None:
    x = gf.placeholder("float32", (3, 4))
    with pytest.raises(ArgumentError, match=r"test_arguments.*'axs' \(did you mean 'axis'"):
        gf.sum(x, axs=1)
    with pytest.raises(ArgumentError, match=r"Linear at .*test_arguments.py.*'outputs'; it takes"):
        gf.nn.Linear(3)
    with pytest.raises(
        ArgumentError, match=r"LayerNorm at .*test_arguments.py.*bias must be True or F"
    ):
        gf.nn.LayerNorm(3, bias=1)


def test_numpy_scalars_are_numbers_like_any_other() -> None:
    x = gf.placeholder("float32", (3, 4))
    gf.nn.dropout(x, np.float32(0.5))
    assert gf.sum(x, axis=np.int64(1), keepdims=np.True_).shape == (3, 1)
    assert gf.std(x, correction=np.float64(1)).node.attrs == gf.std(x, correction=1.0).node.attrs
    assert gf.nn.Linear(np.int32(4), np.uint8(2))(x).shape == (3, 2)
