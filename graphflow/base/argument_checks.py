"""Arguments of public functions are what their annotations say, or an error names them.

One reading of annotations for functions, layers and frozen values: flags, numbers and words, lists
and dicts of them, functions, and our own classes. What an annotation leaves open (`Any`, `Tensor`,
a name that is only imported for type checkers) is left to the function.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from graphflow.base.argument_kinds import REFUSED, Kind, kind_of
from graphflow.base.argument_names import explain_repeated, translate_argument
from graphflow.base.source_location import user_location, with_location
from graphflow.errors import ArgumentError, GraphError, GraphflowError

if sys.version_info >= (3, 14):
    from annotationlib import Format

F = TypeVar("F", bound=Callable[..., Any])


def validate_arguments(f: Callable[..., Any], what: str) -> Callable[..., Any]:
    """A function whose arguments are what its annotations say, numpy's scalars as Python's, and
    whose errors say that they are of `what`, on the user's line.

    Args:
        what: its name; "" for that of its first argument's class.
    """
    arguments = functools.cache(lambda: _arguments(f))  # at the first call: imports stay quick

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            for place, name, taken in _convert_arguments(arguments(), args, kwargs):
                if place < len(args):
                    args = (*args[:place], taken, *args[place + 1 :])
                else:
                    kwargs[name] = taken
            return f(*args, **kwargs)
        except GraphError as error:
            raise with_location(_subject(what, args), error) from None
        except MemoryError as error:  # numbers that it puts into the graph
            too_large = ArgumentError(f"{error} while the graph is built; give smaller sizes")
            raise with_location(_subject(what, args), too_large) from None
        except TypeError:
            if (wrong := _describe_mismatch(f, args, kwargs)) is None:
                raise
            raise with_location(_subject(what, args), ArgumentError(wrong)) from None

    return wrapper


def checks_arguments(error: type[GraphflowError]) -> Callable[[F], F]:
    """A public function, or a class whose `__init__`, refuses arguments that are not what its
    annotations say, with such errors. What it refuses itself goes first: it knows a remedy."""

    def decorate(public: F) -> F:
        if isinstance(public, type):
            setattr(public, "__init__", _check_values(_own_method(public, "__init__"), "", error))  # noqa: B010
            return public
        return cast(F, _check_values(public, public.__name__, error))

    return decorate


def checks_argument_names(
    error: type[GraphflowError], but: Collection[str] = ()
) -> Callable[[F], F]:
    """A public function, or a class's `__init__` and public methods, tell what was meant by an
    argument that they do not have, and what is missing, with such errors. For what checks its
    values itself.

    Args:
        but: methods of which each microsecond counts; their errors are Python's.
    """

    def decorate(public: F) -> F:
        if not isinstance(public, type):
            return cast(F, _check_names(public, public.__name__, error))
        methods = {"__init__": public.__name__} | {
            name: f"{public.__name__}.{name}" for name in vars(public) if name[0] != "_"
        }
        for name, what in methods.items():
            method = _own_method(public, name)
            if inspect.isfunction(method) and name not in but:
                setattr(public, name, _check_names(method, what, error))
        return public

    return decorate


def _own_method(cls: type, name: str) -> Any:
    """A method as it stands in the class; those of a dataclass are made when they are asked for."""
    getattr(cls, name)
    return vars(cls)[name]


def _check_names(
    f: Callable[..., Any], what: str, error: type[GraphflowError]
) -> Callable[..., Any]:
    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except TypeError:
            if (wrong := _describe_mismatch(f, args, kwargs)) is None:
                raise
            raise error(f"{what} at {user_location()}: {wrong}") from None

    return wrapper


def _check_values(
    f: Callable[..., Any], what: str, error: type[GraphflowError]
) -> Callable[..., Any]:
    arguments = functools.cache(lambda: _arguments(f))

    def find_error(args: Sequence[Any], kwargs: Mapping[str, Any]) -> GraphflowError | None:
        try:
            _convert_arguments(arguments(), args, kwargs)
        except ArgumentError as refused:
            return error(f"{_subject(what, args)} at {user_location()}: {refused}")
        return None

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            result = f(*args, **kwargs)
        except GraphflowError:
            raise
        except Exception as failed:
            wrong = find_error(args, kwargs)
            unknown = _describe_mismatch(f, args, kwargs) if isinstance(failed, TypeError) else None
            if unknown is not None:
                wrong = error(f"{_subject(what, args)} at {user_location()}: {unknown}")
            if wrong is None:
                raise
            raise wrong from None
        if (wrong := find_error(args, kwargs)) is not None:
            raise wrong
        return result

    return wrapper


def signature_of(f: Callable[..., Any]) -> inspect.Signature:
    """What a function takes. Its annotations stay unevaluated, where Python since 3.14 evaluates
    them: names that a user imports for type checkers only would be errors.

    Raises:
        TypeError, ValueError: nothing is known of it, as of what is written in C.
    """
    if sys.version_info >= (3, 14):
        return inspect.signature(f, annotation_format=Format.STRING)  # noqa: TID251
    return inspect.signature(f)  # noqa: TID251


def did_you_mean(word: Any, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """`did you mean 'axis'?`, of a word that is not known; "" where nothing is like it."""
    near = difflib.get_close_matches(str(word), list(known), most, cutoff)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def format_value(value: Any, most: int = 200) -> str:
    """A value as an error shows it, in so many characters."""
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__
        return f"a {type(value).__name__} ({type(error).__name__} from its repr)"
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


class _Argument(NamedTuple):
    place: int
    name: str
    kind: Kind


def _subject(what: str, args: Sequence[Any]) -> str:
    return what or type(args[0]).__name__


def _convert_arguments(
    arguments: Sequence[_Argument], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[int, str, Any]]:
    """Those that are given as something else than they are taken as: where, and as what.

    Raises:
        ArgumentError: one is not what its annotation says.
    """
    found = []
    for place, name, kind in arguments:
        value = args[place] if place < len(args) else kwargs.get(name, REFUSED)
        taken = value if value is REFUSED else kind.take(value)
        if taken is not value:
            _require(taken, name, kind, value)
            found.append((place, name, taken))
    return found


def _require(taken: Any, name: str, kind: Kind, value: Any) -> None:
    if taken is REFUSED:
        raise ArgumentError(f"{name} is {kind.words}, not {format_value(value)}")


def _arguments(f: Callable[..., Any]) -> list[_Argument]:
    """The arguments of a function whose annotations say what they are."""
    f = inspect.unwrap(f)  # other decorators take any arguments
    code = getattr(f, "__code__", None)
    if code is None:
        return []
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = []
    for i, name in enumerate(names):
        kind = kind_of(f.__annotations__.get(name), getattr(f, "__globals__", {}))
        if kind is not None:
            found.append(_Argument(i if i < code.co_argcount else sys.maxsize, name, kind))
    return found


def _describe_mismatch(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """What is wrong with a call that gives other arguments than a function has; None: nothing."""
    signature = signature_of(f)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [name for name in signature.parameters if name != "self"]
        unknown = [name for name in kwargs if name not in names]
        if unknown:
            return describe_unexpected(unknown[0], names)
        twice = str(error).partition("multiple values for argument ")[2].strip("'")
        told = f"{error} ({explain_repeated(twice)})" if twice else str(error)
        return f"{told}; it takes {', '.join(names) or 'nothing'}"
    return None


def describe_unexpected(word: str, names: Sequence[str]) -> str:
    """What is wrong with a call that gives the argument `word` to a function that takes `names`."""
    hint = translate_argument(word, names) or did_you_mean(word, names)
    told = f"got an unexpected keyword argument {word!r}" + f" ({hint})" * bool(hint)
    return f"{told}; it takes {', '.join(names) or 'nothing'}"


# Numbers ---------------------------------------------------------------------------------------


def to_builtin(value: Any) -> Any:
    """A number of numpy's as Python has it; anything else as it is."""
    if isinstance(value, np.integer):
        return int(value)
    return float(value) if isinstance(value, np.floating) else value


def as_seconds(value: Any) -> float | None:
    """A number of seconds from 0 on; None where a value is none, or no float holds it."""
    value = to_builtin(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if 0 <= found < math.inf else None
