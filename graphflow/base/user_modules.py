"""Users' modules of ops and host functions: which of them a process imports because a session asks.

Nothing executable crosses the wire. A session sends the names of modules; a worker imports one only
if it was started with that name allowed. What a module registers stays for the life of the
process, so that all its sessions see it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence, Set
from pathlib import Path
from typing import Any

from graphflow.errors import ArgumentError, ModuleNotAllowed, OpError

_admitted: set[str] = set()


def module_names(names: Any, what: str) -> tuple[str, ...]:
    """Names of modules as the user gave them.

    Raises:
        ArgumentError: no list of names such as "my_ops" or "package.ops".
    """
    if isinstance(names, str) or not isinstance(names, Sequence | Set):
        raise ArgumentError(f"{what} is a list of names of modules, such as ['my_ops']: {names!r}")
    for name in names:
        if not isinstance(name, str) or not all(p.isidentifier() for p in name.split(".")):
            raise ArgumentError(f"{what} holds names of modules, such as 'my_ops', not {name!r}")
    return tuple(dict.fromkeys(names))


def require_modules(names: Collection[str], what: str) -> None:
    """Refuse names of modules that this process would not find. None of them is imported, but for
    the packages that a module is in.

    Raises:
        ArgumentError: there is no such module.
    """
    for name in names:
        try:
            found = importlib.util.find_spec(name)
        except ImportError:  # of a package that it is in
            found = None
        except ValueError:  # a module of this process without a file, such as __main__
            continue
        if found is None:
            raise ArgumentError(
                f"{what}: there is no module {name!r} here; install it for {sys.executable}, or "
                "put its folder on PYTHONPATH"
            )


def import_allowed(names: Collection[str], allowed: Collection[str] | None = None) -> None:
    """Import modules that a session names.

    Args:
        allowed: the names that this process was started with; None: the session is this process's
            own.

    Raises:
        ModuleNotAllowed: a name is not among those allowed; nothing is imported.
        OpError: a module cannot be imported here.
    """
    refused = [name for name in names if allowed is not None and name not in allowed]
    if refused:
        options = " ".join(f"--allow-ops {name}" for name in refused)
        raise ModuleNotAllowed(
            f"the session asks for ops of {', '.join(refused)}, and this worker was started with "
            f"{', '.join(sorted(allowed or ())) or 'no modules'} allowed; start it with "
            f"`graphflow worker {options} …`, or leave ops= out"
        )
    for name in names:
        _import_module(name)
        _admitted.add(name)


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OpError(
            f"cannot import {name!r}: {error}; install it for {sys.executable}, or put its folder "
            "on PYTHONPATH"
        ) from error


def module_folders(names: Collection[str]) -> list[str]:
    """Where this process finds modules: what a process started for it must have on its path."""
    found = []
    for name in names:
        spec = importlib.util.find_spec(name.partition(".")[0])
        if spec is not None:
            places = list(spec.submodule_search_locations or [spec.origin or ""])
            found += [str(Path(place).resolve().parent) for place in places if place]
    return list(dict.fromkeys(found))


def load_function(place: str) -> Callable[..., Any]:
    """The function `module:name`, in a process that may import the module whatever it is.

    Raises:
        ArgumentError: no such function.
        OpError: the module cannot be imported.
    """
    module, _, name = place.partition(":")
    if not name or not all(p.isidentifier() for p in (*module.split("."), *name.split("."))):
        raise ArgumentError(f"a function is named as 'module:function', not {place!r}")
    found: Any = _import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ArgumentError(f"{place!r}: the module has no function of that name")
    return found  # type: ignore[no-any-return]


def allowed_function(place: str) -> Callable[..., Any]:
    """The function `module:name` that a graph from the wire asks for: one that the module itself
    defines, not one that it imports.

    Raises:
        ModuleNotAllowed: no session was given that module here.
    """
    module, _, name = place.partition(":")
    if module not in _admitted:
        raise ModuleNotAllowed(
            f"the graph calls {place!r}, and no session of this worker was given ops={[module]}; "
            f"open it with gf.Session(cluster, ops=[{module!r}])"
        )
    found = getattr(sys.modules.get(module), name, None)
    if not callable(found) or getattr(found, "__module__", None) != module:
        raise ModuleNotAllowed(
            f"the graph calls {place!r}, and {module!r} defines no such function here; do all "
            "workers have the same code?"
        )
    return found  # type: ignore[no-any-return]
