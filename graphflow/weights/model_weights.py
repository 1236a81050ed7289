"""The weights of a model in a session: read, load and save them (`Layer.state`, `load`, `save`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphflow.base.argument_checks import check_flag, format_value
from graphflow.errors import ArgumentError
from graphflow.execution.checkpoint_matching import rename_variables
from graphflow.ir.op import error_location
from graphflow.ops.networks.layers.layer_base import Layer
from graphflow.sessions.session import Session
from graphflow.weights.weight_files import WeightSource, read_source, write_files
from graphflow.weights.weight_matching import LoadedWeights, match_weights
from graphflow.weights.weight_names import KINDS, WeightNames, name_weights

Array = np.ndarray[Any, Any]


def read_state(model: Layer, session: Any, kind: str) -> dict[str, Array]:
    """Return the values of a model's variables; see `Layer.state`."""
    with error_location("state"):
        names = _names_of(model, session, "state", kind)
    values = {variable: session.get(variable) for variable in names.alternatives}
    return _by_name(names, values)


def load_state(
    model: Layer, session: Any, source: Any, kind: str, strict: bool, rename: Any
) -> LoadedWeights:
    """Set a model's variables; see `Layer.load`."""
    with error_location("load"):
        names = _names_of(model, session, "load", kind)
        check_flag("strict", strict)
        _check_rename(rename)
        found = read_source(source)
        if rename:
            renamed = rename_variables(found.arrays, rename, found.place)
            found = WeightSource(found.place, renamed, found.has_more)
        (other,) = (each for each in KINDS if each != kind)
        values, report = match_weights(names, found, strict, name_weights(model, other), other)
    session.set_all(values)
    return report


def save_state(
    model: Layer, session: Any, path: str | os.PathLike[str], kind: str, file_bytes: int
) -> Path:
    """Write a model's variables; see `Layer.save`."""
    with error_location("save"):
        names = _names_of(model, session, "save", kind)
        if not isinstance(path, str | os.PathLike):
            raise ArgumentError(f"path must be a path, not {format_value(path)}")
        if isinstance(file_bytes, bool) or not isinstance(file_bytes, int) or file_bytes < 1:
            raise ArgumentError(f"file_bytes must be an int above 0, not {file_bytes!r}")
    metadata = {"format": "pt"} if kind == "torch" else {"format": "graphflow"}
    variables = list(names.alternatives)

    def write(values: Sequence[Any]) -> Path:
        arrays = _by_name(names, dict(zip(variables, values, strict=True)))
        return write_files(path, arrays, metadata, file_bytes)

    found: Path = session.read_all(variables, write)
    return found


def _by_name(names: WeightNames, values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return values by name, with 0 for the numbers that only torch has."""
    counts = {name: np.zeros((), "int64") for name in names.counts}
    return {name: values[variable] for name, variable in names.variables.items()} | counts


def _names_of(model: Layer, session: Any, what: str, kind: Any) -> WeightNames:
    """Return a model's names, after checks of the arguments.

    Raises:
        ArgumentError: no session, or a kind that there is not.
    """
    if not isinstance(session, Session):
        raise ArgumentError(
            f"weights live in a session: give an open gf.Session first, as in model.{what}"
            f"(session{'' if what == 'state' else ', path'}), not {format_value(session)}"
        )
    if kind not in KINDS:
        raise ArgumentError(f"names must be {' or '.join(map(repr, KINDS))}, not {kind!r}")
    return name_weights(model, kind)


def _check_rename(rename: Any) -> None:
    texts = isinstance(rename, Mapping) and all(
        isinstance(old, str) and old and isinstance(new, str) for old, new in rename.items()
    )
    if rename is not None and not texts:
        raise ArgumentError(
            'rename must be a dict from names, or beginnings of names, such as {"module.": ""}, '
            f"not {format_value(rename)}"
        )
