"""Replicas that talk seldom, against torch's: seconds a step on two workers of one thread each.

    python benchmarks/processes/local_sgd.py [--link-mbit 100] [--rounds 6] [--output FILE]

Ours: Data, and LocalSGD with a period of 1, 8 and 64 turns, also with 8 bits a number. Torch's, two
processes over gloo: DDP, DDP with powerSGD_hook, and PostLocalSGDOptimizer with
PeriodicModelAverager of the same periods. The examples lie with each worker, so only their numbers
are fed. Contenders take turns; all averagers of one period must reach the same loss. For ours, the
step that the plan predicts stands beside the measured one.

With `--link-mbit`, the two workers are in network namespaces, and the cable between them carries so
much; without, they talk over loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.constrained_workers import CannotConstrain, constrained_pair
from benchmarks.lib.peers import arguments, optional, write
from benchmarks.lib.worker_pairs import ListedWorkers, LocalWorkers, Workers

WORKERS, BATCH, EXAMPLES = 2, 128, 2048
SIZES = (784, 256, 10)
PERIODS = (1, 8, 64)
RATE = 0.05
STEPS = 64
"""Steps of a contender before the next one has its turn."""
FEW = 8
"""The same for contenders that exchange in every step over a slow link."""

Run = Callable[[int], float]
"""Runs steps, and returns the mean loss of the last period."""
GOAL = 0.5
"""What our seconds a step are to be of those of torch's averager over a slow link."""
SAME_LOSS = 0.01
"""The most that losses after the same steps may differ, relatively: both round differently."""


def dataset() -> tuple[np.ndarray, np.ndarray]:
    """Return examples and the classes that a random network gives them."""
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, SIZES[0])).astype("float32")
    return x, np.argmax(x @ random.normal(size=(SIZES[0], SIZES[-1])), axis=1)


def parameters() -> list[np.ndarray]:
    """Return weights and biases of the layers, in order."""
    random = np.random.default_rng(1)
    found = []
    for before, after in pairwise(SIZES):
        found.append((random.normal(size=(before, after)) / before**0.5).astype("float32"))
        found.append(np.zeros(after, "float32"))
    return found


def batches(first: int, count: int) -> np.ndarray:
    """Return the numbers of the examples of some steps, one batch after the other."""
    return (first * BATCH + np.arange(count * BATCH)) * 7 % EXAMPLES


# Ours -------------------------------------------------------------------------------------------


class Ours:
    """A session that trains with a strategy.

    Args:
        strategy: the strategy.
        window: the steps of a run.
        workers: where it runs.
    """

    def __init__(self, strategy: Any, window: int, workers: Workers) -> None:
        import graphflow as gf

        x, y = dataset()
        self.rows = gf.placeholder("int64", ("batch",), name="rows")
        h = gf.take(gf.variable(x, name="examples", trainable=False), self.rows, axis=0)
        classes = gf.variable(y, name="classes", trainable=False)
        *given, last, bias = [gf.variable(p, name=f"p{i}") for i, p in enumerate(parameters())]
        for weight, shift in zip(given[::2], given[1::2], strict=True):
            h = gf.nn.relu(h @ weight + shift)
        labels = gf.take(classes, self.rows, axis=0)
        loss = gf.mean(gf.nn.cross_entropy(h @ last + bias, labels))
        self.fetches = [loss, gf.optim.SGD(RATE).minimize(loss, strategy=strategy)]
        self.window = window
        self.done = 0
        self.session = workers.session(WORKERS)
        self(window)  # places it
        self.predicted = self.session.plan(self.fetches).makespan / window

    def __call__(self, steps: int) -> float:
        loss = np.nan
        for _ in range(0, steps, self.window):
            feeds = {self.rows: batches(self.done, self.window)}
            loss = float(self.session.run(self.fetches, feeds)[0])
            self.done += self.window
        return loss

    def close(self) -> None:
        self.session.close()


def free_port(address: str) -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as found:
        found.bind((address, 0))
        port: int = found.getsockname()[1]
        return port


# Torch's ----------------------------------------------------------------------------------------


class Theirs:
    """Two processes of torch's, which take as many steps as a line says.

    Args:
        kind: "ddp", "power" or "post-local".
        period: of the averager.
        places: for each rank, the start of the command that runs it.
        address: of the first rank.
    """

    def __init__(
        self, kind: str, period: int, places: Sequence[Sequence[str]], address: str
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if places[1]:
            environment["GLOO_SOCKET_IFNAME"] = environment["TP_SOCKET_IFNAME"] = "eth0"
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--peer", kind]
        command += ["--period", str(period), "--store", f"{address}:{free_port(address)}"]
        self._processes = [
            subprocess.Popen(
                [*place, *command, "--rank", str(rank)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for rank, place in enumerate(places)
        ]  # fmt: skip
        if any(line != "ready" for line in self._lines()):
            raise ImportError("torch.distributed did not start")
        self(period)  # as ours is placed

    def _lines(self) -> list[str]:
        """Return the next line of each process."""
        found = []
        for process in self._processes:
            assert process.stdout is not None
            found.append(process.stdout.readline().strip())
        return found

    def __call__(self, steps: int) -> float:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return float(np.mean([float(line) for line in self._lines()]))

    def close(self) -> None:
        for process in self._processes:
            process.communicate(timeout=60)


def serve(options: argparse.Namespace) -> None:
    """Run one of torch's processes."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{options.store}", rank=options.rank, world_size=WORKERS
    )
    step = _torch_step(options.peer, options.period, options.rank)
    print("ready", flush=True)
    done = 0
    for line in sys.stdin:
        losses = [step(number) for number in range(done, done + int(line))]
        done += int(line)
        print(float(np.mean(losses[-options.period :])), flush=True)
    distributed.destroy_process_group()


def _torch_step(kind: str, period: int, rank: int) -> Callable[[int], float]:
    """Return a function that takes the step of a number and returns its loss."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import (
        post_localSGD_hook,
        powerSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.nn.parallel import DistributedDataParallel

    layers: list[Any] = []
    values = parameters()
    for weight, bias in zip(values[::2], values[1::2], strict=True):
        layer = torch.nn.Linear(*weight.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    optimizer: Any = torch.optim.SGD(model.parameters(), RATE)
    if kind == "power":
        power = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
    if kind == "post-local":
        alone, _ = torch.distributed.new_subgroups(group_size=1)
        local = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=0)
        model.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=period, warmup_steps=0)
        optimizer = PostLocalSGDOptimizer(optim=optimizer, averager=averager)
    examples, classes = map(torch.from_numpy, dataset())
    half = BATCH // WORKERS

    def step(number: int) -> float:
        rows = torch.from_numpy(batches(number, 1)[rank * half : (rank + 1) * half])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(examples[rows]), classes[rows])
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


# Contest ----------------------------------------------------------------------------------------


def contest(
    workers: Workers, places: Sequence[Sequence[str]], address: str, rounds: int, title: str
) -> dict[str, Any]:
    """Time all contenders by turns, and print medians, noise and ratios."""
    import graphflow as gf

    slow = bool(places[1])
    with ExitStack() as stack:

        def keep(made: Any) -> Any:
            stack.callback(made.close)
            return made

        ours = {"data": keep(Ours(gf.parallel.Data(WORKERS), 1, workers))}
        runs: dict[str, Run] = {"data": ours["data"]}
        for period in PERIODS:
            strategy = gf.parallel.LocalSGD(WORKERS, period=period, window=period)
            ours[f"local {period}"] = keep(Ours(strategy, period, workers))
            runs[f"local {period}"] = ours[f"local {period}"]
        for period in PERIODS[1:]:
            eight = gf.parallel.FixedPoint(8)
            strategy = gf.parallel.LocalSGD(WORKERS, period, window=period, compress=eight)
            name = f"local {period}, 8 bits"
            runs[name] = ours[name] = keep(Ours(strategy, period, workers))
        for name, kind, period in _torch_contenders():
            runs |= optional(name, lambda k=kind, p=period: keep(Theirs(k, p, places, address)))
        counts = {name: FEW if slow and _exchanges_always(name) else STEPS for name in runs}
        for name, run in runs.items():
            run(counts[name])  # warm
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        losses: dict[str, float] = {}
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                losses[name] = run(counts[name])
                seconds[name].append((time.perf_counter() - start) / counts[name])
    predicted = {name: each.predicted for name, each in ours.items()}
    for line in _table(title, seconds, losses, predicted):
        print(line, flush=True)
    medians = {name: median(times) for name, times in seconds.items()}
    pairs = [("data", "torch ddp")]
    pairs += [(f"local {period}", f"torch post-local {period}") for period in PERIODS]
    pairs += [(f"local {p}, 8 bits", f"torch post-local {p}") for p in PERIODS[1:]]
    ratios = {}
    for mine, peer in pairs:
        if peer in runs:
            assert abs(losses[mine] / losses[peer] - 1) < SAME_LOSS, losses
            ratios[f"{mine} / {peer}"] = medians[mine] / medians[peer]
            print(f"  {mine} / {peer}, at the same loss: {medians[mine] / medians[peer]:.2f}")
    result: dict[str, Any] = {
        "title": title, "median_seconds": medians, "seconds": seconds, "predicted": predicted,
        "ratios": ratios, "losses": losses,
    }  # fmt: skip
    if slow and len(ratios) == len(pairs):
        result |= {
            "goal": GOAL, "best_peer": pairs[-1][1], "ratio_to_best": list(ratios.values())[-1]
        }  # fmt: skip
    return result


def _torch_contenders() -> Iterator[tuple[str, str, int]]:
    """Yield names, kinds and periods."""
    yield "torch ddp", "ddp", 1
    yield "torch ddp, powerSGD", "power", 1
    for period in PERIODS:
        yield f"torch post-local {period}", "post-local", period


def _exchanges_always(name: str) -> bool:
    """Return True for contenders that exchange in every step."""
    return name == "data" or name.endswith(" 1") or "ddp" in name


def _table(
    title: str, seconds: dict[str, list[float]], losses: dict[str, float], predicted: Any
) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"\n{title}"
    yield "  contender              ms a step   noise   predicted  predicted/measured"
    for name, times in sorted(seconds.items(), key=lambda item: median(item[1])):
        middle = median(times)
        noise = median(abs(each - middle) for each in times) / middle
        told = ""
        if name in predicted:
            told = f"{predicted[name] * 1e3:9.3f}  {predicted[name] / middle:.2f}"
        yield f"  {name:<22} {middle * 1e3:9.3f}   {noise:4.0%}   {told}"


def over_link(options: argparse.Namespace) -> int:
    """Run this benchmark beside two workers in network namespaces; return its exit status."""
    given = ["--rounds", str(options.rounds), "--mbit", f"{options.link_mbit:g}"]
    given += ["--output", str(options.output)] if options.output else []
    with tempfile.TemporaryDirectory() as folder:
        try:
            with constrained_pair(None, options.link_mbit, Path(folder)) as pair:
                command = [*pair.enter, sys.executable, __file__, *given, "--workers"]
                command += [*pair.addresses, "--beside", json.dumps([*pair.enter_second])]
                return subprocess.run(command, env=pair.environment, check=False).returncode
        except CannotConstrain as error:
            print(error)
            return 2


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--link-mbit", type=float, help="rate of the link between the workers")
    parser.add_argument("--workers", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--beside", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--mbit", default="", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--period", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    parser.set_defaults(rounds=6)
    options = parser.parse_args()
    if options.peer:
        serve(options)
        return
    if options.link_mbit:
        raise SystemExit(over_link(options))
    title = "two workers over " + (f"{options.mbit} Mbit/s" if options.mbit else "loopback")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRAPHFLOW_CACHE"] = folder  # calibrated now, not before
        if options.workers:
            workers: Workers = ListedWorkers(options.workers, Path(folder))
            address = options.workers[0].removeprefix("tcp://").rpartition(":")[0]
        else:
            workers, address = LocalWorkers(), "127.0.0.1"
        places = [[], json.loads(options.beside)]
        found = contest(workers, places, address, options.rounds, title)
        write("local_sgd", [found], options.output)


if __name__ == "__main__":
    main()
