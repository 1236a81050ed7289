"""Attributes of nodes from the wire: plain data to values, each checked before it is built.

Sizes with unknowns, initial values, arrays and functions of users have limits of their own, because
even to count their elements may take long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.base.process.user_modules import allowed_function
from graphflow.errors import GraphLimitError, ProtocolError
from graphflow.init import KINDS, Initializer
from graphflow.ir.spec import Dim, Span, as_dtype, show_shape
from graphflow.ops.control_flow.turn_rules import CONSISTENCIES, TurnRules
from graphflow.ops.host_calls.host_call import HostFunction
from graphflow.runtime.wire.graph_limits import MAX_DRAWN

MAX_RANK = 64  # numpy's
MAX_LENGTH = 4096  # entries of a tuple
MAX_TERMS = 256  # of the polynomial in the feeds' sizes that counts a tensor's elements


def check_shape(shape: Sequence[Any]) -> None:
    """Refuse an invalid shape, and one whose elements would take long to count."""
    for size in shape:
        if not isinstance(size, Dim):
            check_index(size.item() if isinstance(size, np.integer) else size)
    terms = math.prod(len(size.terms) for size in shape if isinstance(size, Dim))
    if len(shape) > MAX_RANK or terms > MAX_TERMS:
        raise GraphLimitError(
            f"a shape from the wire has {len(shape)} axes and {terms} terms; "
            f"the limits are {MAX_RANK} and {MAX_TERMS}"
        )


def unpack_attribute(value: Any, buffers: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Return the attribute in plain data; the reverse of `graph_codec.pack_attribute`."""
    if isinstance(value, list):
        if len(value) > MAX_LENGTH:
            raise GraphLimitError(f"an attribute from the wire has {len(value)} entries")
        values = tuple(unpack_attribute(v, buffers) for v in value)
        check_shape([v for v in values if isinstance(v, Dim)])
        return values
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "array":
            array = buffers[check_index(content)]
            as_dtype(array.dtype)
            return array
        case "dim":
            return _read_dim(content)
        case "init":
            return _read_initializer(*content)
        case "host":
            return HostFunction(allowed_function(check_text(content)), content)
        case "complex":
            return complex(*map(float, content))
        case "turns":
            return _read_turn_rules(*content)
    raise ProtocolError(f"an attribute from the wire is of an unknown kind {kind!r}")


def _read_dim(content: Any) -> Dim:
    terms = {
        tuple(map(_read_atom, monomial)): _check_integer(factor) for monomial, factor in content
    }
    if len(terms) > MAX_TERMS or any(len(monomial) > MAX_RANK for monomial in terms):
        raise GraphLimitError(f"a size from the wire has {len(terms)} terms")
    return Dim(terms)


def _read_atom(content: Any) -> Any:
    if isinstance(content, str):
        return content
    function, *operands = content
    if function not in ("floordiv", "min", "max") or len(operands) != 2:
        raise ProtocolError(f"a size from the wire is made with {function!r}")
    return (
        function,
        *(_read_dim(o["dim"]) if isinstance(o, Mapping) else _check_integer(o) for o in operands),
    )


def _read_initializer(
    kind: str,
    shape: Sequence[int],
    dtype: str,
    a: float,
    b: float,
    stream: Sequence[int],
    whole: Sequence[int] = (),
    spans: Sequence[Any] = (),
) -> Initializer:
    seed, number = map(check_index, stream)
    if kind not in KINDS or not math.isfinite(b - a):
        raise ProtocolError(f"an initializer from the wire is {kind!r} of {a!r} and {b!r}")
    sizes = tuple(map(check_index, shape))
    every = tuple(map(check_index, whole))
    if kind == "orthogonal" and len(every or sizes) < 2:
        raise ProtocolError(f"an initializer from the wire is {kind!r} of shape {sizes}")
    parts = tuple([_read_span(span, n) for span, n in zip(spans, every, strict=True)])
    if parts and tuple(part.size for part in parts) != sizes:
        raise ProtocolError(f"an initializer from the wire has parts {parts} of shape {sizes}")
    if math.prod(every) > MAX_DRAWN:
        raise GraphLimitError(
            f"an initializer from the wire is part of {show_shape(every)}, more than {MAX_DRAWN:,} "
            "numbers"
        )
    name = as_dtype(dtype).name
    return Initializer(kind, sizes, name, float(a), float(b), (seed, number), every, parts)


def _read_turn_rules(
    servers: Sequence[int],
    workers: Sequence[int],
    turns: Sequence[int],
    consistency: str,
    staleness: int | None,
    aggregate: int,
) -> TurnRules:
    """Return rules of plain numbers; the node that has them checks what they say."""
    named = [each for each in CONSISTENCIES if each == check_text(consistency)]
    return TurnRules(
        tuple(map(check_index, servers)),
        tuple(map(check_index, workers)),
        tuple(map(check_index, turns)),
        named[0],
        None if staleness is None else check_index(staleness),
        check_index(aggregate),
    )


def _total(ranges: Sequence[tuple[int, int]]) -> int:
    """Return the number of elements in ranges."""
    return sum(stop - start for start, stop in ranges)


def _read_span(span: Sequence[Any], size: int) -> Span:
    """Return the part of an axis of `size` elements."""
    start, stop, rows, ranges = span
    lengths = tuple(map(check_index, rows)) if isinstance(rows, list) else check_index(rows)
    own = tuple([(check_index(a), check_index(b)) for a, b in ranges])
    found = Span(check_index(start), check_index(stop), lengths, own)
    places = [place for each in own for place in each]
    if own and (places != sorted(set(places)) or places[-1] > size or found.stop != _total(own)):
        raise ProtocolError(f"an initializer from the wire has the ranges {own} of {size}")
    segments = lengths if isinstance(lengths, tuple) else (lengths,)
    if min(segments, default=0) < 1 or not found.start <= found.stop:
        raise ProtocolError(f"an initializer from the wire has the part {found} of {size}")
    if Span(0, found.stop, lengths).size > size:
        raise ProtocolError(f"an initializer from the wire has the part {found} of {size}")
    return found


def _check_integer(value: Any) -> int:
    """Return an integer."""
    if type(value) is not int:
        raise ProtocolError(f"a number in a graph from the wire must be an integer, got {value!r}")
    return value


def check_index(value: Any) -> int:
    """Return an integer that is not negative."""
    if _check_integer(value) < 0:
        raise ProtocolError(f"a number in a graph from the wire is negative: {value}")
    return value  # type: ignore[no-any-return]


def check_text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise ProtocolError(f"a name in a graph from the wire must be text, got {value!r}")
    return value
