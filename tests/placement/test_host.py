"""What a process may use of its host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import graphflow as gf
from graphflow.placement import host
from graphflow.runtime.host import Host
from graphflow.runtime.launch import local


@pytest.mark.parametrize(
    ("text", "most"),
    [("max 100000\n", None), ("200000 100000\n", 2), ("150000 100000\n", 2), ("5000 100000\n", 1),
     ("0 0\n", None), ("nonsense", None), (None, None)],
)  # fmt: skip
def test_a_containers_share_of_time_limits_the_cores(
    text: str | None, most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(host, "_CPU_LIMIT", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)), raising=False)
    assert host.cores() == (most or 7)


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (2, 2), (5, 2), (8, 3)])
def test_local_workers_share_the_cores_and_never_ask_for_more(
    cores: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphflow.placement.cluster.cores", lambda: cores)
    cluster = gf.Cluster.local(workers=workers)
    counts = [d.threads for w in cluster.workers for d in w.devices]
    assert counts == [max(1, cores // workers)] * workers
    asked = gf.Cluster.local(workers=workers, threads=3)
    assert [d.threads for w in asked.workers for d in w.devices] == [3] * workers
    assert local._environment(counts[0])["OPENBLAS_NUM_THREADS"] == str(counts[0])


def test_devices_of_one_process_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphflow.runtime.host.cores", lambda: 5)
    devices = [f"/worker:0/cpu:{i}" for i in range(2)]
    assert Host(0, devices, None, lambda parcel: None)._count == 2
    assert Host(0, devices, 4, lambda parcel: None)._count == 4
