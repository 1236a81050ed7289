"""What a process may use of its host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import graphflow as gf
from graphflow.placement.calibration.profile_file import machine_key
from graphflow.placement.clusters.machine import host_facts as host
from graphflow.runtime.host.host import DeviceHost
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
    monkeypatch.setattr(host, "cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cluster = gf.Cluster.local(workers=workers)
    counts = [d.threads for w in cluster.workers for d in w.devices]
    assert counts == [max(1, cores // workers)] * workers
    asked = gf.Cluster.local(workers=workers, threads=3)
    assert [d.threads for w in asked.workers for d in w.devices] == [3] * workers
    assert local._environment(counts[0])["OPENBLAS_NUM_THREADS"] == str(counts[0])


def test_devices_of_one_process_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cores", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    devices = [f"/worker:0/cpu:{i}" for i in range(2)]
    assert DeviceHost(0, devices, None, lambda parcel: None)._count == 2
    assert DeviceHost(0, devices, 4, lambda parcel: None)._count == 4


@pytest.mark.parametrize(
    ("text", "threads"),
    [("1", 1), ("3,2", 3), (" 2 ", 2), ("64", 4), ("", 4), ("0", 4), ("-1", 4), ("two", 4)],
)
def test_openmps_variable_limits_the_threads_that_nobody_gave(
    text: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert gf.Cluster.here(devices=["cpu:0"]).workers[0].devices[0].threads == threads
    assert gf.Cluster.here(devices=["cpu:0"], threads=5).workers[0].devices[0].threads == 5


@pytest.mark.parametrize(
    ("free", "processes", "threads", "shares"),
    [
        ({0, 1}, 2, 1, [[0], [1]]),
        ({2, 5, 7, 9}, 2, 2, [[2, 5], [7, 9]]),
        ({0, 1, 2}, 2, 1, [[], []]),  # there is a free one to go to
        ({0, 1}, 4, 1, [[], [], [], []]),  # they share cores anyway
        ({0, 1}, 1, 2, [[]]),
    ],
)
def test_processes_that_fill_the_machine_keep_to_cores_of_their_own(
    free: set[int],
    processes: int,
    threads: int,
    shares: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(host, "_CPU_LIMIT", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: free, raising=False)
    assert host.divide_cores(processes, threads) == shares


@pytest.mark.parametrize(
    ("lists", "nodes"),
    [
        (["0-3,8-11\n", "4-7,12-15\n"], ((0, 2, 3, 8), (5, 6, 13))),
        (["0-3,8-9\n", "4-7\n", "\n"], ((0, 1, 2, 3, 8, 9), (4, 5, 6, 7))),  # one has memory alone
        (["0-9\n"], (tuple(range(10)),)),
        (["0-3\n"], (tuple(range(10)),)),  # some cores are of no node
        (["what"], (tuple(range(10)),)),
        ([], (tuple(range(10)),)),
    ],
)
def test_cores_are_known_by_numa_node(
    lists: list[str],
    nodes: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    free = {n for node in nodes for n in node}
    for number, text in enumerate(lists):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: free, raising=False)
    assert host.numa_nodes(tmp_path) == nodes


def test_a_process_gets_cores_of_one_node_and_the_profile_names_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, text in enumerate(("0,2\n", "1,3\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    monkeypatch.setattr(host, "_NUMA_NODES", tmp_path)
    monkeypatch.setattr(host, "_CPU_LIMIT", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert host.divide_cores(2, 2) == [[0, 2], [1, 3]]
    assert machine_key()["numa"] == [2, 2]


def test_a_share_of_a_containers_time_is_no_core_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(host, "_CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 6, 8}, raising=False)
    assert host.divide_cores(3, 1) == [[], [], []]


_KEPT = """
import os
from graphflow.placement.clusters.machine.host_facts import cores, on_all_cores, pin_to_cores
free = os.sched_getaffinity(0)
one = min(free)
pin_to_cores([])
assert os.sched_getaffinity(0) == free
pin_to_cores([one])
assert os.sched_getaffinity(0) == {one}
with on_all_cores():
    assert os.sched_getaffinity(0) == free
assert os.sched_getaffinity(0) == {one}
pin_to_cores([1 << 20])  # there is none such
assert os.sched_getaffinity(0) == {one}
print(cores())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no processes")
def test_who_keeps_to_some_cores_counts_and_measures_with_all_of_them() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _KEPT], capture_output=True, text=True, timeout=60, check=True,
        cwd=Path(host.__file__).parents[2],
    )  # fmt: skip
    assert int(found.stdout) == host.cores()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no processes")
def test_local_workers_are_started_on_their_cores() -> None:
    count = len(os.sched_getaffinity(0))
    if not 2 <= host.cores() == count <= 8:
        pytest.skip("needs from two to eight cores, and all of their time")
    workers = local.LocalWorkers(count, threads=1, deadline=60)
    try:
        kept = [os.sched_getaffinity(pid) for pid in workers.pids]
    finally:
        workers.stop()
    assert sorted(map(sorted, kept)) == [[core] for core in sorted(os.sched_getaffinity(0))]
