"""A placer is one new file: it registers itself under a name, and nothing else is touched."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.placement import placer_names
from graphflow.placement.placers import base

LAST_DEVICE = '''
"""Every node on the last device that may run it."""

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement import Assignment, Placer, Problem, register_placer


@dataclass(frozen=True)
class LastDevice(Placer):
    """Put each node on the last device that it may use, in topological order."""

    def place(self, problem: Problem) -> Assignment:
        devices = problem.devices - 1 - np.argmax(problem.allowed[:, ::-1], axis=1)
        return Assignment(devices, problem.topological)


register_placer("last_device", LastDevice())
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in a temporary folder that defines a placer."""
    (tmp_path / "last_device_placer.py").write_text(LAST_DEVICE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(base, "_PLACERS", dict(base._PLACERS))
    yield "last_device_placer"
    sys.modules.pop("last_device_placer", None)


def test_a_new_file_is_a_placer_that_plans_and_sessions_know_by_name(module: str) -> None:
    assert "last_device" not in placer_names()
    importlib.import_module(module)
    assert "last_device" in placer_names()
    x = gf.placeholder("float32", (4, 4), name="x")
    y = gf.tanh(x @ x) + 1.0
    cluster = gf.Cluster.here(devices=["cpu:0", "cpu:1"])
    plan = gf.plan(y, cluster, placer="last_device")
    assert plan.placer == "last_device"
    placed = {node.device for node in plan.nodes if node.name in ("matmul", "tanh", "add")}
    assert placed == {"/worker:0/cpu:1"}
    fed = {x: np.eye(4, dtype="float32")}
    with gf.Session(cluster, placer="last_device") as here, gf.Session() as alone:
        assert np.array_equal(here.run(y, fed), alone.run(y, fed))
