"""Match weights with a model's variables: what fits, and one error for all that does not.

names of the model × names of the source → values, missing, unexpected, misshaped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from typing import Any

import numpy as np

from graphflow.base.array_conversion import NoArrayError, array_of
from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import CheckpointError
from graphflow.ir.op import Tensor
from graphflow.ir.spec import is_inexact
from graphflow.runtime.checkpoint.manifest import list_some
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray, PiecedArray
from graphflow.weights.weight_files import WeightSource
from graphflow.weights.weight_names import WeightNames

_MOST = 12
"""Names of a kind that an error lists."""
_FEW = 0.1
"""The share of a model's variables that a source of another model has at most."""


@dataclass(frozen=True)
class LoadedWeights:
    """The variables that a model got values for, by the names of the source. Print it.

    Attributes:
        source: the file, folder or index.
        loaded: names that were loaded.
        missing: names of variables that keep their values, since the source lacks them.
        unexpected: names in the source that the model has no variable for.
        converted: dtypes of the source and of the variable, where they differ: "float16 to
            float32", by name.
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    converted: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.source}: {show_count(len(self.loaded), 'variable')} loaded"]
        parts += [f"{n} of them from {how}" for how, n in Counter(self.converted.values()).items()]
        parts += [f"missing in it: {list_some(self.missing)}"] * bool(self.missing)
        parts += [f"not in the model: {list_some(self.unexpected)}"] * bool(self.unexpected)
        return "; ".join(parts)


def match_weights(
    names: WeightNames, source: WeightSource, strict: bool, other_kind: WeightNames, how: str
) -> tuple[dict[Tensor, Any], LoadedWeights]:
    """Return a value for each variable, and a report.

    Args:
        names: the model's names, of the kind that the user says the source has.
        strict: refuse a source with missing or unexpected names.
        other_kind: the model's names of the other kind, for a hint.
        how: what the user gives for these names.

    Raises:
        CheckpointError: the source does not fit.
    """
    there = source.arrays
    alternatives = names.alternatives
    given = {v: [n for n in own if n in there] for v, own in alternatives.items()}
    missing = [own[0] for v, own in alternatives.items() if not given[v]]
    known = {*names.variables, *names.counts}
    unexpected = [] if source.has_more else sorted(name for name in there if name not in known)
    values: dict[Tensor, Any] = {}
    converted: dict[str, str] = {}
    wrong: list[str] = []
    for variable, own in given.items():
        for name in own:
            array = _as_array(there[name], name)
            misfit = _describe_misfit(name, array, variable)
            if misfit:
                wrong.append(misfit)
            if array.dtype != variable.dtype:
                converted[name] = f"{array.dtype.name} to {variable.dtype.name}"
            values[variable] = _in_parts(array, variable)
    loaded = tuple(name for own in given.values() for name in own)
    if wrong or (strict and (missing or unexpected)) or (alternatives and not loaded):
        raise CheckpointError(_explain(names, source, missing, unexpected, wrong, other_kind, how))
    report = LoadedWeights(source.place, loaded, tuple(missing), tuple(unexpected), converted)
    return values, report


def _as_array(value: Any, name: str) -> Any:
    """Return a weight as an array that has a dtype and a shape.

    Raises:
        CheckpointError: it is none.
    """
    if isinstance(value, LazyArray):
        return value
    try:
        return array_of(value)
    except NoArrayError as error:
        raise CheckpointError(f"weight {name!r} is {error}") from error


def _describe_misfit(name: str, array: Any, variable: Tensor) -> str:
    """Say why an array does not fit a variable; "" if it does."""
    if array.shape != variable.shape:
        reverse = array.ndim == 2 and array.shape == variable.shape[::-1]
        hint = " (transposed: give array.T in a dict)" if reverse else ""
        return f"{name!r} is {array.shape}, the variable {variable.shape}{hint}"
    there, here = array.dtype, variable.dtype
    complex_lost = there.kind == "c" and here.kind != "c"
    if there == here or (is_inexact(there) and is_inexact(here) and not complex_lost):
        return ""
    return f"{name!r} is {array.dtype.name}, the variable {variable.dtype.name}"


def _in_parts(array: Any, variable: Tensor) -> Any:
    """Return an array in the variable's dtype, so that a divided variable reads parts of it."""
    if isinstance(array, PiecedArray) and array.dtype == variable.dtype:
        return array
    if not array.ndim:
        return np.asarray(array).astype(variable.dtype)
    return PiecedArray.from_array(array, variable.dtype)


# Errors -----------------------------------------------------------------------------------------


def _explain(
    names: WeightNames, source: WeightSource, missing: Sequence[str], unexpected: Sequence[str],
    wrong: Sequence[str], other_kind: WeightNames, how: str,
) -> str:  # fmt: skip
    """Say all that does not fit, and what to do."""
    there, ours = source.arrays, names.variables
    met = len(ours.keys() & there.keys())
    if met <= _FEW * len(ours):
        others = len(other_kind.variables.keys() & there.keys())
        if others > met:
            return f"{source.place} has other names than you say; load it with names={how!r}"
        if prefix := _common_prefix(ours, there):
            old, new = prefix
            return (
                f"the names of {source.place} begin with {old!r}, those of the model "
                f"{f'with {new!r}' if new else 'do not'}; load it with rename={{{old!r}: {new!r}}}"
            )
        return (
            f"{source.place} is of another model: it has {met} of the {len(ours)} names of this "
            f"one. It has {list_some(list(there))}; the model has {list_some(list(ours))}"
        )
    told = []
    if missing:
        told.append(f"{len(missing)} missing: {_with_nearest(missing, unexpected)}")
    if unexpected:
        left = f"{_shorten([repr(name) for name in unexpected])}"
        told.append(f"{len(unexpected)} unexpected: {left}")
    if wrong:
        told.append(f"{len(wrong)} of another shape or dtype: {_shorten(wrong)}")
    advice = "leave those out of a dict of arrays" if wrong else "rename them with rename={…}"
    return (
        f"{source.place} does not fit the model: {'; '.join(told)}. {advice.capitalize()}; with "
        "strict=False, variables without a value keep theirs, and unexpected ones are left out"
    )


def _common_prefix(ours: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a beginning of names in the source, and that of the model's names which it stands for;
    None if no such pair makes most names fit."""
    for old in _first_words(there):
        rests = {name[len(old) :] for name in there if name.startswith(old)}
        for new in ("", *_first_words(ours)):
            fitting = sum(name.startswith(new) and name[len(new) :] in rests for name in ours)
            if fitting > len(ours) / 2:
                return old, new
    return None


def _first_words(names: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(f"{name.partition('.')[0]}." for name in names if "." in name))


def _with_nearest(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """List missing names, each with the unexpected name that is nearest."""
    shown = []
    for name in missing[:_MOST]:
        near = get_close_matches(name, unexpected[:500], 1, 0.5)
        shown.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return _shorten(shown, len(missing))


def _shorten(texts: Sequence[str], count: int | None = None) -> str:
    left = (len(texts) if count is None else count) - min(len(texts), _MOST)
    return ", ".join(texts[:_MOST]) + (f" and {left} more" if left else "")
