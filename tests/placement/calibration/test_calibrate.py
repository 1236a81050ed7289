"""Calibration: what is measured is plain and positive, kept on disk, and made anew when damaged."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import DeviceError
from graphflow.ir import op
from graphflow.ir.declarations import registry
from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.jit.amx_permission import may_use_amx
from graphflow.placement.calibration import calibrate, measure, profile_file
from graphflow.placement.calibration.calibrate import (
    DEFAULT_LINKS,
    fit_link,
    link_of,
    measure_links,
    measure_machine,
    profile,
    save_links,
)
from graphflow.placement.calibration.profile_file import machine_key, profile_path
from graphflow.runtime.host.host import DeviceHost
from tests.placement.speeds import speeds


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """With smaller samples than for users: how fast this machine is, does not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "SIDE", 64)
        return measure_machine(["/worker:0/cpu:0"])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces measuring by a made-up machine; lists the kinds of each measurement."""
    calls: list[list[str]] = []

    def measure(kinds: Any = ("cpu",)) -> dict[str, Any]:
        calls.append(sorted(kinds))
        return {
            "format": profile_file.FORMAT,
            "key": machine_key(),
            "devices": {kind: speeds(launch=float(len(calls))) for kind in kinds},
            "links": {"thread": [1e-5, None]},
        }

    monkeypatch.setattr(calibrate, "measure_machine", measure)
    return calls


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for v in value.values() for n in _numbers(v)]
    if isinstance(value, list):
        return [n for v in value for n in _numbers(v)]
    return [value] if isinstance(value, int | float) else []


def test_a_measurement_is_plain_positive_and_covers_the_ops(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured)) == measured
    cpu = measured["devices"]["cpu"]
    assert all(0 < number < float("inf") for number in _numbers(cpu))
    with_samples = {op.name for op in REGISTRY.values() if op.samples and (op.pure or op.random)}
    assert with_samples <= set(cpu["ops"])
    assert {"elementwise", "other", "random"} <= set(cpu["classes"])
    assert ("bfloat16" in cpu["matmul"]) == may_use_amx()


def test_measured_products_take_longer_the_larger_and_slowdowns_only_grow(
    measured: dict[str, Any],
) -> None:
    cpu = measured["devices"]["cpu"]
    for points in cpu["matmul"].values():
        assert [flops for flops, _ in points] == sorted(flops for flops, _ in points)
        assert [seconds for _, seconds in points] == sorted(seconds for _, seconds in points)
    for what in ("compute", "memory"):
        factors = cpu["contention"][what]
        assert factors[0] == 1.0
        assert factors == sorted(factors)


def test_a_measured_profile_is_one_that_is_accepted_back(
    measured: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measure_machine", lambda kinds: measured)
    assert profile(folder=tmp_path) == measured
    monkeypatch.setattr(calibrate, "measure_machine", lambda kinds: pytest.fail("measured again"))
    assert profile(folder=tmp_path) == measured


def test_ops_of_users_are_not_tried_and_more_may_be_registered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another session's ops may come while a worker measures itself for this one."""
    deadly = replace(REGISTRY["tanh"], name="users.deadly")
    monkeypatch.setattr(registry, "_OWNERS", {"users.deadly": ("users", "users.py:1")})
    monkeypatch.setitem(REGISTRY, "users.deadly", deadly)
    tried: list[str] = []

    def one(self: Any, each: op.Op) -> dict[str, float]:
        monkeypatch.setitem(REGISTRY, f"users.later_{len(tried)}", deadly)
        tried.append(each.name)
        return {"launch": 1e-6}

    monkeypatch.setattr(measure.KernelTimer, "_measure_op", one)
    clock = measure.KernelTimer("cpu", np, lambda: None, time.perf_counter)
    assert "tanh" in clock.ops() and "users.deadly" not in tried


def test_only_ops_that_a_device_has_kernels_of_are_tried_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure.KernelTimer, "_measure_op", lambda self, each: {"launch": 1e-6})
    found = {
        kind: set(measure.KernelTimer(kind, np, lambda: None, time.perf_counter).ops())
        for kind in ("cpu", "gpu")
    }
    assert "eig" in found["cpu"] - found["gpu"] and "tanh" in found["gpu"]


def test_a_thread_that_comes_late_to_its_round_is_timed_by_one_call() -> None:
    calls: list[str] = []
    assert measure._time_concurrently([lambda: calls.append("called")], seconds=0.0) >= 0
    assert calls == ["called"]


def test_a_gpu_that_is_not_there_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="gpu:0"):
        measure_machine(["gpu"])


# Keeping --------------------------------------------------------------------------------------


def test_a_profile_is_measured_once_and_kept(counted: list[list[str]], tmp_path: Path) -> None:
    first = profile(folder=tmp_path)
    assert profile(folder=tmp_path) == first
    assert counted == [["cpu"]]
    assert [path.name for path in tmp_path.iterdir()] == [profile_path(tmp_path).name]


def test_a_host_tells_what_its_machine_has_kept_and_measures_once(
    counted: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    told = [
        DeviceHost(n, [f"/worker:{n}/cpu:0"], 1, lambda parcel: None).measure() for n in range(2)
    ]
    assert counted == [["cpu"]] and told[0] == told[1]
    save_links({"process": (1e-4, 2e9)})  # of this machine's own sessions: nothing for others
    assert told[0] == DeviceHost(0, ["/worker:0/cpu:0"], 1, lambda parcel: None).measure()
    assert told[0] == {key: profile()[key] for key in ("format", "key", "devices")} | {
        "links": {"thread": [1e-5, None]}
    }


def test_refreshing_measures_again_and_keeps_links(
    counted: list[list[str]], tmp_path: Path
) -> None:
    profile(folder=tmp_path)
    save_links({"process": (1e-4, 2e9), "thread": (2e-5, float("inf"))}, tmp_path)
    again = profile(folder=tmp_path, refresh=True)
    assert again["devices"]["cpu"]["launch"] == 2.0
    assert link_of(again, "process") == (1e-4, 2e9)
    assert link_of(again, "client") == DEFAULT_LINKS["client"]


def test_a_missing_kind_is_added_to_what_is_known(counted: list[list[str]], tmp_path: Path) -> None:
    profile(folder=tmp_path)
    both = profile(["cpu", "gpu"], folder=tmp_path)
    assert counted == [["cpu"], ["gpu"]]
    assert both["devices"]["cpu"]["launch"] == 1.0
    assert both["devices"]["gpu"]["launch"] == 2.0


def test_another_gpu_than_the_one_that_is_known_is_measured(
    counted: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calibrate.measure_machine
    there: list[str | None] = ["one, CuPy 14"]

    def measure_other_gpu(kinds: Any) -> dict[str, Any]:
        found: dict[str, Any] = made(kinds)
        found["devices"]["gpu"]["product"] = there[0]
        return found

    monkeypatch.setattr(calibrate, "measure_machine", measure_other_gpu)
    monkeypatch.setattr(calibrate, "gpu_product", lambda: there[0])
    first = profile(["gpu"], folder=tmp_path)
    assert profile(["gpu"], folder=tmp_path) == first
    there[0] = "another, CuPy 14"
    again = profile(["gpu"], folder=tmp_path)
    assert again["devices"]["gpu"]["product"] == "another, CuPy 14"
    there[0] = None  # it cannot be seen now: what is known stands
    assert profile(["gpu"], folder=tmp_path) == again
    assert counted == [["gpu"], ["gpu"]]


def test_what_a_worker_tells_holds_the_way_to_its_gpu(
    counted: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    profile()
    save_links({"gpu": (5e-6, 25e9), "process": (1e-4, 2e9)})
    assert calibrate.machine_profile(["cpu:0"])["links"] == {
        "thread": [1e-5, None],
        "gpu": [5e-6, 25e9],
    }


def _without(data: dict[str, Any], *path: str) -> str:
    part = data
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return json.dumps(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: text.replace('"format": 4', '"format": 3'),
        lambda text: _without(json.loads(text), "devices", "cpu", "launch"),
        lambda text: _without(json.loads(text), "devices", "cpu", "matmul", "float64"),
        lambda text: text.replace('"launch": 1.0', '"launch": NaN'),
        lambda text: text.replace('"launch": 1.0', '"launch": -1.0'),
        lambda text: text.replace('"launch": 1.0', '"launch": 1.0, "call": "x"', 1),
        lambda text: json.dumps({**json.loads(text), "key": {"processor": "another"}}),
        lambda text: json.dumps({**json.loads(text), "links": {"thread": 3}}),
    ],
)
def test_a_damaged_file_is_measured_anew(
    damage: Callable[[str], str], counted: list[list[str]], tmp_path: Path
) -> None:
    profile(folder=tmp_path)
    path = profile_path(tmp_path)
    path.write_text(damage(path.read_text()))
    assert profile(folder=tmp_path)["devices"]["cpu"]["launch"] == 2.0
    assert profile(folder=tmp_path)["devices"]["cpu"]["launch"] == 2.0
    assert len(counted) == 2


def test_binary_rubbish_is_measured_anew(counted: list[list[str]], tmp_path: Path) -> None:
    profile_path(tmp_path).write_bytes(os.urandom(512) + b"\xff\xfe")
    assert profile(folder=tmp_path)["devices"]["cpu"]["launch"] == 1.0


def test_the_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAPHFLOW_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_path().parent == tmp_path / "graphflow"
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path / "own"))
    assert profile_path().parent == tmp_path / "own"
    monkeypatch.delenv("GRAPHFLOW_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profile_path().parent == Path.home() / ".cache" / "graphflow"


# Links ----------------------------------------------------------------------------------------

_SIZES = (1 << 10, 1 << 20, 1 << 22)


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e11))
def test_a_link_is_recovered_from_exact_times(latency: float, bandwidth: float) -> None:
    found = fit_link(_SIZES, [latency + size / bandwidth for size in _SIZES])
    assert found[0] == pytest.approx(latency, rel=1e-3, abs=1e-9)
    assert found[1] == pytest.approx(bandwidth, rel=1e-3)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_any_times_give_a_link_that_a_problem_accepts(times: list[float]) -> None:
    latency, bandwidth = fit_link(_SIZES, times)
    assert 0 <= latency < float("inf")
    assert 0 < bandwidth < float("inf")


def test_links_are_probed_once_a_pair_and_are_the_same_both_ways() -> None:
    asked = []

    def probe(source: int, target: int, nbytes: int, repeats: int) -> float:
        asked.append((source, target))
        return (source + 1) * 1e-4 + nbytes / (target * 1e9)

    found = measure_links(probe, 3)
    assert len(found) == 6 and sorted(set(asked)) == [(0, 1), (0, 2), (1, 2)]
    latency, bandwidth = found["/worker:1", "/worker:2"]
    assert latency == pytest.approx(2e-4)
    assert bandwidth == pytest.approx(2e9)
    assert found["/worker:2", "/worker:1"] == (latency, bandwidth)


def test_where_nothing_can_be_kept_a_process_measures_once_and_says_so(
    tmp_path: Path, counted: list[list[str]]
) -> None:
    folder = tmp_path / "file" / "graphflow"
    folder.parent.write_text("no folder")
    with pytest.warns(RuntimeWarning, match=r"cannot be kept in .*Not a dir.*GRAPHFLOW_CACHE"):
        first = profile(folder=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profile(folder=folder) == first
        save_links({"process": (1e-4, 2e9)}, folder)
        calibrate.save_step_cost("here", (1e-4, 2e-4), folder)
    found = profile(folder=folder)
    assert found["links"]["process"] == [1e-4, 2e9] and found["steps"]["here"] == [1e-4, 2e-4]
    assert len(counted) == 1
    folder.parent.unlink()  # now it can be written
    calibrate.save_step_cost("here", (1e-4, 3e-4), folder)
    kept = json.loads(profile_path(folder).read_text())
    assert kept["steps"]["here"] == [1e-4, 3e-4] and kept["links"] == found["links"]


@pytest.mark.parametrize(("larger", "is_known"), [(1.05, False), (1.5, True)])
def test_a_rate_is_known_if_more_work_takes_visibly_longer(
    monkeypatch: pytest.MonkeyPatch, larger: float, is_known: bool
) -> None:
    timer = measure.KernelTimer("cpu", np, lambda: None, time.perf_counter)
    taken = iter([1e-5, larger * 1e-5])
    monkeypatch.setattr(timer, "seconds", lambda call, rounds=7: next(taken))
    found = timer._measure_op(REGISTRY["softmax"])
    assert found is not None and ("rate" in found) == is_known
