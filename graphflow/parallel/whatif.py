"""What if: training steps of large GPTs on clusters that one does not have.

    found = gf.parallel.what_if(gf.parallel.GPT(layers=96, width=12288, heads=96), "a100+half",
                                devices=1024, batch=1536)
    print(found)

The costs of a block come from its graph (weights are declared, never made), planned on one device
of the product; those of a pipeline from its schedule, task by task; those of collectives from the
links. A network of a hundred billion weights on a thousand devices takes seconds to search.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, for the layout (tensor parallel within a host, pipelines across hosts).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from math import ceil

import graphflow.init as init
from graphflow.autodiff import gradients
from graphflow.build import placeholder, variable
from graphflow.errors import MemoryLimitError, ScheduleError
from graphflow.graph import Graph
from graphflow.op import FUNCTIONS, Tensor, user_location
from graphflow.parallel.schedule import run
from graphflow.parallel.schedules import interleaved, one_f_one_b
from graphflow.passes import optimize
from graphflow.placement.cluster import Cluster
from graphflow.placement.plan import plan_graph
from graphflow.placement.products import product, wire
from graphflow.spec import nbytes

ADAM = 18
"""Bytes that a weight takes while it is trained in mixed precision with Adam: 2 for itself, 4 for
its gradient, 12 for its float32 copy and two slots."""
RESERVED = 0.08
"""Of a device's memory: the context, libraries' workspaces, fragments."""
SIMULATED = 16
"""Strategies whose pipelines are simulated task by task: those that are best by closed forms."""


@dataclass(frozen=True)
class GPT:
    """The sizes of a GPT.

    Args:
        layers: blocks. width: of a token. heads: of attention. sequence: tokens of a sample.
        vocabulary: rows of the embedding, which is also the head.
    """

    layers: int
    width: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200

    def __post_init__(self) -> None:
        where = f"GPT at {user_location()}"
        for each in fields(self):
            _check_count(where, each.name, getattr(self, each.name))
        if self.width % self.heads:
            raise ScheduleError(
                f"{where}: a width of {self.width} does not divide into {self.heads} heads"
            )

    @property
    def weights(self) -> int:
        """How many there are."""
        h = self.width
        return self.layers * (12 * h * h + 13 * h) + (self.vocabulary + self.sequence) * h

    def flops(self, batch: int, recompute: bool = False) -> float:
        """Of the matrix products of a training step."""
        h, s, layers = self.width, self.sequence, self.layers
        forward = layers * (24 * batch * s * h * h + 4 * batch * s * s * h)
        head = 2 * batch * s * h * self.vocabulary
        return (4.0 if recompute else 3.0) * forward + 3.0 * head


@dataclass(frozen=True)
class Estimate:
    """A step of training with one strategy.

    Attributes:
        data, model, stages: devices along each axis of the mesh.
        chunks: stages that each device of a pipeline has.
        micro: samples of a micro-batch.
        recompute: whether a block's forward pass is computed again.
        seconds: of a step.
        bubble: share of the pipeline's time that is idle.
        memory: bytes of the device that needs most.
        sent: bytes that a device sends in a step, by what for: "model", "stages", "data".
        flops: that a device reaches, flop/s, what is recomputed counted (as the literature does).
    """

    data: int
    model: int
    stages: int
    chunks: int
    micro: int
    recompute: bool
    seconds: float
    bubble: float
    memory: int
    sent: dict[str, float]
    flops: float

    def __str__(self) -> str:
        sent = ", ".join(f"{what} {nbytes / 1e9:.2f}" for what, nbytes in self.sent.items())
        return (
            f"data {self.data:>4} × model {self.model} × stages {self.stages:>2}"
            f"{f' × {self.chunks}' if self.chunks > 1 else '    '}  micro {self.micro}"
            f"{' recompute' if self.recompute else '          '}  {self.seconds:8.2f} s  "
            f"bubble {self.bubble:5.1%}  {self.memory / 1e9:6.1f} GB  "
            f"{self.flops / 1e12:6.1f} Tflop/s  sends {sent} GB"
        )


@dataclass(frozen=True)
class WhatIf:
    """What was estimated, best first. Print it."""

    model: GPT
    tried: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate:
        """The strategy whose step takes the least time."""
        return self.tried[0]

    def __str__(self) -> str:
        head = f"GPT of {self.model.weights / 1e9:.1f} billion weights, the best {len(self.tried)}:"
        return "\n".join([head, *(f"  {each}" for each in self.tried[:10])])


def what_if(
    model: GPT,
    hardware: str = "a100+half",
    *,
    devices: int,
    batch: int,
    hosts_of: int = 8,
    network: str = "infiniband-hdr",
    tensor: int | None = None,
    stages: int | None = None,
    recompute: bool | None = None,
) -> WhatIf:
    """Estimate every mesh of data, tensor and pipeline parallelism on a cluster.

    Args:
        hardware: a product, see docs/clusters.md; "+half" computes 16 bits on tensor cores.
        devices: how many.
        batch: samples of a step.
        hosts_of: devices of a host, between which tensor parallelism stays.
        network: link of each device to other hosts.
        tensor, stages, recompute: only strategies with this; default: all.

    Raises:
        MemoryLimitError: nothing fits.
        ScheduleError: a number without sense, or a mesh that there is not.
        ClusterError: unknown hardware.
    """
    where = f"what_if at {user_location()}"
    if not isinstance(model, GPT):
        raise ScheduleError(f"{where}: the model is a gf.parallel.GPT, not {model!r}")
    counts = {"devices": devices, "batch": batch, "hosts_of": hosts_of}
    asked_for = {"tensor": tensor, "stages": stages}
    for what, number in (counts | {k: n for k, n in asked_for.items() if n is not None}).items():
        _check_count(where, what, number)
    if recompute is not None and not isinstance(recompute, bool):
        raise ScheduleError(f"{where}: recompute is True or False, not {recompute!r}")
    site = _Site(hardware, hosts_of, network)
    asked = [
        layout
        for layout in _layouts(model, devices, batch, hosts_of)
        if tensor in (None, layout[1]) and stages in (None, layout[2])
        if recompute in (None, layout[5])
    ]
    if not asked:
        raise ScheduleError(
            f"{where}: there is no mesh of {devices} devices with "
            f"{tensor or 'any'} along the model and {stages or 'any'} stages for {model.layers} "
            f"layers, {model.heads} heads and a batch of {batch}; each must divide"
        )
    layouts = [layout for layout in asked if _fits(model, site, batch, *layout)]
    rough = {layout: _estimate(model, site, batch, *layout, exact=False) for layout in layouts}
    close = sorted(layouts, key=lambda layout: rough[layout].seconds)[:SIMULATED]
    found = [_estimate(model, site, batch, *layout) for layout in close]
    if not found:
        raise MemoryLimitError(
            f"{where}: {model.weights / 1e9:.1f} billion weights take "
            f"{model.weights * ADAM / devices / 1e9:.1f} GB on each of {devices} devices before "
            f"any activation; {hardware} has {site.memory / 1e9:.0f} GB"
        )
    return WhatIf(model, tuple(sorted(found, key=lambda e: e.seconds)))


# Layouts --------------------------------------------------------------------------------------


def _check_count(where: str, what: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ScheduleError(f"{where}: {what} is a number from 1 up, not {number!r}")


def _layouts(
    model: GPT, devices: int, batch: int, hosts_of: int
) -> Iterator[tuple[int, int, int, int, int, bool]]:
    """Data, model, stages, chunks, samples of a micro-batch, recomputation."""
    for tensor in _divisors(min(hosts_of, devices)):
        if model.heads % tensor or model.width % tensor or devices % tensor:
            continue
        for stages in _divisors(devices // tensor):
            data = devices // tensor // stages
            if model.layers % stages or batch % data:
                continue
            for micro in (1, 2, 4, 8):
                if (batch // data) % micro:
                    continue
                count = batch // data // micro
                for chunks in _divisors(model.layers // stages):
                    if chunks > 8 or (chunks > 1 and (stages == 1 or count % stages)):
                        continue
                    for recompute in (False, True):
                        yield data, tensor, stages, chunks, micro, recompute


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# Costs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Site:
    """What devices and links there are."""

    hardware: str
    hosts_of: int
    network: str

    @property
    def memory(self) -> float:
        return product(self.hardware).memory * (1 - RESERVED)

    @property
    def bandwidth(self) -> float:
        return product(self.hardware).bandwidth

    def link(self, ranks: int) -> tuple[float, float]:
        """Latency and bytes/s between devices of a group that lie next to each other."""
        name = product(self.hardware).peer if ranks <= self.hosts_of else self.network
        found = wire(name)
        return found.latency, found.bandwidth

    def all_reduce(self, ranks: int, size: float, spread: int) -> float:
        """Seconds of a ring of ranks that span so many devices."""
        if ranks == 1:
            return 0.0
        latency, bandwidth = self.link(spread)
        return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


@dataclass(frozen=True)
class _Cost:
    """Of a part of a network for one micro-batch: seconds forwards and backwards, and bytes that
    the backward pass reads."""

    forward: float
    backward: float
    kept: float


@cache
def _block(model: GPT, hardware: str, tensor: int, micro: int) -> _Cost:
    """One block, or what one of `tensor` devices has of it."""
    h, own = model.width, model.width // tensor
    heads, s = model.heads // tensor, model.sequence
    x = placeholder("float16", (micro, s, h), name="x")
    weights: list[Tensor] = []

    def weight(*shape: int) -> Tensor:
        weights.append(variable(init.zeros(shape, "float16")))
        return weights[-1]

    n = FUNCTIONS["layer_norm"](x, weight(h), weight(h))
    q, k, v = (_heads(n @ weight(h, own) + weight(own), heads) for _ in range(3))
    seen = FUNCTIONS["permute_dims"](FUNCTIONS["attention"](q, k, v, causal=True), (0, 2, 1, 3))
    seen = FUNCTIONS["reshape"](seen, (micro, s, own))
    y = x + seen @ weight(own, h) + weight(h)
    n = FUNCTIONS["layer_norm"](y, weight(h), weight(h))
    up = FUNCTIONS["gelu"](n @ weight(h, 4 * own) + weight(4 * own))
    y = y + up @ weight(4 * own, h) + weight(h)
    return _cost(y, [x, *weights], hardware)


@cache
def _head(model: GPT, hardware: str, tensor: int, micro: int) -> _Cost:
    """The last product and the loss: a share of the vocabulary."""
    x = placeholder("float16", (micro * model.sequence, model.width), name="x")
    table = variable(init.zeros((model.width, ceil(model.vocabulary / tensor)), "float16"))
    scores = x @ table
    top = FUNCTIONS["log_softmax"](scores.astype("float32"))
    return _cost(FUNCTIONS["mean"](top), [x, table], hardware)


def _heads(x: Tensor, heads: int) -> Tensor:
    b, s, width = x.shape
    cut = FUNCTIONS["reshape"](x, (b, s, heads, width // heads))
    turned: Tensor = FUNCTIONS["permute_dims"](cut, (0, 2, 1, 3))
    return turned


def _cost(y: Tensor, xs: list[Tensor], hardware: str) -> _Cost:
    seed = placeholder(y.dtype, y.shape, name="seed")
    grads = gradients(y, xs, seed) if y.ndim else gradients(y, xs)
    one = Cluster.hypothetical(1, hardware)
    forward = Graph([y])
    whole = Graph([y, *grads])

    def seconds(graph: Graph) -> float:
        sizes = {p: tuple(int(n) for n in p.specs[0].shape) for p in graph.placeholders}  # type: ignore[arg-type]
        return plan_graph(optimize(graph), one, sizes, {}, "single").makespan

    ahead = seconds(forward)
    inside = set(forward.nodes)
    kept = {
        t
        for node in whole.nodes
        if node not in inside
        for t in node.inputs
        if t.node in inside and t.node.op.name not in ("variable", "constant")
    }
    return _Cost(ahead, seconds(whole) - ahead, float(sum(nbytes(t.spec) for t in kept)))


@dataclass(frozen=True)
class _Parts:
    """What a device has of a model: weights, blocks of a stage, micro-batches and costs."""

    weights: float
    layers: int
    count: int
    boundary: float
    block: _Cost
    head: _Cost


def _parts(
    model: GPT, site: _Site, batch: int, data: int, tensor: int, stages: int, chunks: int,
    micro: int,
) -> _Parts:  # fmt: skip
    return _Parts(
        model.weights / tensor / stages,
        model.layers // stages // chunks,
        batch // data // micro,
        micro * model.sequence * model.width * 2.0,
        _block(model, site.hardware, tensor, micro),
        _head(model, site.hardware, tensor, micro),
    )


def _fits(
    model: GPT, site: _Site, batch: int, data: int, tensor: int, stages: int, chunks: int,
    micro: int, recompute: bool,
) -> bool:  # fmt: skip
    """Whether it fits in memory; the graph of a block is made only where the weights do."""
    if model.weights / tensor / stages * ADAM > site.memory:
        return False
    parts = _parts(model, site, batch, data, tensor, stages, chunks, micro)
    return _memory(parts, stages, chunks, recompute) <= site.memory


def _memory(parts: _Parts, stages: int, chunks: int, recompute: bool) -> float:
    """Bytes of a pipeline's first device, which stores most."""
    stored = float(min(parts.count, stages))
    if chunks > 1:
        stored = min(parts.count, stages + (stages - 1) / chunks)
    own = parts.layers * chunks
    if recompute:
        kept = stored * own * parts.boundary + parts.block.kept
    else:
        kept = stored * own * parts.block.kept
    return parts.weights * ADAM + kept + parts.head.kept


def _estimate(
    model: GPT, site: _Site, batch: int, data: int, tensor: int, stages: int, chunks: int,
    micro: int, recompute: bool, exact: bool = True,
) -> Estimate:  # fmt: skip
    """One strategy; its pipeline task by task, or by closed forms."""
    parts = _parts(model, site, batch, data, tensor, stages, chunks, micro)
    block, head, count = parts.block, parts.head, parts.count
    reduce = site.all_reduce(tensor, parts.boundary, tensor)
    forward = parts.layers * (block.forward + 2 * reduce)
    backward = parts.layers * (block.backward + 2 * reduce) + (forward if recompute else 0.0)
    last = head.forward + head.backward
    latency, bandwidth = site.link(site.hosts_of + 1 if stages * tensor > site.hosts_of else 1)
    transfer = latency + parts.boundary / tensor / bandwidth
    total = stages * chunks
    if exact:
        schedule = one_f_one_b(total, count) if chunks == 1 else interleaved(total, count, chunks)
        ends = [0.0] * (total - 1) + [1.0]
        pipeline = run(
            schedule,
            [forward + end * head.forward for end in ends],
            [backward + end * head.backward for end in ends],
            transfer=transfer,
        ).makespan
    else:
        each = forward + backward
        pipeline = count * (chunks * each + last) + (stages - 1) * (each + 2 * transfer)
    reduced = site.all_reduce(data, parts.weights * 2.0, tensor * stages * data)
    seconds = pipeline + reduced + parts.weights * (ADAM + 8) / site.bandwidth
    busy = count * (chunks * (forward + backward) + last / stages)
    sent = {
        "model": 4 * 2 * (tensor - 1) / tensor * parts.boundary * parts.layers * chunks * count,
        "stages": 2 * parts.boundary / tensor * count * chunks * (stages > 1),
        "data": 2 * (data - 1) / data * parts.weights * 2.0,
    }
    memory = int(_memory(parts, stages, chunks, recompute))
    return Estimate(
        data, tensor, stages, chunks, micro, recompute, seconds, max(0.0, 1 - busy / pipeline),
        memory, sent, model.flops(batch, recompute) / seconds / (data * tensor * stages),
    )  # fmt: skip
