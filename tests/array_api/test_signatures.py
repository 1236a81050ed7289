"""Every function, constant, dtype and method of the array API standard is there."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.argument_checks import signature_of
from tests.array_api.standard import CONSTANTS, DTYPES, METHODS, SIGNATURES

EMPTY, POSITIONAL, KEYWORD = (
    inspect.Parameter.empty, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY,
)  # fmt: skip


def parse(text: str) -> tuple[str, inspect.Signature]:
    """Return the name and the parameters of a signature that is written down."""
    name, _, rest = text.partition("(")
    scope: dict[str, Any] = {}
    exec(f"def declared({rest}: ...", scope)
    return name, signature_of(scope["declared"])


def find(xp: Any, name: str) -> Any:
    for part in name.split("."):
        xp = getattr(xp, part)
    return xp


def misfits(function: Any, declared: inspect.Signature) -> list[str]:
    """Say how a function's parameters differ from those that the standard declares."""
    own = signature_of(function)
    wrong = []
    by_place, by_name = [], {}
    for name, parameter in declared.parameters.items():
        if parameter.kind == inspect.Parameter.VAR_POSITIONAL:
            by_place += [0, 0]
        elif parameter.kind == KEYWORD:
            by_name[name] = 0
        else:
            by_place.append(0)
        ours = own.parameters.get(name)
        if parameter.default is not EMPTY and (ours is None or ours.default != parameter.default):
            wrong.append(f"{name}={parameter.default!r}")
        if parameter.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD and ours is None:
            wrong.append(name)
    try:
        own.bind(*by_place, **by_name)
    except TypeError as error:
        wrong.append(str(error))
    return wrong


@pytest.mark.parametrize("text", SIGNATURES)
def test_a_function_takes_what_the_standard_gives_it(text: str) -> None:
    name, declared = parse(text)
    assert misfits(find(gf.array_api, name), declared) == []


def test_constants_dtypes_and_methods_are_there() -> None:
    constants = [getattr(gf.array_api, name) for name in CONSTANTS]
    assert np.array_equal(np.array(constants, float), [np.e, np.inf, np.nan, np.nan, np.pi], True)
    assert [getattr(gf.array_api, name).name for name in DTYPES] == list(DTYPES)
    x = gf.placeholder("float32", (2, 3))
    assert [name for name in METHODS.split() if not hasattr(x, name)] == []


def test_the_list_of_names_is_that_of_the_standard() -> None:
    named = {parse(text)[0] for text in SIGNATURES} | {*CONSTANTS, *DTYPES}
    for room in ("", "linalg", "fft"):
        module: ModuleType = getattr(gf.array_api, room) if room else gf.array_api
        inside = {name for name in named if name.rpartition(".")[0] == room}
        extra = {"VERSIONS", "__array_api_version__", "linalg", "fft"} if not room else set()
        assert set(module.__all__) - extra == {name.rpartition(".")[2] for name in inside}
