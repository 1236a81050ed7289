"""Candidates: the strategies among which the search chooses, as a few numbers each.

loss + devices ─candidates→ one device; data × model × stages over the fastest 2, 3, … devices,
                            with schedules and numbers of micro-batches
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.ir.spec import Size
from graphflow.parallel.data import Data
from graphflow.parallel.pipeline_strategy import Pipeline
from graphflow.parallel.shard_strategy import Shard

SCHEDULES = ("1f1b", "zb-h1", "interleaved")
"""The schedules that are tried. GPipe stores more than 1F1B and never finishes sooner."""
MICROBATCHES_PER_STAGE = (1, 2, 4)
"""The numbers of micro-batches that are tried, as multiples of the stages."""

Rules = Mapping[Tensor, Sequence[Any]]


@dataclass(frozen=True)
class StrategyCandidate:
    """A strategy in numbers.

    Attributes:
        devices: their names, those of the first stage first; for each stage its data and model
            places.
        data, model, stages: devices along each axis.
        chunks: stages on a device.
        schedule, microbatches: those of a pipeline; "" and 1 without one.
        shared: whether each replica keeps only a part of the optimiser's state.
        sequence: whether activations that tensor-parallel layers leave whole are split along the
            sequence.
        recompute: whether backward passes compute forward passes again.
        of: the number of devices of the cluster.
    """

    devices: tuple[str, ...]
    data: int = 1
    model: int = 1
    stages: int = 1
    chunks: int = 1
    schedule: str = ""
    microbatches: int = 1
    shared: bool = False
    sequence: bool = False
    recompute: bool = False
    of: int = 1

    @property
    def name(self) -> str:
        """The candidate in a few words: "data 2 × 4 stages 1f1b of 8"."""
        parts = [f"data {self.data}"] * (self.data > 1) + [f"model {self.model}"] * (self.model > 1)
        if self.schedule:
            total = self.stages * self.chunks
            parts.append(f"{total} stages {self.schedule} of {self.microbatches}")
        text = " × ".join(parts) or "one device"
        if parts and len(self.devices) < self.of:
            text += f" on {len(self.devices)} of {self.of}"
        leaner = ", state shared" * self.shared + ", sequence cut" * self.sequence
        return text + leaner + ", recomputing" * self.recompute

    @property
    def places(self) -> int:
        """The most nodes that stand for one node of the user's."""
        return self.data * self.model * self.microbatches

    def takes_as_much_as(self, other: StrategyCandidate) -> bool:
        """Return True if the candidate needs about as much memory as another, or more.

        It has the same stages, no more places along data and model, none of the leaner options, and
        micro-batches as large or larger. Schedules with as many chunks store as many micro-batches.
        """
        if self.microbatches > other.microbatches:
            return False
        if self.shared > other.shared or self.sequence > other.sequence:
            return False
        if self.recompute > other.recompute:
            return False
        mine, theirs = ((c.stages, c.chunks) for c in (self, other))
        return mine == theirs and self.data <= other.data and self.model <= other.model

    def leaner(self) -> StrategyCandidate | None:
        """Return the candidate with less memory: sharded state first, then a split sequence, then
        recomputation. None if all are in use."""
        if self.data > 1 and not self.shared:
            return replace(self, shared=True)
        if self.model > 1 and not self.sequence:
            return replace(self, sequence=True)
        return replace(self, recompute=True) if self.schedule and not self.recompute else None

    def strategy(self, rules: Rules, every: Sequence[str]) -> Any:
        """Return the strategy for `minimize`; None for one device.

        Args:
            rules: the rules of tensor parallelism.
            every: the devices that a strategy takes if it names none, in this order.
        """
        if len(self.devices) == 1:
            return None
        named = None if self.devices == tuple(every[: len(self.devices)]) else self.devices
        if not self.schedule:
            return self._inner_strategy(rules, named)
        pipe = Pipeline(
            self.stages * self.chunks, self.schedule, self.microbatches,
            True if self.recompute else None, devices=named,
        )  # fmt: skip
        beside = self._inner_strategy(rules, None)
        return pipe if beside is None else pipe * beside

    def _inner_strategy(self, rules: Rules, devices: Sequence[str] | None) -> Any:
        """Return the strategy within each stage; None if a stage has one device."""
        if self.model > 1:
            mesh = {"data": self.data} if self.data > 1 else {}
            batch = "data" if self.data > 1 else None
            own = fitting_rules(rules, self.model)
            return Shard(
                {**mesh, "model": self.model}, own, batch, devices=devices,
                shard_state=self.shared, sequence="model" if self.sequence else None,
            )  # fmt: skip
        return Data(self.data, self.shared, devices=devices) if self.data > 1 else None


def candidates(fastest: Sequence[str], rules: Rules) -> Iterator[StrategyCandidate]:
    """Yield one device, and each way to divide the fastest devices into data, model and stages.

    Args:
        fastest: the names of all devices, the fastest first.
        rules: those of `tensor_rules`; empty if no product may be split.
    """
    yield StrategyCandidate(tuple(fastest[:1]), of=len(fastest))
    for count in _device_counts(len(fastest)):
        used = tuple(fastest[:count])
        for data, model, stages in _mesh_shapes(count):
            if model > 1 and not fitting_rules(rules, model):
                continue
            mesh = StrategyCandidate(used, data, model, stages, of=len(fastest))
            if stages == 1:
                yield mesh
                continue
            for schedule in SCHEDULES:
                chunks = 2 if schedule == "interleaved" else 1
                for turns in MICROBATCHES_PER_STAGE:
                    yield replace(
                        mesh, schedule=schedule, chunks=chunks, microbatches=stages * turns
                    )


def _device_counts(devices: int) -> list[int]:
    """Return the numbers of devices that are tried: all up to eight, then powers of two, and all
    devices."""
    powers = {1 << i for i in range(4, devices.bit_length())}
    return sorted({*range(2, min(devices, 8) + 1), *powers, devices} - {1}, reverse=True)


def _mesh_shapes(count: int) -> Iterator[tuple[int, int, int]]:
    """Yield all (data, model, stages) whose product is the number of devices."""
    for data in range(1, count + 1):
        for model in range(1, count // data + 1):
            if count % (data * model) == 0:
                yield data, model, count // (data * model)


def tensor_rules(loss: Tensor) -> dict[Tensor, tuple[str | None, ...]]:
    """Return rules for column-parallel and row-parallel layers in turn.

    The weight of a product is split along its outputs, that of the next product along its inputs.
    So a pair of layers needs one sum.

    Source: Shoeybi et al., "Megatron-LM", 2019.
    """
    rules: dict[Tensor, tuple[str | None, ...]] = {}
    cut: set[Tensor] = set()
    for node in Graph([loss]).nodes:
        weight = next((t for t in node.inputs[1:] if _is_weight(t)), None)
        if node.op.name == "matmul" and weight is not None and weight.ndim == 2:
            by_columns: tuple[str | None, ...] = (None, "model")
            by_rows = by_columns[::-1]
            if node.attrs["transpose_b"]:  # layers store their weights transposed
                by_columns, by_rows = by_rows, by_columns
            if node.inputs[0] in cut:
                rules.setdefault(weight, by_rows)
                continue
            rules.setdefault(weight, by_columns)
            cut.add(node.outputs[0])
        elif any(t in cut for t in node.inputs) and node.outputs[0].ndim:
            cut.update(node.outputs)
            for t in node.inputs:
                if _is_weight(t) and t.ndim == 1:
                    rules.setdefault(t, ("model",))
    return rules


def fitting_rules(rules: Rules, model: int) -> Rules:
    """Return the rules whose weights are large enough for so many parts.

    The weights of ten classes stay whole on sixteen devices, and the layers before them are still
    split.
    """

    def is_large(size: Size) -> bool:
        return isinstance(size, int) and size >= model

    return {
        tensor: axes
        for tensor, axes in rules.items()
        if all(a is None or is_large(size) for a, size in zip(axes, tensor.shape, strict=True))
    }


def _is_weight(tensor: Tensor) -> bool:
    """Return True if a tensor is a variable."""
    return tensor.node.op.name == "variable"
