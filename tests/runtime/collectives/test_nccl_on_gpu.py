"""NCCL on real GPUs: the bits of the plain kernels, in sessions, too, and ends of steps that fail.

Where there are fewer GPUs than ranks, ranks are processes that share one: each says that it is a
host of its own, so NCCL takes them by way of loopback. It is slow, and it is NCCL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import WorkerLost
from tests.faults.running import Worker, stop
from tests.house.sources import ROOT
from tests.runtime.collectives.nccl_rank import EXAMPLES, examples
from tests.runtime.collectives.test_sessions import agrees
from tests.runtime.collectives.test_transports import compute_reference

pytestmark = pytest.mark.gpu
LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GRAPHFLOW_NCCL": "on",
    "GRAPHFLOW_LOG_LEVEL": "debug",
}  # fmt: skip


def run_ranks(folder: Path, count: int, what: str) -> None:
    """Run the ranks of a group; all end well."""
    script = Path(__file__).with_name("nccl_rank.py")
    command = [sys.executable, str(script), str(folder), str(count)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), what], stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **LOOPBACK, "PYTHONPATH": str(ROOT), "NCCL_HOSTID": f"host-{rank}"},
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(said)


@pytest.mark.parametrize("count", [2, 3])
def test_nccl_gives_the_bits_of_the_plain_kernels(count: int, tmp_path: Path) -> None:
    run_ranks(tmp_path, count, "exchange")
    found = [np.load(tmp_path / f"rank-{rank}.npz") for rank in range(count)]
    cases = examples(count)
    assert len(cases) > EXAMPLES // 4
    wrong = []
    for i, (what, xs) in enumerate(cases):
        for rank, wanted in enumerate(compute_reference(what, xs)):
            if found[rank][f"arr_{i}"].tobytes() != wanted.tobytes():
                wrong.append(f"{what.kind} of {what.dtype} rank {rank}: {what.attrs}")
    assert wrong == []


def test_a_rank_that_is_left_alone_gives_up_and_its_gpu_goes_on(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, "leave")
    end = json.loads((tmp_path / "end.json").read_text())
    assert 0.9 < end["seconds"] < 10 and end["total"] == 1 << 20


def cluster_of(folder: Path, *workers: Worker) -> gf.Cluster:
    lines = ["[defaults]", 'memory = "4GiB"']
    for worker in workers:
        lines += ["[[workers]]", f'address = "{worker.address}"', 'devices = ["gpu:0"]']
    path = folder / f"{len(workers)}.toml"
    path.write_text("\n".join(lines))
    return gf.Cluster.load(path)


@pytest.fixture
def started() -> Iterator[Callable[..., list[Worker]]]:
    """Starts two workers with a GPU each, as far as NCCL is told."""
    found: list[Worker] = []

    def start(**more: str) -> list[Worker]:
        for host in ("a", "b"):
            env = {**LOOPBACK, "NCCL_HOSTID": host, **more}
            found.append(Worker("tcp://127.0.0.1:*", "--devices", "gpu:0", env=env))
        return [worker.ready() for worker in found]

    yield start
    for worker in found:
        worker.end()


@pytest.mark.parametrize("setting", ["on", "host"])
def test_sessions_exchange_by_nccl_with_the_bits_of_one_device(
    setting: str, started: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    workers = started(GRAPHFLOW_NCCL=setting)
    agrees(cluster_of(tmp_path, *workers), ["/worker:0/gpu:0", "/worker:1/gpu:0"], "ring", "tree")
    for worker in workers:
        told = worker.describe_output()
        assert ("nccl.met" in told) == (setting == "on") and "nccl.refused" not in told, told


def test_workers_that_share_a_gpu_exchange_by_the_host() -> None:
    """NCCL would refuse them."""
    agrees(gf.Cluster.local(2, ["gpu:0"]), ["/worker:0/gpu:0", "/worker:1/gpu:0"], "ring")


def test_a_worker_that_freezes_amid_exchanges_by_nccl_is_lost_and_the_other_goes_on(
    started: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    workers = started()
    xs = []
    for worker in (0, 1):
        with gf.device(f"/worker:{worker}"):
            xs.append(gf.placeholder("float32", (1 << 20,), name=f"x{worker}") + 1)
    ys = [gf.sum(y) for y in gf.parallel.all_reduce(xs)]
    feeds = {x.node.inputs[0]: np.ones(1 << 20, "f4") for x in xs}
    with gf.Session(cluster_of(tmp_path, *workers)) as session:
        for _ in range(3):
            assert session.run(ys, feeds) == [4 << 20] * 2
        assert "nccl.met" in workers[0].describe_output()
        stop(workers[1].pid)
        began = time.monotonic()
        with pytest.raises(WorkerLost, match="worker 1"):
            session.run(ys, feeds)
        assert time.monotonic() - began < 15
    with gf.Session(cluster_of(tmp_path, workers[0])) as session, gf.device("gpu"):
        assert session.run(gf.sum(gf.ones((1000,)) * 2)) == 2000
