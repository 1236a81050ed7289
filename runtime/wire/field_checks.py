"""Fields of messages to and from plain data, by the types that their classes declare.

A class of frozen values declares the type of each field (`messages`). From that follow the list
that is sent for a value, and the checks of a list that arrives. The types of all fields are
compared at once first. Nearly always they are the usual ones, and only what a type does not show is
checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from operator import attrgetter, itemgetter
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from graphflow.base.argument_checks import format_value
from graphflow.errors import ProtocolError

Check = Callable[[Any, str], Any]
T = TypeVar("T")

DEPTH_CAP = 8  # of nested plain data
INT64_END = 1 << 63

_PLAIN = "plain data"


class MessageSchema(Generic[T]):
    """The fields of a class of frozen values or named tuples, in the order of declaration."""

    def __init__(self, kind: type[T]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        self.names = tuple(hints)
        self._kind = kind
        self._checks = [(name, make_check(hints[name])) for name in self.names]
        types = [_usual_types(hints[name]) for name in self.names]
        self._usual = frozenset(product(*types))
        counts = [at for at, name in enumerate(self.names) if _is_count(hints[name])]
        integers = [at for at, name in enumerate(self.names) if hints[name] is int]
        self._counts = _make_picker(counts)
        self._integers = _make_picker(integers)
        self._inner = [
            (at, name, check)
            for at, (name, check) in enumerate(self._checks)
            if at not in (*counts, *integers) and hints[name] not in (str, bool, bytes)
        ]
        self.values_of = _make_getter(kind, self.names)
        """Returns what is sent for a value: its fields in order."""
        self._construct = _make_constructor(kind, self.names)

    def build(self, values: Sequence[Any]) -> T:
        """Return the value with these fields.

        Raises:
            ProtocolError: There are too many or too few, or one is not of its declared type.
        """
        if tuple(map(type, values)) not in self._usual:
            return self._construct(self._check_each(values))
        if self._counts is not None:
            counts = self._counts(values)
            if min(counts) < 0 or max(counts) >= INT64_END:
                self._check_each(values)
        if self._integers is not None and max(self._integers(values)) >= INT64_END:
            self._check_each(values)
        if self._inner:
            values = list(values)
            for at, name, check in self._inner:
                values[at] = check(values[at], name)
        return self._construct(values)

    def from_map(self, body: Mapping[str, Any]) -> T:
        """Return the value whose fields a map names; raises as `build`."""
        if set(body) != set(self.names):
            raise self._mismatch(f"the fields {format_value(sorted(body), 200)}")
        return self.build(tuple(body[name] for name in self.names))

    def _check_each(self, values: Sequence[Any]) -> list[Any]:
        """Check each field by itself; raises as `build`."""
        if len(values) != len(self.names):
            raise self._mismatch(f"{len(values)} fields")
        return [check(v, name) for v, (name, check) in zip(values, self._checks, strict=True)]

    def _mismatch(self, what: str) -> ProtocolError:
        return ProtocolError(f"{self._kind.__name__} has {what}, not {list(self.names)}")


def _make_picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[int, ...]] | None:
    """Return a function that gets the numbers at some places as a tuple; None for no places."""
    return itemgetter(*places, places[-1]) if places else None


def _make_getter(kind: type[T], names: Sequence[str]) -> Callable[[T], Sequence[Any]]:
    """Return a function that gets the fields of a value."""
    if issubclass(kind, tuple):
        return lambda value: value  # type: ignore[return-value]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: [getattr(value, name) for name in names]


def _make_constructor(kind: type[T], names: Sequence[str]) -> Callable[[Sequence[Any]], T]:
    """Return a function that makes a value of its fields, whose number is right."""
    if issubclass(kind, tuple):
        return partial(tuple.__new__, kind)
    return lambda values: construct_unchecked(kind, zip(names, values, strict=True))


def construct_unchecked(kind: type[T], fields: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> T:
    """Return a frozen value with these fields, which must be complete and valid.

    That takes a fraction of the time of the class's own `__init__`.
    """
    value = object.__new__(kind)
    value.__dict__.update(fields)
    return value


def _is_count(hint: Any) -> bool:
    """Return True if a type is `Count`, an integer that is not negative."""
    return get_origin(hint) is Annotated and get_args(hint)[1] != _PLAIN


def _usual_types(hint: Any) -> tuple[type, ...]:
    """Return the types that a field's value nearly always has; none if it is any plain data."""
    if get_origin(hint) is Annotated:
        return () if get_args(hint)[1] == _PLAIN else (int,)
    if hint in (str, bool, bytes, int, float):
        return (hint,)
    origin = get_origin(hint)
    if origin is UnionType:
        return tuple(get_args(hint))
    return (dict,) if origin is dict else (tuple,)


def make_check(hint: Any) -> Check:
    """Return the check of a type: it refuses other values, and turns lists into that type.

    Raises:
        ProtocolError: No field may have that type.
    """
    if get_origin(hint) is Annotated:
        return _check_plain if not _is_count(hint) else _check_count
    if hint in (str, bool, bytes):
        return _check_exactly(hint)
    if hint is int:
        return _check_int
    if hint is float:
        return _check_float
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return _check_list(arguments[0])
    if origin is tuple:
        return _check_tuple([make_check(argument) for argument in arguments])
    if origin is dict:
        return _check_dict(make_check(arguments[1]))
    if origin is UnionType and set(arguments) == {int, str}:
        return _check_key
    raise ProtocolError(f"no message field can have the type {hint}")


def _field_error(value: Any, name: str, expected: str) -> ProtocolError:
    return ProtocolError(f"field {name} is {format_value(value, 80)}, not {expected}")


def _check_exactly(kind: type) -> Check:
    def check(value: Any, name: str) -> Any:
        if type(value) is not kind:
            raise _field_error(value, name, f"a {kind.__name__}")
        return value

    return check


def _check_int(value: Any, name: str) -> Any:
    if type(value) is not int or not -INT64_END <= value < INT64_END:
        raise _field_error(value, name, "an integer of 64 bits")
    return value


def _check_count(value: Any, name: str) -> Any:
    if type(value) is not int or not 0 <= value < INT64_END:
        raise _field_error(value, name, "zero or more, of 63 bits")
    return value


def _check_float(value: Any, name: str) -> Any:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _field_error(value, name, "a finite number")
    return float(value)


def _check_key(value: Any, name: str) -> Any:
    return value if type(value) is str else _check_int(value, name)


def _check_counts(value: Any, name: str) -> Any:
    if type(value) is not tuple:
        raise _field_error(value, name, "a list")
    for item in value:
        if type(item) is not int or not 0 <= item < INT64_END:
            raise _field_error(item, name, "zero or more, of 63 bits")
    return list(value)


def _check_list(hint: Any) -> Check:
    if _is_count(hint):
        return _check_counts
    check = make_check(hint)
    alike = {frozenset((hint,))} if hint in (str, bytes) else set()

    def check_items(value: Any, name: str) -> Any:
        if type(value) is not tuple:
            raise _field_error(value, name, "a list")
        if not value or frozenset(map(type, value)) in alike:
            return list(value)
        return [check(item, name) for item in value]

    return check_items


def _check_tuple(checks: list[Check]) -> Check:
    def check_items(value: Any, name: str) -> Any:
        if type(value) is not tuple or len(value) != len(checks):
            raise _field_error(value, name, f"a list of {len(checks)}")
        return tuple([check(item, name) for check, item in zip(checks, value, strict=True)])

    return check_items


def _check_dict(check: Check) -> Check:
    def check_values(value: Any, name: str) -> Any:
        if type(value) is not dict:
            raise _field_error(value, name, "a map")
        return {key: check(item, name) for key, item in value.items()}

    return check_values


def _check_plain(value: Any, name: str, depth: int = 0) -> Any:
    if depth > DEPTH_CAP:
        raise ProtocolError(f"field {name} is nested deeper than {DEPTH_CAP}")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return [_check_plain(item, name, depth + 1) for item in value]
    if type(value) is dict:
        return {key: _check_plain(item, name, depth + 1) for key, item in value.items()}
    raise _field_error(value, name, "plain data")
