"""Plans on disk: JSON, exact to the last bit, read back only if every part has its type."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from graphflow.base.argument_checks import format_value
from graphflow.errors import GraphflowError, PlanError
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.plan_data import PlanData
from graphflow.placement.plans.plan_model import PlanModel
from graphflow.placement.plans.plan_records import (
    BodyNode,
    Interval,
    LinkTotal,
    MeasuredSteps,
    PlannedNode,
    PlannedTransfer,
    PlannedWindow,
    Rival,
)
from graphflow.placement.problems.problem import Assignment, Problem

FORMAT = "graphflow plan"
VERSION = 1

_ARRAYS = (
    "compute", "edges", "bytes", "tensor", "latency", "bandwidth", "memory", "output_memory",
    "capacity", "groups", "prefer", "shared", "routes",
)  # fmt: skip


def dumps(plan: PlanData) -> str:
    """A plan as JSON."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "cluster": plan.cluster.to_dict(),
        "placer": plan.placer,
        "makespan": plan.makespan,
        "overhead": plan.overhead,
        "low": plan.low,
        "high": plan.high,
        "rival": None if plan.rival is None else asdict(plan.rival),
        "peak_memory": dict(plan.peak_memory),
        "baselines": dict(plan.baselines),
        "shapes": {name: list(shape) for name, shape in plan.shapes.items()},
        "fingerprint": plan.fingerprint,
        "reproducible": plan.reproducible,
        "nodes": [asdict(node) for node in plan.nodes],
        "transfers": [asdict(transfer) for transfer in plan.transfers],
        "windows": [asdict(window) for window in plan.windows],
        "measured": None if plan.measured is None else asdict(plan.measured),
        "model": None if plan.model is None else _model(plan.model),
    }
    return json.dumps(data, allow_nan=False, ensure_ascii=False, indent=1)


def _model(model: PlanModel) -> dict[str, Any]:
    problem = model.problem
    arrays = {name: getattr(problem, name) for name in _ARRAYS}
    return {
        "problem": {
            **{k: None if v is None else _to_lists(v) for k, v in arrays.items()},
            "contention": problem.contention,
            "client": problem.client,
        },
        "device": model.assignment.device.tolist(),
        "order": model.assignment.order.tolist(),
        "names": list(model.names),
        "tensors": list(model.tensors),
        "devices": list(model.devices),
        "limits": dict(model.limits),
    }


def _to_lists(array: np.ndarray[Any, Any]) -> Any:
    """An array as lists; infinite is null."""
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array.tolist()
    plain = array.astype(object)
    plain[np.isinf(array)] = None
    return plain.tolist()


def loads(text: str, source: str) -> dict[str, Any]:
    """Return the arguments of the plan that `dumps` wrote.

    Raises:
        PlanError: no JSON, no plan, another version, or a damaged one.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{source} is no plan: not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"{source} is no plan; save one with plan.save('plan.json')")
    if data.get("version") != VERSION:
        raise PlanError(
            f"{source} is a plan of version {format_value(data.get('version'))}, this is version "
            f"{VERSION}; plan again with gf.plan"
        )
    try:
        return _values(data)
    except KeyError as error:
        raise PlanError(f"the plan {source} is damaged: {error} is missing") from None
    except (
        TypeError,
        ValueError,
        OverflowError,
        LookupError,
        AttributeError,
        GraphflowError,
    ) as error:
        raise PlanError(f"the plan {source} is damaged: {error}") from None


def _values(data: Mapping[str, Any]) -> dict[str, Any]:
    measured = data["measured"]
    return {
        "cluster": Cluster.from_dict(data["cluster"]),
        "placer": _text(data["placer"]),
        "nodes": tuple(_record(PlannedNode, node) for node in data["nodes"]),
        "transfers": tuple(_record(PlannedTransfer, transfer) for transfer in data["transfers"]),
        "makespan": float(data["makespan"]),
        "overhead": float(data.get("overhead", 0.0)),
        "low": _optional_seconds(data.get("low")),
        "high": _optional_seconds(data.get("high")),
        "rival": None if data.get("rival") is None else _record(Rival, data["rival"]),
        "peak_memory": {_text(k): int(v) for k, v in data["peak_memory"].items()},
        "baselines": {_text(k): float(v) for k, v in data["baselines"].items()},
        "shapes": {k: tuple(int(s) for s in shape) for k, shape in data["shapes"].items()},
        "fingerprint": _text(data["fingerprint"]),
        "reproducible": data.get("reproducible", True) is True,
        "windows": tuple(map(_read_window, data.get("windows", ()))),
        "measured": None if measured is None else _read_measured(measured),
        "model": None if data["model"] is None else _read_model(data["model"]),
    }


def _optional_seconds(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{format_value(value)} is no text")
    return value


_READ: dict[str, Callable[[Any], Any]] = {
    "str": _text, "float": float, "int": int, "float | None": _optional_seconds,
}  # fmt: skip
_NEWER = ("fused", "task", "low", "high", "basis")
"""Fields of nodes that older plans lack: kernels, tasks, intervals."""


def _record(kind: type[Any], data: Mapping[str, Any]) -> Any:
    """A dataclass from its fields, each converted to its type."""
    values: dict[str, Any] = {}
    for each in fields(kind):
        if each.name == "holds":  # plans before bodies were drawn have none
            values[each.name] = tuple(_record(BodyNode, row) for row in data.get(each.name, ()))
            continue
        if each.name in _NEWER and each.name not in data:
            continue
        value = data[each.name]
        if each.name == "inputs":
            values[each.name] = tuple(map(_text, value))
        elif each.name == "candidates":
            values[each.name] = {_text(k): float(v) for k, v in value.items()}
        else:
            values[each.name] = _READ[str(each.type)](value)
    return kind(**values)


def _read_window(data: Mapping[str, Any]) -> PlannedWindow:
    return PlannedWindow(
        node=_text(data["node"]),
        text=_text(data["text"]),
        seconds=float(data["seconds"]),
        high=_optional_seconds(data["high"]),
        busy={_text(k): float(v) for k, v in data["busy"].items()},
        bars=tuple(_record(Interval, row) for row in data["bars"]),
        links=tuple(_record(LinkTotal, row) for row in data["links"]),
    )


def _read_measured(data: Mapping[str, Any]) -> MeasuredSteps:
    return MeasuredSteps(
        makespan=float(data["makespan"]),
        timeline=tuple(_record(Interval, row) for row in data["timeline"]),
        peak_memory={_text(k): int(v) for k, v in data["peak_memory"].items()},
        steps=int(data["steps"]),
    )


def _read_model(data: Mapping[str, Any]) -> PlanModel:
    stored = data["problem"]
    nodes, devices = len(data["names"]), len(data["devices"])
    arrays: dict[str, Any] = {
        name: None if stored[name] is None else _array(stored[name])
        for name in _ARRAYS
        if name in stored or name not in ("shared", "routes")  # plans before topologies had none
    }
    arrays["compute"] = arrays["compute"].reshape(nodes, devices)
    problem = Problem(**arrays, contention=bool(stored["contention"]), client=stored["client"])
    assignment = Assignment(_whole(data["device"]), _whole(data["order"]))
    assignment.validate(problem)
    return PlanModel(
        problem,
        assignment,
        tuple(map(_text, data["names"])),
        tuple(map(_text, data["tensors"])),
        tuple(map(_text, data["devices"])),
        {_text(k): _text(v) for k, v in data["limits"].items()},
    )


def _array(value: Any) -> np.ndarray[Any, Any]:
    array = np.array(value)
    if array.dtype != object:
        return array
    flat = [float("inf") if x is None else float(x) for x in array.ravel().tolist()]
    return np.array(flat).reshape(array.shape)


def _whole(value: Any) -> np.ndarray[Any, Any]:
    return np.array(value, dtype=np.int64)
