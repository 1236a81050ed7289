"""`dataclass` that generates its methods on first use.

The standard library compiles up to six methods per class when a module loads. For the hundreds of
classes here that took a third of `import graphflow`, and most of these methods are never called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any

_FLAGS = {"__init__": "init", "__repr__": "repr", "__eq__": "eq", "__hash__": "unsafe_hash"}
"""Generated methods, and the keyword of `dataclasses.dataclass` that asks for each."""


class _LazyMethod:
    """Descriptor that generates a method of a class when it is first looked up."""

    def __init__(self, cls: Any, name: str, frozen: bool) -> None:
        self._cls = cls
        self._name = name
        self._frozen = frozen

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        made = self._generate()
        setattr(self._cls, self._name, made)
        return made.__get__(instance, owner)

    def _generate(self) -> Any:
        """Return the method as the standard library generates it for a class of the same fields."""
        cls, name = self._cls, self._name
        kept = ("__module__", "__qualname__", "__post_init__")
        body = {each: getattr(cls, each) for each in kept if hasattr(cls, each)}
        body["__annotations__"] = {field.name: field.type for field in fields(cls)}
        body["__doc__"] = name  # keeps the library from building one from the signature
        like = type(cls.__name__, (), body | {field.name: field for field in fields(cls)})
        wanted = {flag: each == name for each, flag in _FLAGS.items()}
        dataclasses.dataclass(frozen=self._frozen and name == "__init__", **wanted)(like)
        return like.__dict__[name]


def _frozen_methods(cls: Any) -> dict[str, Any]:
    """Return `__setattr__` and `__delattr__` that protect the fields of a frozen class."""
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
    """Collect a class's fields, and add lazy methods where it defines none itself."""
    # Without a docstring the library would build one from the signature, which takes time.
    cls.__doc__ = cls.__doc__ or cls.__name__
    own = dict(cls.__dict__)
    derived = any("__dataclass_fields__" in base.__dict__ for base in cls.__mro__[1:])
    nothing = dict.fromkeys(("init", "repr", "eq"), False)
    dataclasses.dataclass(frozen=frozen and derived, **nothing)(cls)
    if frozen and not derived:  # closures serve here: nothing has to be compiled
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
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - re-exported
else:

    def dataclass(
        cls: type | None = None, /, *, init: bool = True, repr: bool = True, eq: bool = True,
        frozen: bool = False, **rest: bool,
    ) -> type | Callable[[type], type]:  # fmt: skip
        """As `dataclasses.dataclass`; options such as slots or order go to the library
        unchanged."""
        if rest:
            whole = dataclasses.dataclass(init=init, repr=repr, eq=eq, frozen=frozen, **rest)
            return whole if cls is None else whole(cls)

        def decorate(cls: type) -> type:
            return _add_lazy_methods(cls, frozen, init=init, repr=repr, eq=eq)

        return decorate if cls is None else decorate(cls)
