"""The interface of passes, the order in which they run, and their registry."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from enum import IntEnum, auto
from functools import cache
from typing import ClassVar

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph


class Phase(IntEnum):
    """The order in which passes run. Passes of one phase run in the order of their class names."""

    BODIES = auto()  # first, so that later passes see one node for each body
    CONSTANTS = auto()
    SIMPLIFY = auto()
    DUPLICATES = auto()
    CALLS = auto()  # inlines by pins, which the passes above must not depend on
    SYMMETRY = auto()  # needs DUPLICATES: the two operands must be one tensor
    ACCUMULATION = auto()


@dataclass(frozen=True)
class Pass:
    """A frozen value that turns a valid graph into a valid graph of the same outputs."""

    phase: ClassVar[Phase]

    def __call__(self, graph: Graph) -> Graph:
        raise NotImplementedError


_passes: dict[str, Pass] = {}


def register_pass(each: Pass) -> None:
    """Let a pass run in its phase, for every graph; one of the same class is replaced."""
    _passes[type(each).__name__] = each


def default_passes() -> tuple[Pass, ...]:
    """Return the passes of this folder's modules, in the order in which they run."""
    _import_modules(tuple(sys.modules[_PACKAGE].__path__))
    return tuple(each for _, each in sorted(_passes.items(), key=lambda p: (p[1].phase, p[0])))


@cache
def _import_modules(folders: tuple[str, ...]) -> None:
    for module in sorted(info.name for info in pkgutil.iter_modules(folders)):
        importlib.import_module(f"{_PACKAGE}.{module}")


_PACKAGE = __name__.rpartition(".")[0]
