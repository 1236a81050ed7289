"""Estimate one training step of a large GPT with one way to parallelise it.

    GPT + ParallelConfig + HardwareSite ─costs of a block, schedule, rings over links→ Estimate

Devices lie as in Megatron-LM: tensor-parallel devices next to each other, then replicas, then the
stages of a pipeline.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021; Rajbhandari et al., "ZeRO", SC 2020, for sharded state; Korthikanti et
    al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, for split
    sequences.
"""

from __future__ import annotations

from functools import lru_cache

from graphflow.base.lazy_dataclass import dataclass
from graphflow.parallel.estimation.gpt import GPT, BlockCost, block_cost, head_cost
from graphflow.parallel.pipelining.schedule import Schedule
from graphflow.parallel.pipelining.schedules import interleaved, one_f_one_b
from graphflow.parallel.pipelining.timeline import run
from graphflow.placement.clusters.hardware_catalog import Wire, product, wire

SLOT_BYTES = 12
"""The bytes of a weight's float32 copy and Adam's two slots."""
BYTES_PER_WEIGHT = 6 + SLOT_BYTES
"""The bytes of a weight in mixed-precision training: 2 for itself, 4 for its gradient, which
micro-batches add up, and its slots."""
STEADY_ROUNDS = 4
"""Micro-batches for each stage after which a pipeline is periodic. Longer pipelines are
extrapolated."""
RESERVED_MEMORY = 0.08
"""The share of a device's memory for the context, workspaces of libraries, and fragmentation."""


@dataclass(frozen=True)
class ParallelConfig:
    """A configuration of a GPT: the devices along each axis, and the size of micro-batches.

    Attributes:
        data, model, stages: devices along each mesh axis.
        chunks: stages on each device of a pipeline.
        micro: samples of a micro-batch.
        recompute: whether a block's forward pass is computed again.
        sequence: whether norms and sums, which tensor parallelism leaves whole, are split along
            tokens.
        shard_state: whether each replica has a part of the slots and updates only its weights.
    """

    data: int
    model: int
    stages: int
    chunks: int
    micro: int
    recompute: bool
    sequence: bool
    shard_state: bool

    @property
    def bytes_of_a_weight(self) -> float:
        """The bytes that a device keeps for a weight during training."""
        return BYTES_PER_WEIGHT - SLOT_BYTES + SLOT_BYTES / (self.data if self.shard_state else 1)


@dataclass(frozen=True)
class Estimate(ParallelConfig):
    """A training step with one configuration.

    Attributes:
        seconds: the time of a step.
        bubble: the share of the pipeline's time that is idle.
        memory: the bytes of the fullest device.
        sent: the bytes that a device sends in a step for "model", "stages" and "data".
        flops: the flop/s that a device reaches. Recomputation counts, as in the literature.
    """

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
class HardwareSite:
    """The devices and links of a cluster.

    Attributes:
        hardware: a product's name.
        hosts_of: devices in a host.
        network: the link of each device to other hosts.
    """

    hardware: str
    hosts_of: int
    network: str

    @property
    def memory(self) -> float:
        """The usable bytes of a device."""
        return product(self.hardware).memory * (1 - RESERVED_MEMORY)

    @property
    def bandwidth(self) -> float:
        """The memory bandwidth of a device in bytes/s."""
        return product(self.hardware).bandwidth

    def link(self, span: int) -> Wire:
        """Return the link between neighbours of a group that spans so many devices."""
        return wire(product(self.hardware).peer if span <= self.hosts_of else self.network)

    def all_reduce(self, ranks: int, size: float, apart: int) -> float:
        """Return the seconds of an all-reduce.

        Each host has as many ranks as fit. Rings use the network links of all of them.

        Args:
            ranks: their number.
            size: bytes of the tensor.
            apart: devices from one rank to the next.
        """
        if ranks == 1:
            return 0.0
        link = self.link(ranks * apart)
        beside = max(1, self.hosts_of // apart) if ranks * apart > self.hosts_of else 1
        bandwidth = min(beside * link.bandwidth, wire(product(self.hardware).peer).bandwidth)
        return 2 * (ranks - 1) * (link.latency + size / ranks / max(bandwidth, link.bandwidth))


@dataclass(frozen=True)
class _DeviceShare:
    """The part of a model on one device, and its costs.

    Attributes:
        weights: its weights.
        layers: the blocks of a stage.
        count: the number of micro-batches.
        boundary: the bytes between stages for a micro-batch.
        block: the cost of a block.
        head: the cost of the last product and the loss.
    """

    weights: float
    layers: int
    count: int
    boundary: float
    block: BlockCost
    head: BlockCost


def _device_share(
    model: GPT, site: HardwareSite, batch: int, layout: ParallelConfig
) -> _DeviceShare:
    """Return what a device has of a model."""
    tensor, micro = layout.model, layout.micro
    return _DeviceShare(
        _weights(model, layout),
        model.layers // layout.stages // layout.chunks,
        batch // layout.data // micro,
        micro * model.sequence * model.width * 2.0,
        block_cost(model, site.hardware, tensor, micro, layout.sequence),
        head_cost(model, site.hardware, tensor, micro),
    )


def _weights(model: GPT, layout: ParallelConfig) -> float:
    """Return the number of weights of the first stage, which has the embeddings."""
    blocks = model.layers * model.weights_of_a_block / layout.stages
    return (blocks + model.weights_of_the_ends) / layout.model


def fits(model: GPT, site: HardwareSite, batch: int, layout: ParallelConfig) -> bool:
    """Return True if a configuration fits in memory. A block's graph is made only if its weights
    fit."""
    if _weights(model, layout) * layout.bytes_of_a_weight > site.memory:
        return False
    return _memory(_device_share(model, site, batch, layout), layout) <= site.memory


def _memory(parts: _DeviceShare, layout: ParallelConfig) -> float:
    """Return the bytes of the fullest device of a pipeline.

    That is the first one, which stores most micro-batches, or the last one, which has the scores of
    the vocabulary.
    """
    stages, chunks = layout.stages, layout.chunks
    first = float(min(parts.count, stages))
    if chunks > 1:
        first = min(parts.count, stages + (stages - 1) / chunks)
    own = parts.layers * chunks

    def activation_bytes(stored: float) -> float:
        """Return the bytes of so many stored micro-batches."""
        if layout.recompute:
            inputs = parts.boundary / (layout.model if layout.sequence else 1)
            return stored * own * inputs + parts.block.activations
        return stored * own * parts.block.activations

    ends = activation_bytes(first if stages == 1 else 1.0) + parts.head.activations
    return parts.weights * layout.bytes_of_a_weight + max(activation_bytes(first), ends)


def pipeline_seconds(
    count: int, chunks: int, forwards: list[float], backwards: list[float], transfer: float
) -> float:
    """Return the seconds of a pipeline of so many micro-batches."""
    total = len(forwards)
    stages = total // chunks

    def simulate(count: int) -> float:
        """Return the makespan of so many micro-batches."""
        return run(_schedule(total, count, chunks), forwards, backwards, transfer=transfer).makespan

    least = STEADY_ROUNDS * stages + count % stages
    if count <= least + stages:
        return simulate(count)
    first = simulate(least)
    return first + (count - least) // stages * (simulate(least + stages) - first)


@lru_cache(maxsize=32)
def _schedule(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Return a schedule, cached: many configurations of a model differ only in other numbers."""
    if chunks == 1:
        return one_f_one_b(stages, microbatches)
    return interleaved(stages, microbatches, chunks)


def estimate(
    model: GPT, site: HardwareSite, batch: int, layout: ParallelConfig, exact: bool = True
) -> Estimate:
    """Estimate one configuration. If `exact`, its pipeline is simulated task by task, else closed
    forms are used."""
    data, tensor, stages, chunks = layout.data, layout.model, layout.stages, layout.chunks
    parts = _device_share(model, site, batch, layout)
    block, head, count = parts.block, parts.head, parts.count
    reduce = site.all_reduce(tensor, parts.boundary, 1)
    forward = parts.layers * (block.forward + 2 * reduce)
    backward = parts.layers * (block.backward + 2 * reduce) + (forward if layout.recompute else 0.0)
    last = head.forward + head.backward
    link = site.link(stages * tensor * data if stages > 1 else 1)
    transfer = link.latency + parts.boundary / tensor / link.bandwidth
    if exact:
        ends = [0.0] * (stages * chunks - 1) + [1.0]
        forwards = [forward + end * head.forward for end in ends]
        backwards = [backward + end * head.backward for end in ends]
        pipeline = pipeline_seconds(count, chunks, forwards, backwards, transfer)
    else:
        each = forward + backward
        pipeline = count * (chunks * each + last) + (stages - 1) * (each + 2 * transfer)
    reduced = site.all_reduce(data, parts.weights * 2.0, tensor)
    updated = parts.weights / (data if layout.shard_state else 1)
    seconds = pipeline + reduced + updated * (BYTES_PER_WEIGHT + 8) / site.bandwidth
    busy = count * (chunks * (forward + backward) + last / stages)
    sums = 4 + 2 * layout.recompute + layout.sequence  # recomputing gathers again
    sent = {
        "model": sums * 2 * (tensor - 1) / tensor * parts.boundary * parts.layers * chunks * count,
        "stages": 2 * parts.boundary / tensor * count * chunks * (stages > 1),
        "data": 2 * (data - 1) / data * parts.weights * 2.0,
    }
    return Estimate(
        **vars(layout), seconds=seconds, bubble=max(0.0, 1 - busy / pipeline),
        memory=int(_memory(parts, layout)), sent=sent,
        flops=model.flops(batch, layout.recompute) / seconds / (data * tensor * stages),
    )  # fmt: skip
