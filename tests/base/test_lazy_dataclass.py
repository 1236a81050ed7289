"""Dataclasses whose methods come later are those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from dataclasses import FrozenInstanceError, field, replace
from typing import Any

import pytest

from graphflow.base import lazy_dataclass as values
from graphflow.base.argument_checks import signature_of


def declare_classes(dataclass: Any) -> list[type]:
    """The same classes, by one of the two."""

    @dataclass(frozen=True)
    class Point:
        """A place."""

        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list, compare=False)
        norm: int = field(init=False, repr=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "norm", abs(self.x) + abs(self.y))

    @dataclass(frozen=True)
    class Named(Point):
        name: str = field(default="", kw_only=True)

    @dataclass(frozen=True, eq=False, repr=False)
    class Apart:
        x: int = 0

    @dataclass
    class Loose:
        x: int = 0

        def __repr__(self) -> str:
            return "loose"

    @dataclass(frozen=True)
    class Hashed:
        x: int = 0

        def __hash__(self) -> int:
            return 7

    @dataclass(frozen=True)
    class Alike:  # noqa: PLW1641 - the decorator gives it one
        x: int = 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Alike)

    @dataclass(frozen=True, order=True, slots=True)
    class Ordered:
        x: int = 0

    return [Point, Named, Apart, Loose, Hashed, Alike, Ordered]


def describe_class(cls: type, *given: Any, **named: Any) -> list[Any]:
    """What there is to see of a class and its instances."""
    one, other = cls(*given, **named), cls(*given, **named)

    def call_or_describe(what: Any) -> Any:
        try:
            return what()
        except (FrozenInstanceError, TypeError) as error:
            return f"{type(error).__name__}: {error}"

    return [
        str(signature_of(cls)), cls.__match_args__, [f.name for f in dataclasses.fields(cls)],
        repr(one).partition(" object at")[0], one == other, one != other, one == 3,
        call_or_describe(lambda: hash(one) == hash(other)), dataclasses.asdict(replace(one, x=5)),
        call_or_describe(lambda: setattr(one, "x", 3)), call_or_describe(lambda: delattr(one, "x")),
        call_or_describe(lambda: setattr(one, "more", 3)), call_or_describe(lambda: one < other),
        copy.copy(one) == one, dataclasses.asdict(copy.deepcopy(one)),
        call_or_describe(lambda: cls(1, 2, 3, 4, 5)),
        cls.__init__.__qualname__, cls.__init__.__module__, cls.__dataclass_params__.frozen,
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(7))
def test_a_class_is_as_the_library_makes_it(number: int) -> None:
    ours, theirs = (
        declare_classes(way)[number] for way in (values.dataclass, dataclasses.dataclass)
    )
    assert describe_class(ours, 1) == describe_class(theirs, 1)
    assert (
        describe_class(ours) == describe_class(theirs) if number > 1 else ours(x=4, y=5).norm == 9
    )


@pytest.mark.parametrize("way", [values.dataclass, dataclasses.dataclass])
def test_a_class_of_ours_may_be_derived_from_in_both_ways(way: Any) -> None:
    point = declare_classes(values.dataclass)[0]

    @way(frozen=True)
    class Placed(point):  # type: ignore[misc, valid-type]
        at: str = ""

    class Plain(point):  # type: ignore[misc, valid-type]
        pass

    one, plain = Placed(1, at="here"), Plain(3)
    assert (one.y, one.norm, one.at) == (2, 3, "here") and "at='here'" in repr(one)
    for name in ("x", "at"):
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, 1)
    plain.own = 1  # as of the library: what is no field is free
    with pytest.raises(FrozenInstanceError):
        plain.x = 1
    with pytest.raises(TypeError, match="non-frozen"):
        way(type("Thawed", (point,), {}))


def test_nothing_is_compiled_before_it_is_asked_for() -> None:
    point = declare_classes(values.dataclass)[0]
    assert not inspect.isfunction(vars(point)["__init__"])
    point(1)
    assert inspect.isfunction(vars(point)["__init__"])
    assert not inspect.isfunction(vars(point)["__eq__"])
