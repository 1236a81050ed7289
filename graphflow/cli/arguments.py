"""Parse the arguments of the command line: clusters, placers, scripts and what they define."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from graphflow.base.argument_checks import signature_of
from graphflow.errors import ArgumentError, FetchError, GraphflowError, PlanError
from graphflow.frontend.pytree import bind, flatten
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.ir.spec import show_shape
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.placers import Placer, get_placer
from graphflow.placement.placers.auto import Auto


@contextmanager
def option_errors(option: str) -> Iterator[None]:
    """Turn errors of the block into ArgumentErrors that name the option."""
    try:
        yield
    except GraphflowError as error:
        names_option = str(error).startswith("--")
        raise ArgumentError(str(error) if names_option else f"{option}: {error}") from error


def check_choice(option: str, value: str | None, choices: Iterable[str]) -> None:
    """Check that an option that was given is one of some words."""
    if value is not None and value not in choices:
        raise ArgumentError(f"{option} is one of {', '.join(choices)}, not {value!r}")


def names_of(devices: str) -> list[str]:
    """Return the device names of a comma-separated list."""
    names = [name.strip() for name in devices.split(",") if name.strip()]
    if not names:
        raise ArgumentError(f"--devices {devices!r} names no device; give e.g. cpu:0")
    return names


def cluster_of(
    workers: int | None, path: Path | None, devices: str | None, threads: int | None
) -> Cluster:
    """Return the cluster that --workers, --cluster, --devices and --threads mean.

    Without --devices, this process takes what `gf.Cluster.here()` takes, and workers `cpu:0`.
    """
    if workers is not None and path is not None:
        raise ArgumentError("give --workers or --cluster, not both")
    if path is not None:
        if threads is not None or devices is not None:
            raise ArgumentError(f"give devices and threads in {path}, not as options beside it")
        return load_cluster(path)
    names = None if devices is None else names_of(devices)
    if workers is None:
        with option_errors("--devices"):
            return Cluster.here(devices=names, threads=threads)
    with option_errors("--workers, --devices"):
        return Cluster.local(workers=workers, devices=names or ["cpu:0"], threads=threads)


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file."""
    with option_errors("--cluster"):
        return Cluster.load(existing_file(path))


def placer_of(name: str, seconds: float | None) -> str | Placer:
    """Return a placer by name; --seconds limits the search of "auto"."""
    with option_errors("--placer"):
        get_placer(name)
    if seconds is None:
        return name
    if name != "auto":
        raise ArgumentError(f"--seconds limits --placer auto, not {name}")
    with option_errors("--seconds"):
        return Auto(seconds=seconds)


def hardware_of(hardware: str) -> Cluster:
    """Return a hypothetical cluster by its short name, with the network of its hosts after an @."""
    name, separator, network = hardware.partition("@")
    with option_errors("--hardware"):
        return Cluster.hypothetical(name, network=network.strip() if separator else None)


def existing_folder(path: Path) -> Path:
    """Return the absolute path of a folder that exists."""
    if not os.path.isdir(path):  # Path.is_dir raises an error for a name that is too long
        raise ArgumentError(f"{path}: there is no such directory")
    return path.absolute()


def existing_file(path: Path) -> Path:
    """Return the path of a file that exists."""
    if not os.path.isfile(path):
        raise ArgumentError(f"{path}: there is no such file")
    return path


def load_target(target: str) -> Any:
    """Run a script, and return what `script.py:name` names; if that is a function, its result."""
    path, separator, name = target.rpartition(":")
    if not separator or not name.isidentifier():
        raise ArgumentError(
            f"{target!r} is not of the form script.py:name, where the script defines the name as a "
            "tensor, fetches, or a function that makes them"
        )
    script = existing_file(Path(path))
    sys.argv = [path]
    with run_user_code(script, ours=GraphflowError):
        names = runpy.run_path(str(script), run_name="graphflow_plan")
    if name not in names:
        public = ", ".join(n for n in names if not n.startswith("_"))
        raise ArgumentError(f"{path} defines no {name!r}; it defines {public}")
    value = names[name]
    if isinstance(value, Tensor) or not callable(value):
        return value
    try:
        signature_of(value).bind()
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{target} cannot be called without arguments: {error}") from None
    with run_user_code(script, ours=GraphflowError):
        return value()


@contextmanager
def run_user_code(script: Path, ours: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Run a user's code as `python script.py` would, with its folder on the path.

    An error ends the command, with the traceback from the script on.

    Args:
        ours: errors whose message is enough; they pass.
    """
    beside = str(script.resolve().parent)
    sys.path.insert(0, beside)
    try:
        yield
    except ours:
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        raise typer.Exit(1) from None
    finally:
        if beside in sys.path:
            sys.path.remove(beside)


def shapes_of(target: str, fetches: Any, given: Sequence[str]) -> Mapping[Tensor, tuple[int, ...]]:
    """Return the shapes of a target's placeholders, from options such as x=128,64."""
    try:
        graph = Graph(flatten(fetches)[0])
    except FetchError:
        raise ArgumentError(
            f"{target} is {type(fetches).__name__}: name a tensor, or a list, tuple or dict of them"
        ) from None
    by_name = {graph.names[node]: node.outputs[0] for node in graph.placeholders}
    shapes: dict[Tensor, tuple[int, ...]] = {}
    for text in given:
        name, separator, sizes = text.partition("=")
        if not separator:
            raise ArgumentError(f"--shape {text!r} is not of the form name=128,64")
        if name not in by_name:
            raise ArgumentError(
                f"--shape {text!r}: no placeholder is named {name!r}; "
                f"there are {', '.join(by_name) or 'none'}"
            )
        if by_name[name] in shapes:
            raise ArgumentError(f"--shape {text!r}: the sizes of {name!r} are given twice")
        try:
            shapes[by_name[name]] = tuple(int(size) for size in sizes.split(",") if size.strip())
        except ValueError:
            raise ArgumentError(f"--shape {text!r} is not of the form name=128,64") from None
    for name, tensor in by_name.items():
        if tensor not in shapes and not tensor.spec.is_concrete:
            raise ArgumentError(
                f"placeholder {name!r} takes {show_shape(tensor.spec.shape)}: "
                f"give its sizes, --shape {name}=…"
            )
    plain = {t: tuple(s for s in t.spec.shape if isinstance(s, int)) for t in by_name.values()}
    known = {tensor.node: shapes.get(tensor, shape) for tensor, shape in plain.items()}
    with option_errors("--shape"):
        bind(graph, known, PlanError)
    return shapes
