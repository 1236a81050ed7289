"""`help` has something to say about every public name, and every public method of a public
class."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

import graphflow as gf

ROOMS = ("nn", "optim", "linalg", "random", "fft", "sparse", "signal", "debug", "init", "parallel",
         "placement", "onnx")  # fmt: skip


def list_public_names() -> Iterator[tuple[str, Any]]:
    """Yield public names as users write them, and their objects."""
    for room in ("", *ROOMS):
        if room == "onnx":
            pytest.importorskip("onnx")
        module = getattr(gf, room) if room else gf
        for name in module.__all__:
            yield f"gf.{room}.{name}".replace("..", "."), getattr(module, name)


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class of this package defines."""
    for name, value in vars(owner).items():
        found = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not name.startswith("_") and isinstance(found, FunctionType | property):
            yield name, found


def test_every_public_name_has_help() -> None:
    silent = []
    for name, value in list_public_names():
        if callable(value) and not inspect.getdoc(value):
            silent.append(name)
        if inspect.isclass(value) and value.__module__.startswith("graphflow"):
            silent += [f"{name}.{k}" for k, v in members(value) if not inspect.getdoc(v)]
    assert silent == []
