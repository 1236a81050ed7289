"""The interface of placers, and their registry by name."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from graphflow.base.argument_checks import checks_argument_names, did_you_mean
from graphflow.base.formatting import show_memory
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import MemoryLimitError, PlacementError
from graphflow.placement.problems.infeasibility import shortages
from graphflow.placement.problems.problem import Assignment, Floats, Ints, Problem
from graphflow.placement.simulation.simulator import simulate


@dataclass(frozen=True)
class Placer(ABC):
    """An algorithm that answers a placement problem; its fields are its settings."""

    @abstractmethod
    def place(self, problem: Problem) -> Assignment:
        """Place every node; the same problem always gives the same assignment."""


_PLACERS: dict[str, Placer] = {}


def register_placer(name: str, placer: Placer) -> None:
    """Make a placer available as `placer="name"`.

    Raises:
        PlacementError: the name is taken by a placer of another type, or `placer` is not a
            `Placer`.
    """
    if not isinstance(placer, Placer):
        raise PlacementError(
            f"placer {name!r} must be an instance of Placer, not {type(placer).__name__}"
        )
    if name in _PLACERS and type(_PLACERS[name]) is not type(placer):
        raise PlacementError(
            f"a placer named {name!r} exists ({type(_PLACERS[name]).__name__}); choose another name"
        )
    _PLACERS[name] = placer


def placer_names() -> tuple[str, ...]:
    """Names of all registered placers."""
    _discover()
    return tuple(sorted(_PLACERS))


@checks_argument_names(PlacementError)
def get_placer(placer: str | Placer) -> Placer:
    """The placer of that name; a placer itself passes through.

    Raises:
        PlacementError: no such placer; the message lists those that exist.
    """
    if isinstance(placer, Placer):
        return placer
    if not isinstance(placer, str):
        raise PlacementError(f"placer must be a name or a Placer, not {type(placer).__name__}")
    names = placer_names()
    if placer not in names:
        hint = f"{did_you_mean(placer, names)} there are: {', '.join(names)}".lstrip()
        raise PlacementError(f"no placer named {placer!r}; {hint}")
    return _PLACERS[placer]


@checks_argument_names(PlacementError)
def place(problem: Problem, placer: str | Placer = "greedy") -> Assignment:
    """Decide where and in which order the nodes of a problem run.

    Raises:
        PlacementError: no such placer, or a placer's answer breaks a constraint.
        MemoryLimitError: the placer found nothing that fits the devices' memory.
    """
    if not isinstance(problem, Problem):
        raise PlacementError(
            f"place() takes a Problem, not {type(problem).__name__}; graphs are placed by gf.plan"
        )
    assignment = get_placer(placer).place(problem)
    assignment.validate(problem)
    if not is_sure_to_fit(problem, assignment.device):
        peak = simulate(problem, assignment).peak_memory
        if np.any(peak > problem.capacity):
            raise memory_error(problem, peak)
    return assignment


def is_memory_unconstrained(problem: Problem) -> bool:
    """Return True if every device could hold all there is, so that memory decides nothing."""
    total = float(problem.memory.sum())
    if problem.output_memory is not None:
        _, first = np.unique(problem.tensor, return_index=True)
        total += float(problem.output_memory.sum() + problem.bytes[first].sum())
    return not np.any(total > problem.capacity)


def has_closed_form(problem: Problem) -> bool:
    """Return True if a schedule's times need no event loop: links never wait, memory over time
    decides nothing."""
    return not problem.contention and (
        problem.output_memory is None or is_memory_unconstrained(problem)
    )


def is_sure_to_fit(problem: Problem, device: Ints) -> bool:
    """Return True if a device map fits in any order, as far as can be seen without running it."""
    if problem.output_memory is None:
        used = np.bincount(device, weights=problem.memory, minlength=problem.devices)
        return bool(np.all(used <= problem.capacity))
    return is_memory_unconstrained(problem)


def memory_error(problem: Problem, peak: Floats) -> MemoryLimitError:
    """Say what is missing where, and which nodes are the biggest."""
    missing = peak - problem.capacity
    at = int(np.argmax(missing))
    transient = (
        problem.output_memory if problem.output_memory is not None else np.zeros(problem.nodes)
    )
    need = problem.memory + transient
    biggest = [int(v) for v in np.argsort(-need, kind="stable")[:5] if need[v] > 0]
    error = MemoryLimitError(
        f"no placement found that fits: device {at} would need {show_memory(peak[at])} "
        f"of its {show_memory(problem.capacity[at])} "
        f"({show_memory(missing[at])} missing); all nodes keep "
        f"{show_memory(float(problem.memory.sum()))} between steps, and the "
        f"devices offer {', '.join(show_memory(c) for c in problem.capacity)}; biggest nodes: "
        + ", ".join(f"{v} ({show_memory(need[v])})" for v in biggest)
        + _impossible(problem)
        + ". Use more or larger devices, smaller batches, or loosen pins and groups"
    )
    error.nodes = tuple(biggest)
    return error


def _impossible(problem: Problem) -> str:
    """Return the error for a problem that no placement can hold, or None."""
    told = []
    for each in shortages(problem)[:3]:
        need, room, missing = map(show_memory, (each.need, each.room, each.missing))
        if each.device is None:
            told.append(f"all that stays needs {need} of {room} ({missing} missing)")
            continue
        nodes = ", ".join(map(str, each.nodes[:4])) + (", …" if len(each.nodes) > 4 else "")
        what = f"node {nodes}" if len(each.nodes) == 1 else f"group of nodes {nodes}"
        told.append(
            f"{what} alone needs {need}, and the roomiest device that it may use, "
            f"{each.device}, has {room} ({missing} missing)"
        )
    return f". No placement can fit: {'; '.join(told)}" if told else ""


def _discover() -> None:
    """Import the modules beside this one: each registers its placer."""
    package = __name__.rpartition(".")[0]
    for module in sorted(info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])):
        importlib.import_module(f"{package}.{module}")
