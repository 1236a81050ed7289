"""One rank of exchanges by NCCL, as a process of its own:

    python nccl_rank.py FOLDER COUNT RANK exchange|leave

It finds the name of the group in FOLDER, where rank 0 puts it, and writes what it got there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from graphflow.errors import StepTimeout
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.kernels.cuda.cupy_module import import_cupy
from graphflow.runtime.collectives import nccl
from graphflow.runtime.collectives.nccl import Communicator, NcclCollective
from graphflow.runtime.collectives.rank_buffers import Array, Collective
from graphflow.runtime.gpu.gpu_backend import GpuBackend
from tests.runtime.collectives.test_transports import collective

EXAMPLES = 120
_SECONDS = 60.0


def examples(count: int) -> list[tuple[Collective, list[Array]]]:
    """Collectives among so many ranks, the same in every process."""
    found = []

    @settings(max_examples=4 * EXAMPLES, derandomize=True, database=None, deadline=None,
              phases=[Phase.generate])  # fmt: skip
    @given(st.data())
    def gather(data: Any) -> None:
        what, xs = collective(data.draw)
        if what.count == count and len(found) < EXAMPLES:
            found.append((what, xs))

    gather()
    return found


def _check_deadline(end: float) -> None:
    if time.monotonic() > end:
        raise StepTimeout("this step's time is up")


def _join_group(folder: Path, backend: GpuBackend, count: int, rank: int) -> Communicator:
    name = folder / "name"
    if rank == 0:
        unique = [*nccl.library().get_unique_id()]
        (folder / "draft").write_text(json.dumps(unique))
        (folder / "draft").rename(name)
    end = time.monotonic() + _SECONDS
    while not name.exists():
        _check_deadline(end)
        time.sleep(0.01)
    unique = json.loads(name.read_text())
    group = Communicator(backend)
    assert group.connect(count, unique, rank, lambda: _check_deadline(end))
    return group


def exchange(folder: Path, count: int, rank: int) -> None:
    """All examples, twice each: the second result is kept."""
    backend = GpuBackend(rank % import_cupy().cuda.runtime.getDeviceCount())
    group = _join_group(folder, backend, count, rank)
    results = []
    for what, xs in examples(count):
        way, spec = NcclCollective(what, rank, group), what.result_spec(rank)
        x = backend.to_device(xs[rank]) if rank < len(xs) else None
        y = backend.empty(nbytes(spec)).view(spec.dtype).reshape(spec.shape)
        for _ in range(2):
            way.record_ready()
            end = time.monotonic() + _SECONDS
            way.run(x, y, lambda end=end: _check_deadline(end))  # type: ignore[misc]
        results.append(np.frombuffer(backend.to_host(y).tobytes(), np.uint8))
    group.close()
    np.savez(folder / f"rank-{rank}.npz", *results)


def leave(folder: Path, count: int, rank: int) -> None:
    """Rank 0 is left alone in an exchange and gives up; its GPU goes on with other things."""
    backend = GpuBackend(rank % import_cupy().cuda.runtime.getDeviceCount())
    group = _join_group(folder, backend, count, rank)
    if rank:
        (folder / f"left-{rank}").touch()
        return
    while not (folder / "left-1").exists():
        time.sleep(0.01)
    specs = (TensorSpec((1 << 20,), np.dtype("float32")),) * count
    attrs = {"reduction": "sum", "algorithm": "ring", "hosts": None}
    devices = tuple(f"/worker:{i}/gpu:0" for i in range(count))
    way = NcclCollective(Collective("all_reduce", 0, devices, specs, attrs), 0, group)
    x, y = (backend.to_device(np.ones(1 << 20, "f4")) for _ in range(2))
    way.record_ready()
    began = time.monotonic()
    try:
        way.run(x, y, lambda: _check_deadline(began + 1.0))
    except StepTimeout:
        taken = time.monotonic() - began
    with backend.active():
        total = backend.to_host(backend.xp.sum(x))
    (folder / "end.json").write_text(json.dumps({"seconds": taken, "total": float(total)}))


if __name__ == "__main__":
    run = {"exchange": exchange, "leave": leave}[sys.argv[4]]
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
