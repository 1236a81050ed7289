"""The manifest of a checkpoint: its shards, its step, and its variables.

It detects damage by the size and SHA-256 of each shard, and by a digest of its own. It tells
whether a checkpoint fits a model by a fingerprint of its variables, which does not depend on
placement.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

import numpy as np

from graphflow.base.argument_checks import format_value
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import CheckpointError
from graphflow.ir.spec import Span, as_dtype, index_of, show_shape
from graphflow.runtime.checkpoint.pieced_arrays import PiecedArray

Array = np.ndarray[Any, Any]
FORMAT = 2
"""Format 1 had one shard, "state.safetensors", and no digest of the manifest."""
PIECED_BYTES = 1 << 24
"""Bytes of a variable from which its pieces are not assembled when a checkpoint is read."""
_FIRST_STATE = "state.safetensors"
_MAX_COUNT = 2**62  # largest step, epoch or size
_MAX_LISTED = 8  # names of a kind that an error lists

Signature = tuple[str, tuple[int, ...]]
"""A variable's dtype, by name, and its shape."""


VariablePiece = tuple[str, tuple[tuple[Any, ...], ...]]
"""A piece of a variable: its name in the shards, and (start, stop) along every axis.

An axis may have a third entry: the piece then covers (start, stop) of each of that many equal
segments, or of segments of the listed lengths. A fourth entry lists the ranges of the axis that the
piece covers."""

Groups = tuple[tuple[str, ...], ...]
"""Names of variables, by group."""

Copies = tuple[tuple[tuple[Span, ...], Any], ...]
"""The copies of a variable, each with the part of it that it is a copy of."""


@dataclass(frozen=True)
class CheckpointShard:
    """One file of a checkpoint."""

    file: str
    sha256: str
    nbytes: int | None
    variables: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Args:
        step: steps that the session had committed; data and random numbers continue from there.
        variables: dtype and shape of all variables, by name.
        epoch: of the session that wrote it.
        pieces: the pieces of each variable that is stored in pieces.
        unnamed: groups of variables without names of their own, which a session numbered. Each
            group lists their names in the order in which the variables were created.
    """

    step: int
    shards: tuple[CheckpointShard, ...]
    variables: Mapping[str, Signature]
    epoch: int = 0
    pieces: Mapping[str, tuple[VariablePiece, ...]] = field(default_factory=dict)
    unnamed: Groups = ()

    @cached_property
    def stored(self) -> dict[str, Signature]:
        """The entries of the shards: variables, or their pieces."""
        found = {n: kind for n, kind in self.variables.items() if n not in self.pieces}
        for name, parts in self.pieces.items():
            for piece, spans in parts:
                shape = tuple(Span(*span).size for span in spans)
                found[piece] = self.variables[name][0], shape
        return found

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of a variable or piece in a shard.

        Raises:
            CheckpointError: there is none of this name.
        """
        if name not in self.stored:
            raise CheckpointError(f"its manifest has no variable {name!r}")
        return as_dtype(self.stored[name][0])

    def assemble(self, stored: Mapping[str, Array]) -> dict[str, Array]:
        """Return all variables, assembled from the arrays in the shards.

        Raises:
            CheckpointError: the arrays do not match the manifest.
        """
        wrong = [
            n for n, kind in self.stored.items() if n not in stored or not _matches(stored[n], kind)
        ]
        if wrong:
            raise CheckpointError(f"its shards do not hold {list_some(wrong)} as the manifest says")
        found = {n: stored[n] for n in self.variables if n not in self.pieces}
        for name, parts in self.pieces.items():
            dtype, shape = self.variables[name]
            if sum(stored[piece].size for piece, _ in parts) < math.prod(shape):
                raise CheckpointError(f"its pieces do not make up {name} {show_shape(shape)}")
            groups = self._group_copies(name, stored)
            if math.prod(shape) * as_dtype(dtype).itemsize >= PIECED_BYTES and all(
                map(_are_equal, groups.values())
            ):
                parts_read = [(spans, copies[0]) for spans, copies in groups.items()]
                pieced: Any = PiecedArray(shape, as_dtype(dtype), parts_read)
                found[name] = pieced
                continue
            found[name] = value = np.zeros(shape, as_dtype(dtype))
            for spans, copies in groups.items():
                place = index_of(spans, shape)
                value[place] = mean_of(copies).reshape(value[place].shape)
        return found

    def copies(self, stored: Mapping[str, Array]) -> dict[str, Copies]:
        """Return the copies of those variables whose copies have values of their own."""
        return {
            name: tuple((_as_spans(spans), stored[piece]) for piece, spans in parts)
            for name, parts in self.pieces.items()
            if not all(map(_are_equal, self._group_copies(name, stored).values()))
        }

    def _group_copies(
        self, name: str, stored: Mapping[str, Array]
    ) -> dict[tuple[Span, ...], list[Array]]:
        """Return the copies of each part of a variable."""
        found: dict[tuple[Span, ...], list[Array]] = {}
        for piece, spans in self.pieces[name]:
            found.setdefault(_as_spans(spans), []).append(stored[piece])
        return found

    @property
    def fingerprint(self) -> str:
        """Digest of names, dtypes and shapes; equal for a model wherever it is placed."""
        return fingerprint(self.variables)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "epoch": self.epoch,
            "position": {"steps": self.step},
            "fingerprint": self.fingerprint,
            "shards": [
                {
                    "file": shard.file,
                    "sha256": shard.sha256,
                    "bytes": shard.nbytes,
                    "variables": list(shard.variables),
                }
                for shard in self.shards
            ],
            "variables": {
                name: [dtype, list(shape)] for name, (dtype, shape) in self.variables.items()
            },
        }
        if self.pieces:
            content["pieces"] = {name: list(parts) for name, parts in self.pieces.items()}
        if self.unnamed:
            content["unnamed"] = [list(group) for group in self.unnamed]
        content = json.loads(json.dumps(content))
        return json.dumps({**content, "digest": _digest(content)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse a manifest.

        Raises:
            CheckpointError: damaged, or of a newer format.
        """
        try:
            content = json.loads(data, object_pairs_hook=_reject_duplicate_keys)
            if content["format"] > FORMAT:
                raise CheckpointError(
                    f"it has format {content['format']}, this version reads up to {FORMAT}; update "
                    "graphflow"
                )
            variables = {
                name: (
                    as_dtype(_require_text(dtype)).name,
                    tuple(map(_require_count, _require_list(shape))),
                )
                for name, (dtype, shape) in content["variables"].items()
            }
            if content["format"] == 1:
                only = CheckpointShard(
                    _FIRST_STATE,
                    _require_text(content["sha256"][_FIRST_STATE]),
                    None,
                    (*variables,),
                )
                return cls(_require_count(content["step"]), (only,), variables)
            if content.pop("digest") != _digest(content):
                raise CheckpointError("its manifest was changed: the digest differs")
            pieces = {
                name: tuple(
                    (_require_text(piece), _read_spans(spans, variables[name][1]))
                    for piece, spans in parts
                )
                for name, parts in content.get("pieces", {}).items()
            }
            shards = tuple(map(_read_shard, content["shards"]))
            unnamed = tuple(
                tuple(map(_require_text, _require_list(group)))
                for group in _require_list(content.get("unnamed", []))
            )
            step, epoch = _require_count(content["step"]), _require_count(content["epoch"])
            return cls(step, shards, variables, epoch, pieces, unnamed)
        except CheckpointError:
            raise
        except Exception as error:  # a file that is no manifest can fail in any way
            raise CheckpointError(f"its manifest cannot be read: {error!r}") from error


# Validation: invalid content is a CheckpointError -------------------------------------------------


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise CheckpointError("its manifest cannot be read: it has a duplicate key")
    return found


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"its manifest cannot be read: {format_value(value)} is not a name")
    return value


def _require_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CheckpointError(f"its manifest cannot be read: {format_value(value)} is not a list")
    return value


def _require_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise CheckpointError(
            f"its manifest cannot be read: {format_value(value)} is not a count or size"
        )
    return value


def _read_shard(value: Any) -> CheckpointShard:
    variables = tuple(map(_require_text, _require_list(value["variables"])))
    return CheckpointShard(
        _require_text(value["file"]),
        _require_text(value["sha256"]),
        _require_count(value["bytes"]),
        variables,
    )


def _read_spans(value: Any, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], ...]:
    """Return the validated spans of a piece along every axis of its variable."""
    spans = [_require_list(span) for span in _require_list(value)]
    rows = [_read_rows(span[2]) if len(span) > 2 else 1 for span in spans]
    ends = [tuple(map(_require_count, span[:2])) for span in spans]
    ranges = [_read_ranges(span[3]) if len(span) > 3 else () for span in spans]
    fits = len(spans) == len(shape) and all(
        len(span) in (2, 3, 4)
        and start <= stop
        and count != 0
        and Span(0, stop, count).size <= size
        for span, (start, stop), count, size in zip(spans, ends, rows, shape, strict=True)
    )
    fits = fits and all(
        not own or (max(own)[1] <= size and end == (0, sum(b - a for a, b in own)) and count == 1)
        for own, size, end, count in zip(ranges, shape, ends, rows, strict=True)
    )
    several = [count != 1 or bool(own) for count, own in zip(rows, ranges, strict=True)]
    if not fits or sum(several) > 1:
        raise CheckpointError(
            f"its manifest cannot be read: {format_value(value)} is not a part of "
            f"{show_shape(shape)}"
        )
    return tuple(
        (*end, count, own) if own else (*end, count) if count != 1 else end
        for end, count, own in zip(ends, rows, ranges, strict=True)
    )


def _read_ranges(value: Any) -> tuple[tuple[int, int], ...]:
    """Return ranges of an axis, which do not overlap."""
    found = [tuple(map(_require_count, _require_list(each))) for each in _require_list(value)]
    places = [place for each in sorted(found) for place in each]
    if any(len(each) != 2 or each[0] == each[1] for each in found) or places != sorted(places):
        raise CheckpointError(
            f"its manifest cannot be read: {format_value(value)} are not separate ranges"
        )
    return tuple((start, stop) for start, stop in found)


def _read_rows(value: Any) -> int | tuple[int, ...]:
    """Return the number of segments of an axis, or their lengths."""
    if not isinstance(value, list):
        return _require_count(value)
    if not value or 0 in value:
        raise CheckpointError(
            f"its manifest cannot be read: {format_value(value)} are not lengths of segments"
        )
    return tuple(map(_require_count, value))


def fingerprint(variables: Mapping[str, Signature]) -> str:
    """Return a digest of names, dtypes and shapes, independent of their order."""
    rows = sorted((name, dtype, list(shape)) for name, (dtype, shape) in variables.items())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def differences(wanted: Mapping[str, Signature], there: Mapping[str, Signature]) -> str:
    """Describe how a checkpoint differs from a model; "" if it fits.

    Args:
        wanted: the model's variables.
        there: the checkpoint's variables.
    """
    changed = [
        f"{name} is {_show(wanted[name])} and {_show(there[name])} in the checkpoint"
        for name in wanted
        if name in there and wanted[name] != there[name]
    ]
    missing = [f"{name} {_show(wanted[name])}" for name in wanted if name not in there]
    unexpected = [f"{name} {_show(there[name])}" for name in there if name not in wanted]
    sections = [
        f"{what}: {list_some(names)}"
        for what, names in (
            ("another shape or dtype", changed),
            ("missing in the checkpoint", missing),
            ("unexpected there", unexpected),
        )
        if names
    ]
    return "; ".join(sections)


def _as_spans(spans: Sequence[Sequence[Any]]) -> tuple[Span, ...]:
    """Return the spans of a piece along every axis."""
    return tuple(Span(*span) for span in spans)


def _are_equal(copies: Sequence[Array]) -> bool:
    """Return True if copies have the same bits."""
    first, *others = (copy.reshape(-1).view("uint8") for copy in copies)
    return all(np.array_equal(first, other) for other in others)


def mean_of(copies: Sequence[Array]) -> Array:
    """Return the value that copies of a part of a variable stand for.

    That is their mean; the first, if all have the same bits or they are no floats.
    """
    first = copies[0]
    if _are_equal(copies) or first.dtype.kind in "iub":
        return first
    mean: Array = sum(copies[1:], first.astype(np.result_type(first, np.float32))) / len(copies)
    return mean.astype(first.dtype)


def _matches(value: Array, kind: Signature) -> bool:
    """Return True if an array has a signature.

    A piece may have lost or gained axes of size 1.
    """
    dtype, shape = kind
    return value.dtype.name == dtype and (value.shape == shape or value.size == math.prod(shape))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _show(signature: Signature) -> str:
    dtype, shape = signature
    return f"{dtype}{show_shape(shape)}"


def list_some(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the rest."""
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
