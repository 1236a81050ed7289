"""A session's state as plain data, for programs that look at it: GET /session.json and /plan.json.

It is read on a thread of the metrics server while steps run, from numbers that are kept anyway.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.step_executor import StepExecutor
from graphflow.planning.deployment import Deployment
from graphflow.runtime.host.host_interface import Hosts

_RECENT = 50  # steps whose median duration counts


def documents_of(
    hosts: Hosts, deployment: Deployment, steps: StepExecutor
) -> Mapping[str, Callable[[], bytes]]:
    """Return what a session answers to a request of each path, as functions of the moment."""
    return {
        "/session.json": lambda: json.dumps(describe(hosts, deployment, steps)).encode(),
        "/plan.json": lambda: _plan_of(steps.last),
    }


def describe(hosts: Hosts, deployment: Deployment, steps: StepExecutor) -> dict[str, Any]:
    """Return the state of a session: its steps, the last one's scalars, its devices and workers."""
    compiled, cluster = steps.last, deployment.all_devices
    devices = {each.index: [d.name for d in each.devices] for each in cluster.workers}
    workers = hosts.worker_states(devices, ask=False)
    keys = {each.index: each.key for each in cluster.workers}
    plan = None if compiled is None else compiled.plan
    measured = list(compiled.recent_seconds)[-_RECENT:] if compiled is not None else []
    return {
        "step": steps.committed,
        "runs": 0 if compiled is None else compiled.runs,
        "predicted": None if plan is None else plan.makespan,
        "measured": median(measured) if measured else None,
        "scalars": {} if compiled is None else _scalars(compiled, steps.latest),
        "workers": [
            {
                "index": each.index, "address": each.address, "state": each.state,
                "reason": each.reason, "devices": list(each.devices), "key": keys.get(each.index),
                "pid": each.pid, "memory": each.memory,
            }
            for each in workers
        ],
        "memory": {
            device.name: {
                "planned": 0 if plan is None else plan.peak_memory.get(device.name, 0),
                "limit": device.memory,
            }
            for worker in cluster.workers
            for device in worker.devices
        },
    }  # fmt: skip


def _scalars(compiled: CompiledFetches, values: Sequence[Any] | None) -> dict[str, float | None]:
    """Return the float scalars among the last step's fetches, by name."""
    found: dict[str, float | None] = {}
    for tensor, value in zip(compiled.fetches, values or (), strict=False):
        array = np.asarray(value) if value is not None else None
        if array is not None and array.ndim == 0 and array.dtype.kind == "f":
            found[tensor.name] = float(array) if np.isfinite(array) else None
    return found


def _plan_of(compiled: CompiledFetches | None) -> bytes:
    """Return the plan of the last step as a file; empty if there is none."""
    if compiled is None or compiled.plan is None:
        return b""
    with tempfile.TemporaryDirectory() as folder:
        return compiled.plan.save(Path(folder) / "plan.json").read_bytes()
