"""Users' modules of ops and host functions, and which of them a process may import.

No executable code crosses the wire. A session sends names of modules. A worker imports a module
only if it was started with that name allowed. Registered ops stay for the life of the process, and
all its sessions see them.
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
    """Return names of modules as the user gave them, without duplicates.

    Raises:
        ArgumentError: not a list of names such as "my_ops" or "package.ops".
    """
    if isinstance(names, str) or not isinstance(names, Sequence | Set):
        raise ArgumentError(
            f"{what} must be a list of names of modules, such as ['my_ops'], not {names!r}"
        )
    for name in names:
        if not isinstance(name, str) or not all(p.isidentifier() for p in name.split(".")):
            raise ArgumentError(
                f"{what} must hold names of modules, such as 'my_ops', not {name!r}"
            )
    return tuple(dict.fromkeys(names))


def require_modules(names: Collection[str], what: str) -> None:
    """Refuse names of modules that this process cannot find.

    The modules are not imported, but Python imports the packages that they are in.

    Raises:
        ArgumentError: there is no such module.
    """
    for name in names:
        try:
            found = importlib.util.find_spec(name)
        except ImportError:  # the package that it is in cannot be imported
            found = None
        except ValueError:  # loaded already, without a file: __main__, for example
            continue
        if found is None:
            raise ArgumentError(
                f"{what}: there is no module {name!r} here; install it for {sys.executable}, or "
                "put its folder on PYTHONPATH"
            )


def import_allowed(names: Collection[str], allowed: Collection[str] | None = None) -> None:
    """Import the modules that a session names.

    Args:
        allowed: the names that this process was started with; None if the session is this
            process's own.

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
    """Return the folders in which this process finds modules, for the path of a child process."""
    found = []
    for name in names:
        spec = importlib.util.find_spec(name.partition(".")[0])
        if spec is not None:
            places = list(spec.submodule_search_locations or [spec.origin or ""])
            found += [str(Path(place).resolve().parent) for place in places if place]
    return list(dict.fromkeys(found))


def load_function(place: str) -> Callable[..., Any]:
    """Return the function `module:name`. Call it only with trusted names: it imports any module.

    Raises:
        ArgumentError: there is no such function.
        OpError: the module cannot be imported.
    """
    module, _, name = place.partition(":")
    if not name or not all(p.isidentifier() for p in (*module.split("."), *name.split("."))):
        raise ArgumentError(f"a function must be named as 'module:function', not {place!r}")
    found: Any = _import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ArgumentError(f"{place!r}: the module has no function of that name")
    return found  # type: ignore[no-any-return]


def allowed_function(place: str) -> Callable[..., Any]:
    """Return the function `module:name` that a graph from the wire calls.

    The module itself must define the function: one that it merely imports is refused.

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
