"""Training steps on two local workers of one thread each, against two processes of torch's.

    python benchmarks/processes/parallel.py [--rounds 20] [--small] [--output results/parallel.json]

Data parallel: a GPT and a convolutional network, each with half of the batch, against
DistributedDataParallel over gloo. Tensor parallel: an MLP, its first layer by columns and its
second by rows, against torch's parallelize_module. Turns interleave; the first losses must agree.
"alone" is one process of ours with one thread on half of the batch: the best there could be. "both
at once" are two such processes that know nothing of each other: what the machine lets two of them
do at a time, since they share its memory and caches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import arguments, interleaved, optional, report, write
from torch_pair import TorchPair, process_group, serve_steps

GOAL = 0.9
WORKERS = 2
RATE = 0.05


@dataclass(frozen=True)
class Case:
    """A model in both libraries, over the same named parameters.

    Attributes:
        ours, theirs: (parameters, *feeds) -> the loss.
        rules: of `Shard`; None for data parallelism.
        turn: steps in a row. The first ones of a turn find the caches as another contender left
            them, and threads asleep: of short steps there are many in a turn.
    """

    title: str
    parameters: dict[str, np.ndarray]
    feeds: tuple[np.ndarray, ...]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    rules: dict[str, Any] | None = None
    turn: int = 20


# Models -----------------------------------------------------------------------------------------


def _normal(*shape: int, scale: float = 0.02) -> np.ndarray:
    random = np.random.default_rng(sum(shape))
    return (random.normal(size=shape) * scale).astype("float32")


def gpt(small: bool) -> Case:
    batch, time, width, heads, layers, words = (4, 32, 64, 2, 2, 64) if small else (
        16, 128, 256, 4, 4, 256
    )  # fmt: skip
    named = {"tokens": _normal(words, width), "places": _normal(time, width)}
    for i in range(layers):
        for name, shape in {"q": (width, width), "k": (width, width), "v": (width, width),
                            "out": (width, width), "up": (width, 4 * width),
                            "down": (4 * width, width)}.items():  # fmt: skip
            named[f"{name}{i}"] = _normal(*shape)
        for name in ("first", "second"):
            named[f"{name}_scale{i}"] = np.ones(width, "float32")
            named[f"{name}_shift{i}"] = np.zeros(width, "float32")
    named["head"] = _normal(width, words)
    random = np.random.default_rng(0)
    feeds = tuple(random.integers(0, words, (batch, time)) for _ in range(2))

    def ours(p: Any, ids: Any, targets: Any) -> Any:
        import graphflow as gf

        def split(x: Any) -> Any:
            return gf.permute_dims(
                gf.reshape(x, (x.shape[0], time, heads, width // heads)), (0, 2, 1, 3)
            )

        h = gf.nn.embedding(ids, p["tokens"]) + p["places"]
        for i in range(layers):
            n = gf.nn.layer_norm(h, p[f"first_scale{i}"], p[f"first_shift{i}"])
            seen = gf.nn.attention(*(split(n @ p[f"{c}{i}"]) for c in "qkv"), causal=True)
            seen = gf.permute_dims(seen, (0, 2, 1, 3))
            h = h + gf.reshape(seen, (seen.shape[0], time, width)) @ p[f"out{i}"]
            n = gf.nn.layer_norm(h, p[f"second_scale{i}"], p[f"second_shift{i}"])
            h = h + gf.nn.gelu(n @ p[f"up{i}"]) @ p[f"down{i}"]
        return gf.mean(gf.nn.cross_entropy(h @ p["head"], targets))

    def theirs(p: Any, ids: Any, targets: Any) -> Any:
        from torch.nn import functional

        def norm(x: Any, name: str, i: int) -> Any:
            return functional.layer_norm(x, (width,), p[f"{name}_scale{i}"], p[f"{name}_shift{i}"])

        def split(x: Any) -> Any:
            return x.view(x.shape[0], time, heads, width // heads).transpose(1, 2)

        h = functional.embedding(ids, p["tokens"]) + p["places"]
        for i in range(layers):
            n = norm(h, "first", i)
            seen = functional.scaled_dot_product_attention(
                *(split(n @ p[f"{c}{i}"]) for c in "qkv"), is_causal=True
            )
            h = h + seen.transpose(1, 2).reshape(h.shape) @ p[f"out{i}"]
            h = h + functional.gelu(norm(h, "second", i) @ p[f"up{i}"]) @ p[f"down{i}"]
        return functional.cross_entropy((h @ p["head"]).view(-1, words), targets.view(-1))

    return Case(
        f"data parallel GPT, {layers} blocks of {width}, batch {batch} of {time}", named, feeds,
        ours, theirs, turn=3,
    )  # fmt: skip


def cnn(small: bool) -> Case:
    batch, size, channels = (4, 16, (16, 32)) if small else (32, 32, (32, 64, 128))
    named, before = {}, 3
    for i, after in enumerate(channels):
        named[f"conv{i}"] = _normal(after, before, 3, 3, scale=0.1)
        named[f"bias{i}"] = np.zeros(after, "float32")
        before = after
    named["head"] = _normal(before, 10, scale=0.1)
    random = np.random.default_rng(0)
    feeds = (
        random.normal(size=(batch, 3, size, size)).astype("float32"),
        random.integers(0, 10, batch),
    )

    def ours(p: Any, images: Any, labels: Any) -> Any:
        import graphflow as gf

        h = images
        for i in range(len(channels)):
            h = gf.nn.relu(gf.nn.conv(h, p[f"conv{i}"], p[f"bias{i}"], padding="same"))
            h = gf.nn.max_pool(h, 2)
        return gf.mean(gf.nn.cross_entropy(gf.mean(h, axis=(2, 3)) @ p["head"], labels))

    def theirs(p: Any, images: Any, labels: Any) -> Any:
        from torch.nn import functional

        h = images
        for i in range(len(channels)):
            h = functional.relu(functional.conv2d(h, p[f"conv{i}"], p[f"bias{i}"], padding="same"))
            h = functional.max_pool2d(h, 2)
        return functional.cross_entropy(h.mean((2, 3)) @ p["head"], labels)

    return Case(
        f"data parallel CNN, channels {channels}, batch {batch} of {size}×{size}", named, feeds,
        ours, theirs,
    )  # fmt: skip


def mlp(small: bool) -> Case:
    batch, width, hidden = (16, 64, 256) if small else (128, 512, 2048)
    named = {
        "up": _normal(width, hidden), "up_bias": np.zeros(hidden, "float32"),
        "down": _normal(hidden, width), "down_bias": np.zeros(width, "float32"),
    }  # fmt: skip
    random = np.random.default_rng(0)
    feeds = tuple(random.normal(size=(batch, width)).astype("float32") for _ in range(2))

    def ours(p: Any, x: Any, wanted: Any) -> Any:
        import graphflow as gf

        y = gf.nn.relu(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
        return gf.mean((y - wanted) ** 2)

    def theirs(p: Any, x: Any, wanted: Any) -> Any:
        return ((p(x) - wanted) ** 2).mean()

    return Case(
        f"tensor parallel MLP {width}-{hidden}-{width}, batch {batch}", named, feeds, ours, theirs,
        {"up": (None, "model"), "up_bias": ("model",), "down": ("model",)},
    )  # fmt: skip


CASES = {"gpt": gpt, "cnn": cnn, "mlp": mlp}


# Ours -------------------------------------------------------------------------------------------


class Ours:
    """A step on two workers, or on one with half of the batch."""

    def __init__(self, case: Case, alone: bool = False) -> None:
        import graphflow as gf

        feeds = case.feeds
        if alone and case.rules is None:
            feeds = tuple(a[: len(a) // WORKERS] for a in feeds)
        variables = {k: gf.variable(v, name=k) for k, v in case.parameters.items()}
        inputs = [gf.placeholder(a.dtype, a.shape) for a in feeds]
        loss = case.ours(variables, *inputs)
        strategy: Any = None
        if not alone:
            strategy = (
                gf.parallel.Data(WORKERS)
                if case.rules is None
                else gf.parallel.Shard({"model": WORKERS}, case.rules)
            )
        train = gf.optim.SGD(RATE, momentum=0.9).minimize(loss, strategy=strategy)
        self._session = gf.Session(gf.Cluster.local(1 if alone else WORKERS, threads=1))
        self._fetches = [loss, train]
        self._feeds = dict(zip(inputs, feeds, strict=True))

    def __call__(self) -> float:
        return float(self._session.run(self._fetches, self._feeds)[0])

    def close(self) -> None:
        self._session.close()


class AtOnce:
    """Two workers of sessions of their own, each with half of the batch: a step of both."""

    def __init__(self, case: Case) -> None:
        self._halves = [Ours(case, alone=True) for _ in range(WORKERS)]
        self._threads = ThreadPoolExecutor(WORKERS)

    def __call__(self) -> None:
        for running in [self._threads.submit(half) for half in self._halves]:
            running.result()

    def close(self) -> None:
        self._threads.shutdown()
        for half in self._halves:
            half.close()


# Torch's ----------------------------------------------------------------------------------------


def serve(name: str, small: bool, rank: int, store: str) -> None:
    """One of torch's processes: a step for each line."""
    with process_group(rank, store):
        case = CASES[name](small)
        serve_steps(_replica(case, rank) if case.rules is None else _tensor_parallel(case))


def _replica(case: Case, rank: int) -> Callable[[], float]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.named = torch.nn.ParameterDict(
                {
                    k: torch.nn.Parameter(torch.from_numpy(v.copy()))
                    for k, v in case.parameters.items()
                }
            )

        def forward(self, *feeds: Any) -> Any:
            return case.theirs(self.named, *feeds)

    model = DistributedDataParallel(Module())
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, fused=True)
    share = len(case.feeds[0]) // WORKERS
    feeds = [torch.from_numpy(a[rank * share : (rank + 1) * share]) for a in case.feeds]

    def step() -> float:
        optimizer.zero_grad()
        loss = model(*feeds)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def _tensor_parallel(case: Case) -> Callable[[], float]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    p = case.parameters
    width, hidden = p["up"].shape
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, width)
    )
    with torch.no_grad():
        for layer, name in ((model[0], "up"), (model[2], "down")):
            layer.weight.copy_(torch.from_numpy(p[name].T.copy()))
            layer.bias.copy_(torch.from_numpy(p[f"{name}_bias"]))
    mesh = init_device_mesh("cpu", (WORKERS,))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, foreach=False)
    feeds = [torch.from_numpy(a) for a in case.feeds]

    def step() -> float:
        optimizer.zero_grad()
        loss = case.theirs(model, *feeds)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


# Contest ----------------------------------------------------------------------------------------


def contest(name: str, small: bool, rounds: int) -> dict[str, Any]:
    case = CASES[name](small)
    ours = Ours(case)
    halves: dict[str, Any] = {"alone": Ours(case, alone=True)}
    if case.rules is None:
        halves["both at once"] = AtOnce(case)
    made: list[TorchPair] = []

    def torch() -> Callable[[], object]:
        script = [os.path.abspath(__file__), "--peer", name, *["--small"] * small]
        made.append(TorchPair(script))
        return made[0]

    steps: dict[str, Any] = {"graphflow": ours, **optional("torch", torch), **halves}
    losses = {k: [step() for _ in range(3)] for k, step in steps.items() if k not in halves}
    for found in losses.values():
        assert np.allclose(found, losses["graphflow"], rtol=1e-3), losses
    seconds = interleaved(steps, rounds, each=case.turn)
    for each in (ours, *halves.values(), *made):
        each.close()
    told = report(case.title, {k: v for k, v in seconds.items() if k not in halves}, goal=GOAL)
    for name in halves:
        half = float(np.median(seconds[name]))
        ideal = half if case.rules is None else half / WORKERS
        ratio = ideal / told["median_seconds"]["graphflow"]
        told["efficiency" if name == "alone" else "efficiency at once"] = ratio
        print(f"  of two ideal halves, {name} ({ideal * 1e3:.2f} ms): {ratio:.2f}", flush=True)
    return told


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--small", action="store_true", help="sizes of a moment, to try it")
    parser.add_argument("--only", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--peer", choices=CASES)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    parser.set_defaults(rounds=20)
    options = parser.parse_args()
    if options.peer:
        serve(options.peer, options.small, options.rank, options.store)
    else:
        results = [contest(name, options.small, options.rounds) for name in options.only]
        write("parallel", results, options.output)
