"""Rates: the time of a node on a device, by a roofline over measured or given speeds.

seconds = launch + max(work / rate of the op, bytes / bandwidth of the memory that holds them). Of a
matrix product the two are added. Work is flops, or bytes for ops that only move data.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Body, bind_attrs
from graphflow.ir.op import Op
from graphflow.ir.spec import TensorSpec, evaluate, is_half, nbytes, real_dtype
from graphflow.ops.control_flow.control import cond, is_control, iteration_count

LEAST_SHARE = 0.05
"""Share of an op's time by itself that it takes at least among others in one kernel."""
STATELESS = frozenset({"constant", "placeholder", "variable", "group"})
"""Ops that run nothing."""


@dataclass(frozen=True, slots=True)
class OpWork:
    """The work of a node: floating point operations, bytes moved, and the bytes among which they
    lie, if these are more."""

    flops: float
    bytes: float
    spread: float = 0.0


def work(
    op: Op,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    attrs: Mapping[str, Any],
    bindings: Mapping[str, int] = MappingProxyType({}),
) -> OpWork:
    """Return the work of an op on concrete specs; without a cost rule, one flop for each output
    element.

    Args:
        bindings: Sizes of the symbols in bodies among the attributes.
    """
    moved = sum(map(nbytes, inputs)) + sum(map(nbytes, outputs))
    if op.cost is None:
        return OpWork(float(sum(evaluate(s.size, {}) for s in outputs)), moved)
    cost = op.cost(*inputs, **attrs)
    given = moved if cost.bytes is None else evaluate(cost.bytes, bindings)
    spread = float(evaluate(cost.spread, bindings))
    return OpWork(float(evaluate(cost.flops, bindings)), float(given), spread)


def op_class(op: Op) -> str:
    """Return matmul, random, alias, elementwise, or other (reductions, copies, indexing)."""
    if op.rate is not None:
        return "matmul"
    if op.random:
        return "random"
    if op.alias:
        return "alias"
    return "elementwise" if op.elementwise else "other"


@dataclass(frozen=True)
class Rates:
    """Speeds of one device.

    Args:
        speeds: Of its kind, as in `profile_file.Profile`.
        threads: Threads that share matrix products and generated kernels.
        compute, memory, launch: How many times longer work in the cache, work in memory, and
            launches take because neighbours are busy, too.
    """

    speeds: Mapping[str, Any]
    threads: int = 1
    compute: float = 1.0
    memory: float = 1.0
    launch: float = 1.0

    def seconds(
        self,
        op: Op,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        attrs: Mapping[str, Any],
        stays: float = 0.0,
    ) -> float:
        """Return the seconds of a node; 0 for ops that run nothing.

        Args:
            stays: bytes of the variables of the device. A step reads rows of some of them that the
                step before has left in no cache.
        """
        if op.name in STATELESS:
            return 0.0
        if is_control(op):
            return self._control_flow_seconds(op, attrs)
        entry = self.speeds["ops"].get(op.name, {})
        launch = float(entry.get("launch", self._start(op))) * self.launch
        if op.alias:
            return launch
        amount = work(op, inputs, outputs, attrs)
        if op_class(op) == "matmul":
            # Operands are fetched and packed before they are multiplied: nothing overlaps.
            busy = self._product(op, amount.flops, outputs[0].dtype) * self.compute
            return launch + busy + self._traffic(amount.bytes)
        busy = self._work_seconds(op, amount, entry, inputs, outputs)
        if is_generated(op):
            busy = self._share_over_threads(busy)
        busy *= self.compute
        spread = max(amount.spread, stays) if amount.spread else 0.0
        return launch + max(busy, self.move_seconds(amount.bytes, spread))

    def move_seconds(self, moved: float, spread: float = 0.0) -> float:
        """Return the seconds to move so many bytes.

        Args:
            spread: bytes of the arrays among which they lie, if these are more: then they come from
                the memory that holds the arrays, and more slowly than a stream of it.
        """
        if spread <= moved:
            return self._traffic(moved)
        stream = self._traffic(spread) * moved / spread
        return max(self._traffic(moved), stream * float(self.speeds.get("random_rows", 1.0)))

    def _start(self, op: Op) -> float:
        """Return the seconds to start an op that was not measured.

        Where CUDA graphs start kernels, an op without a generated kernel may have to be called.
        """
        return float(self.speeds["launch"] if is_generated(op) else self._call)

    @property
    def _call(self) -> float:
        """Seconds to start an op from Python."""
        return float(self.speeds.get("call", self.speeds["launch"]))

    def fused_seconds(
        self, parts: Sequence[tuple[Op, OpWork, Sequence[TensorSpec]]], moved: float
    ) -> float:
        """Return the seconds of a kernel that does the work of several nodes.

        It has one launch, and one pass over what it reads and writes. The computing of its nodes is
        added up.

        Args:
            parts: Op, work and outputs of each node.
            moved: Bytes that the kernel reads and writes.
        """
        launch = float(self.speeds["launch"]) * self.launch
        busy = math.fsum(self._compute_seconds(*part) for part in parts) * self.compute
        return launch + max(busy, self._traffic(moved))

    def _compute_seconds(self, op: Op, amount: OpWork, outputs: Sequence[TensorSpec]) -> float:
        """Return the seconds that a node computes, without the passes over its operands.

        These are part of its rate, because the op was measured alone.
        """
        entry = self.speeds["ops"].get(op.name, {})
        busy = self._work_seconds(op, amount, entry, outputs, outputs)
        return max(
            busy - interpolate_seconds(self.speeds["traffic"], amount.bytes), LEAST_SHARE * busy
        )

    def _control_flow_seconds(self, op: Op, attrs: Mapping[str, Any]) -> float:
        """Return the seconds of all runs of a node's bodies; for a cond, of its longer branch."""
        held = [value for value in attrs.values() if isinstance(value, Body)]
        each = [self._body_seconds(body) for body in held]
        once = max(each) if op is cond else math.fsum(each)
        return self._call * self.launch + iteration_count(op, attrs) * once

    def _body_seconds(self, body: Body) -> float:
        """Return the seconds of a body's nodes."""
        sizes = body.bindings
        return math.fsum(
            self.seconds(
                node.op,
                [t.spec.bind(sizes) for t in node.inputs],
                [spec.bind(sizes) for spec in node.specs],
                bind_attrs(node.attrs, sizes),
            )
            for node in body.graph.nodes
        )

    def _traffic(self, moved: float) -> float:
        """Return the seconds to move so many bytes."""
        shared = self.memory if moved > self.speeds["cache_bytes"] else 1.0
        return interpolate_seconds(self.speeds["traffic"], moved) * shared

    def _work_seconds(
        self,
        op: Op,
        amount: OpWork,
        entry: Mapping[str, float],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
    ) -> float:
        """Return the seconds of a node's work by its op's rate, or by its class's."""
        if "rate" not in entry:
            classes = self.speeds["classes"]
            entry = classes.get(op_class(op)) or classes.get("other") or {}
            if "rate" not in entry or not amount.flops:
                return 0.0  # its bytes are counted as traffic
        if not amount.flops:
            return amount.bytes / entry["rate"]
        itemsize = max((s.dtype.itemsize for s in (*outputs, *inputs)), default=1)
        return amount.flops / entry["rate"] * max(1.0, itemsize / entry["itemsize"])

    def _product(self, op: Op, flops: float, dtype: np.dtype[Any]) -> float:
        """Return the seconds of a matrix product's flops."""
        tables = self.speeds["matmul"]
        name = "float32" if is_half(dtype) else real_dtype(dtype).name  # what is computed in
        if is_half(dtype) and op.rate == "half_product" and "float16" in tables:
            name = "float16"
        elif op.takes_half is not None and dtype.name in tables:
            name = dtype.name
        return self._share_over_threads(
            interpolate_seconds(tables.get(name, tables["other"]), flops)
        )

    def _share_over_threads(self, alone: float) -> float:
        """Return the seconds of work that threads share if that pays."""
        if self.threads == 1:
            return alone
        factor = contention_factor(self.speeds["contention"], "compute", self.threads)
        shared = alone / self.threads * factor + float(self.speeds["handoff"])
        return min(alone, shared)


def interpolate_seconds(points: Sequence[Sequence[float]], amount: float) -> float:
    """Return the seconds for so many flops or bytes.

    Lines between points in logarithms; beyond the points, the rates of the last ones. `points` are
    (amount, seconds), both rising.
    """
    if amount <= points[0][0]:
        return float(points[0][1]) * amount / points[0][0]
    if amount >= points[-1][0]:
        return float(points[-1][1]) * amount / points[-1][0]
    at = bisect_left([p[0] for p in points], amount)
    (f0, t0), (f1, t1) = points[at - 1], points[at]
    share = math.log(amount / f0) / math.log(f1 / f0)
    return math.exp(math.log(t0) + share * math.log(t1 / t0))


def contention_factor(contention: Mapping[str, Sequence[float]], what: str, threads: int) -> float:
    """Return how many times longer each of so many busy threads takes ("compute" or "memory").

    Beyond what was measured (all cores), threads take turns.
    """
    counts, factors = contention["threads"], contention[what]
    beyond = max(1.0, threads / counts[-1]) if len(counts) > 1 else 1.0
    return float(np.interp(threads, counts, factors)) * beyond


def is_generated(op: Op) -> bool:
    """Return True if programs compute an op by a kernel of ours, with its neighbours."""
    return op.elementwise or op.rows is not None


def speeds_from_numbers(flops: float, bandwidth: float, launch: float) -> dict[str, Any]:
    """Return the speeds of a device with three numbers: flop/s, bytes/s, seconds of a launch."""
    return {
        "launch": launch,
        "handoff": 0.0,
        "cache_bytes": 0,
        "traffic": [[1.0, 1.0 / bandwidth]],
        "matmul": {"other": [[1.0, 1.0 / flops]], "float64": [[1.0, 2.0 / flops]]},
        "ops": {},
        "classes": {"other": {"launch": launch, "rate": flops, "itemsize": 4}},
        "contention": {"threads": [1], "compute": [1.0], "memory": [1.0]},
    }
