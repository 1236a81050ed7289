"""Collectives between two processes of this host, against gloo (torch.distributed).

    python benchmarks/processes/collectives.py [--rounds 20] [--output results/collectives.json]

Both processes go through the same turns: gloo, graphflow, gloo, … on the same numbers; each call
begins when both are there. "in a step" is the same all-reduce in a session over two local workers,
less a step without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import graphflow as gf
from graphflow.ir.spec import TensorSpec, nbytes, spec
from graphflow.ops.communication.reduction_order import shares
from graphflow.runtime.collectives.program_collectives import ProgramCollectives
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.collectives.session_collectives import SessionCollectives
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox
from graphflow.runtime.wire.step_values import TensorParcel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import arguments, report, write

SIZES = {"64 KB": 1 << 14, "1 MB": 1 << 18, "64 MB": 1 << 24}  # of float32
GOALS = {"64 KB": 0.1, "1 MB": 0.25, "64 MB": 1 / 3}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
DEVICES = ("/worker:0/cpu:0", "/worker:1/cpu:0")
LARGE = 1 << 22  # elements, from which a turn is one call


class Store(TensorMailbox):
    """Mail whose words go over torch's store, where workers have links."""

    def __init__(self, store: Any, rank: int) -> None:
        super().__init__(rank)
        self._store = store
        self._rank = rank
        self.deadline = time.monotonic() + 3600.0

    def send(self, parcel: TensorParcel) -> None:
        self._store.set(f"{parcel.target_worker}/{parcel.edge}", parcel.array.tobytes().hex())

    def take(self, step: int, edge: Any, awaited: Awaited) -> Any:
        found = self._store.get(f"{self._rank}/{edge}").decode()
        return np.frombuffer(bytes.fromhex(found), np.uint8)


def collective(kind: str, group: int, size: int) -> Collective:
    shape = (size // 2,) if kind == "all_gather" else (size,)
    attrs: dict[str, Any] = {
        "all_reduce": {"reduction": "sum", "algorithm": "auto", "hosts": None},
        "reduce_scatter": {"axis": 0, "sizes": tuple(shares(size, 2)), "reduction": "sum",
                           "algorithm": "auto", "hosts": None},
        "all_gather": {"axis": 0},
        "broadcast": {"count": 2},
        "all_to_all": {"split_axis": 0, "concat_axis": 0, "sizes": ((size // 2, size // 2),) * 2},
    }[kind]  # fmt: skip
    specs = (spec("float32", shape),) * (1 if kind == "broadcast" else 2)
    return Collective(kind, group, DEVICES, specs, attrs)


def arrays(part: ProgramCollectives, specs: list[TensorSpec]) -> list[Any]:
    """Zeros where a program would have its tensors."""
    made, at = [], 0
    memory = part.shared_memory(sum(nbytes(each) for each in specs))
    assert memory is not None
    for each in specs:
        made.append(memory[at : at + nbytes(each)].view(each.dtype).reshape(each.shape))
        at += nbytes(each)
    return made


def gloo(kind: str, torch: Any, x: Any, size: int) -> Callable[[], object]:
    """The same by gloo; in place where it works in place."""
    dist = torch.distributed
    y = torch.empty(size)
    half = torch.empty(size // 2)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(y, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(half, x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_to_all": lambda: dist.all_to_all_single(y, x),
    }
    return calls[kind]


def both(rank: int, folder: str, rounds: int) -> list[dict[str, Any]]:
    """All contests, on one of the two processes."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2
    )
    words = Store(torch.distributed.TCPStore(
        "127.0.0.1", int(Path(folder, "port").read_text()), 2, rank == 0), rank)  # fmt: skip
    exchanges = SessionCollectives("bench", rank, words, words.send)
    results, group = [], 0
    for kind in KINDS:
        for name, size in SIZES.items():
            what = collective(kind, group, size)
            group += 1
            part = ProgramCollectives(exchanges, f"p{group}", DEVICES[rank])  # a program of its own
            member = part.join(what, name)
            x, y = arrays(part, [what.specs[0], what.result_spec(rank)])
            theirs = gloo(kind, torch, torch.from_numpy(x.copy()), size)
            count = 0

            def ours(member: Any = member, x: Any = x, y: Any = y, kind: str = kind) -> None:
                nonlocal count
                count += 1
                step = member.what.group * 1_000_000 + count
                given = None if kind == "broadcast" and rank else x
                member.start(step, rank, given, y, fixed=True, meanwhile=False)
                member.finish(step)

            steps = {"graphflow": ours, "gloo": theirs}
            try:
                seconds = contest(steps, torch, rounds, 1 if size >= LARGE else 10)
            except RuntimeError as error:  # gloo has no such collective
                print(f"gloo is left out of {kind}: {error}")
                seconds = contest({"graphflow": ours}, torch, rounds, 10)
            if rank == 0:
                goal = GOALS[name] if kind == "all_reduce" else None
                results.append(report(f"{kind} of {name}, two processes", seconds, goal=goal))
    exchanges.close()
    torch.distributed.destroy_process_group()
    return results


def contest(
    steps: dict[str, Callable[[], object]], torch: Any, rounds: int, each: int
) -> dict[str, list[float]]:
    """Seconds a call; both processes begin each turn together."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            torch.distributed.barrier()
            step()
            start = time.perf_counter()
            for _ in range(each):
                step()
            if turn > 1:
                seconds[name].append((time.perf_counter() - start) / each)
    return seconds


def in_sessions(rounds: int) -> list[dict[str, Any]]:
    """What an all-reduce adds to a step of a session over two local workers."""
    results = []
    for name, size in SIZES.items():
        fetches: dict[str, Any] = {}
        for each in ("without", "with"):
            xs = []
            for worker in (0, 1):
                with gf.device(f"/worker:{worker}"):
                    xs.append(gf.variable(np.ones(size, np.float32), name=f"{each}{worker}") * 0.5)
            ys = gf.parallel.all_reduce(xs) if each == "with" else xs
            ends = []
            for y in ys:
                with gf.device(y.node.device):
                    ends.append(y[:1])
            fetches[each] = ends
        taken: dict[str, list[float]] = {name: [] for name in fetches}
        with gf.Session(gf.Cluster.local(2, threads=1)) as session:
            for turn in range(rounds + 3):
                for each, ends in fetches.items():
                    start = time.perf_counter()
                    session.run(ends)
                    if turn > 2:
                        taken[each].append(time.perf_counter() - start)
        added = median(taken["with"]) - median(taken["without"])
        print(f"\nall_reduce of {name} in a step: {added * 1e3:.3f} ms more than without it")
        results.append({"title": f"all_reduce of {name} in a step", "seconds": added,
                        "median_seconds": {k: median(v) for k, v in taken.items()}})  # fmt: skip
    return results


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def main() -> None:
    parser = arguments("collectives against gloo")
    parser.set_defaults(rounds=20)
    parser.add_argument("--rank", type=int, default=0, help="of this process; 0 starts the other")
    parser.add_argument("--folder", default="", help="where the two meet")
    options = parser.parse_args()
    if options.rank:
        both(options.rank, options.folder, options.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "port").write_text(str(free_port()))
        command = [sys.executable, __file__, "--rank", "1", "--folder", folder,
                   "--rounds", str(options.rounds)]  # fmt: skip
        other = subprocess.Popen(command, env=os.environ.copy())
        try:
            results = both(0, folder, options.rounds)
            other.wait(60)
        finally:
            other.kill()
    write("collectives", results + in_sessions(options.rounds), options.output)


if __name__ == "__main__":
    main()
