"""`dataclass` as the standard library has it, but for when methods are made: when they are first
asked for.

The library compiles up to six functions of each class while its module loads. For our hundreds of
classes that was a third of what `import graphflow` takes, and most of them are never called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any

_FLAGS = {"__init__": "init", "__repr__": "repr", "__eq__": "eq", "__hash__": "unsafe_hash"}
"""Methods, and what the library is told in order to make them."""


class _LazyMethod:
    """Stands for a method of a class until it is asked for."""

    def __init__(self, cls: Any, name: str, frozen: bool) -> None:
        self._cls = cls
        self._name = name
        self._frozen = frozen

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        made = self._generate()
        setattr(self._cls, self._name, made)
        return made.__get__(instance, owner)

    def _generate(self) -> Any:
        """What the library makes for a class of the same fields."""
        cls, name = self._cls, self._name
        kept = ("__module__", "__qualname__", "__post_init__")
        body = {each: getattr(cls, each) for each in kept if hasattr(cls, each)}
        body["__annotations__"] = {field.name: field.type for field in fields(cls)}
        body["__doc__"] = name  # else the library makes one of the signature
        like = type(cls.__name__, (), body | {field.name: field for field in fields(cls)})
        wanted = {flag: each == name for each, flag in _FLAGS.items()}
        dataclasses.dataclass(frozen=self._frozen and name == "__init__", **wanted)(like)
        return like.__dict__[name]


def _frozen_methods(cls: Any) -> dict[str, Any]:
    """What keeps fields of an instance as they are."""
    names = frozenset(field.name for field in fields(cls))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _add_lazy_methods(cls: type, frozen: bool, **wanted: bool) -> type:
    """A class with its fields, and with methods to come where it has none of its own."""
    cls.__doc__ = cls.__doc__ or cls.__name__  # which the library would make of the signature
    own = dict(cls.__dict__)
    derived = any("__dataclass_fields__" in base.__dict__ for base in cls.__mro__[1:])
    nothing = dict.fromkeys(("init", "repr", "eq"), False)
    dataclasses.dataclass(frozen=frozen and derived, **nothing)(cls)
    if frozen and not derived:  # by functions that need not be compiled
        cls.__dataclass_params__.frozen = True  # type: ignore[attr-defined]
        for name, refuse in _frozen_methods(cls).items():
            setattr(cls, name, refuse)
    if wanted["eq"] and ("__hash__" not in own or ("__eq__" in own and own["__hash__"] is None)):
        cls.__hash__ = None  # type: ignore[assignment]
        wanted["unsafe_hash"] = frozen
        own.pop("__hash__", None)
    for name, flag in _FLAGS.items():
        if wanted.get(flag) and name not in own:
            setattr(cls, name, _LazyMethod(cls, name, frozen))
    return cls


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - for others to import
else:

    def dataclass(
        cls: type | None = None, /, *, init: bool = True, repr: bool = True, eq: bool = True,
        frozen: bool = False, **rest: bool,
    ) -> type | Callable[[type], type]:  # fmt: skip
        """As `dataclasses.dataclass`, which does it all where slots or an order are asked for."""
        if rest:
            whole = dataclasses.dataclass(init=init, repr=repr, eq=eq, frozen=frozen, **rest)
            return whole if cls is None else whole(cls)

        def decorate(cls: type) -> type:
            return _add_lazy_methods(cls, frozen, init=init, repr=repr, eq=eq)

        return decorate if cls is None else decorate(cls)
