"""Lower bounds and estimates of a candidate's step by closed forms, before its graph is written.

Writing and simulating a graph takes a good part of a second. Most candidates of a large cluster can
be skipped: even without communication and idle time they would be slower than one that was
simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.parallel.pipelining.stages import origin_of
from graphflow.parallel.resharding.shared_reductions import ValueNumbering
from graphflow.parallel.searching.candidates import Rules, StrategyCandidate, fitting_rules
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.problem_builder import GraphProblem

SLACK = 0.8
"""How much less than its share of the time a part of a step may take, because it fits in a cache by
then."""
_ZERO_BUBBLE = 2 / 3
"""The share of a stage's passes for which ZB-H1 waits: f + b − w of f + b + w, if these are
equal."""


@dataclass(frozen=True)
class StepBounds:
    """Bounds of a candidate's time and memory.

    Attributes:
        min_seconds: a lower bound of its time.
        seconds: an estimate of its time.
        min_memory: a lower bound of the bytes on one of its devices: variables, and their gradients
            or the activations kept for backward passes.
    """

    min_seconds: float
    seconds: float
    min_memory: float


class StepModel:
    """A training step in a few numbers, for closed forms.

    Args:
        made: the undivided step as a problem on the cluster, with busy neighbours.
        loss: the loss that it trains.
        cluster: the cluster.
        rules: the rules of tensor parallelism.
        overhead: seconds of a step beyond its nodes, on one worker and on two.
    """

    def __init__(
        self,
        made: GraphProblem,
        loss: Tensor,
        cluster: Cluster,
        rules: Rules,
        overhead: tuple[float, float],
    ) -> None:
        self._number = {name: i for i, name in enumerate(cluster.devices)}
        self._made, self._loss, self._rules = made, loss, rules
        self._overhead = overhead
        compute = made.problem.compute[: len(made.nodes), :-1]
        self._seconds = np.where(np.isfinite(compute), compute, 0.0)
        self._inside = set(Graph([loss]).nodes)
        updates = [self._is_update(node) for node in made.nodes]
        self._late = np.array(updates, dtype=bool)
        self._trained = [
            node
            for node in made.graph.variables
            if node in self._inside and node.attrs["trainable"]
        ]
        self._weights = sum(_bytes(made, node.outputs[0]) for node in self._trained)
        self._slots = self._bytes_of_slots()
        self._gradients = self._bytes_of_gradients()
        self._kept = self._bytes_of_activations()
        self._products = sum(  # bytes that row-parallel products sum over devices, in both passes
            2 * _bytes(made, node.outputs[0])
            for node in self._inside
            if node.op.name == "matmul" and rules.get(node.inputs[1], (None,))[0] == "model"
        )

    def _is_update(self, node: Node) -> bool:
        """Return True if a node belongs to the update of a variable."""
        return node.op.name == "assign" or origin_of(node).op.name == "variable"

    def totals(self) -> list[float]:
        """Return the seconds of the whole step on each device."""
        return [float(column) for column in self._seconds.sum(axis=0)]

    def bounds(self, candidate: StrategyCandidate, stages: Mapping[Node, int] | None) -> StepBounds:
        """Return what a candidate takes.

        Args:
            candidate: the candidate.
            stages: the stage of each node of the forward pass, if there are any.
        """
        used = [self._number[name] for name in candidate.devices]
        passes, updates = self._stage_seconds(candidate, used, stages)
        p, m = candidate.stages, candidate.microbatches
        slowest, mean = max(passes), sum(passes) / len(passes)
        waits = (p - 1) / m * mean / candidate.chunks
        waits *= _ZERO_BUBBLE if candidate.schedule == "zb-h1" else 1.0
        again = 4 / 3 if candidate.recompute else 1.0
        computed = slowest * again + waits + updates
        more = len(used) - 1
        first, second = self._overhead
        fixed = first + more * max(0.0, second - first)
        sent = self._communication_seconds(candidate, used, stages)
        return StepBounds(
            SLACK * computed, computed + fixed + sent, self._min_memory(candidate, stages)
        )

    def _bytes_of_slots(self) -> dict[Node, float]:
        """Return, for each weight, the bytes of the optimiser's slots."""
        slots = dict.fromkeys(self._trained, 0.0)
        for node in self._made.graph.variables:
            if node not in slots and (weight := origin_of(node)) in slots:
                slots[weight] += _bytes(self._made, node.outputs[0])
        return slots

    def _bytes_of_gradients(self) -> dict[Node, float]:
        """Return, for each weight, the bytes of its gradient if that is surely held.

        Only weights with slots that only products read count: the gradient of a table may be a few
        rows, and without slots a product is its weight's update.
        """
        found = {}
        for weight, slots in self._slots.items():
            inside = (n for n in self._made.graph.consumers[weight] if n in self._inside)
            alone = slots > 0 and all(n.op.name == "matmul" for n in inside)
            found[weight] = _bytes(self._made, weight.outputs[0]) if alone else 0.0
        return found

    def _bytes_of_activations(self) -> dict[Node, float]:
        """Return, for each node, the bytes of activations that backward passes read.

        Nodes after the last product do not count: they may be computed in one kernel with their
        gradient.
        """
        nodes, consumers = self._made.graph.nodes, self._made.graph.consumers
        repeats, fed, early = ValueNumbering(), set[Node](), set[Node]()
        first = {n: repeats.first_equal(n) for n in nodes if n in self._inside}
        for node in first:
            if node.op.name == "placeholder" or any(t.node in fed for t in node.inputs):
                fed.add(node)
        for node in reversed([*first]):
            if any(r in early or not _is_fused(r) for r in consumers[node] if r in self._inside):
                early.add(node)
        found: dict[Node, float] = {}
        for node in nodes:
            for tensor in () if node in self._inside else node.inputs:
                source = _view_source(tensor)
                made = first.get(source.node)
                if made in fed and made in early and made.op.name != "placeholder":
                    found[made] = sum(_bytes(self._made, t) for t in made.outputs)
        return found

    def _min_memory(self, candidate: StrategyCandidate, stages: Mapping[Node, int] | None) -> float:
        """Return a lower bound of the bytes on the fullest device."""
        cut = {
            weight.node
            for weight, axes in fitting_rules(self._rules, candidate.model).items()
            if "model" in axes
        }
        p, v = candidate.stages, candidate.chunks
        stays, late = [0.0] * p, [0.0] * p
        kept = [[0.0] * v for _ in range(p)]
        for node, slots in self._slots.items():
            at = 0 if stages is None else stages.get(node, 0) % p
            share = candidate.data if candidate.shared else 1
            pieces = candidate.model if node in cut else 1
            stays[at] += (_bytes(self._made, node.outputs[0]) + slots / share) / pieces
            late[at] += self._gradients[node] / share / pieces
        for node, size in self._kept.items():
            chunk, at = divmod(0 if stages is None else stages.get(node, 0), p)
            kept[at][chunk] += size / candidate.places
        return max(
            max(stays[at] + late[at], stays[at] + _stored_bytes(candidate, at, kept[at], late[at]))
            for at in range(p)
        )

    def _stage_seconds(
        self, candidate: StrategyCandidate, used: Sequence[int], stages: Mapping[Node, int] | None
    ) -> tuple[list[float], float]:
        """Return the seconds that each device spends on passes, and the most that one spends on
        updates."""
        beside = candidate.data * candidate.model
        columns = self._seconds[:, used]
        if stages is None:
            passes = columns[~self._late].sum(axis=0).max() / beside
            return [float(passes)], float(columns[self._late].sum(axis=0).max()) / candidate.model
        where = np.array([stages.get(origin_of(n, stages), 0) for n in self._made.nodes])
        found, late = [], [0.0]
        for at in range(candidate.stages):
            mine = where % candidate.stages == at
            column = columns[:, at * beside : (at + 1) * beside].max(axis=1)
            found.append(float(column[mine & ~self._late].sum()) / beside)
            late.append(float(column[mine & self._late].sum()) / candidate.model)
        return found, max(late)

    def _communication_seconds(
        self, candidate: StrategyCandidate, used: Sequence[int], stages: Mapping[Node, int] | None
    ) -> float:
        """Return the seconds of communication, with no overlap."""
        problem = self._made.problem
        pairs = np.ix_(used, used)
        latency = float(problem.latency[pairs].max())
        apart = problem.bandwidth[pairs][~np.eye(len(used), dtype=bool)]
        rate = float(apart.min()) if len(apart) else np.inf
        d, t, p = candidate.data, candidate.model, candidate.stages
        total = 2 * (d - 1) / d * self._weights / t / p / rate + 2 * (d > 1) * latency
        total += 2 * (t - 1) / t * self._products / d / p / rate + 4 * (t > 1) * latency
        if stages is not None:
            crossing = sum(
                _bytes(self._made, tensor)
                for node, stage in stages.items()
                for tensor in {*node.inputs}
                if stages.get(tensor.node, stage) != stage
            )
            total += 2 * crossing / d / rate / max(1, p - 1)
            total += 2 * (p - 1 + candidate.microbatches) * latency
        return total


def _stored_bytes(
    candidate: StrategyCandidate, at: int, kept: Sequence[float], gradients: float
) -> float:
    """Return the bytes of activations that a device holds when its first backward pass begins, or
    when all gradients exist.

    Args:
        candidate: the candidate.
        at: the stage.
        kept: the activations of one micro-batch, for each chunk of the device.
        gradients: the bytes of the stage's gradients.
    """
    p, m = candidate.stages, candidate.microbatches
    *before, last = kept
    beside = gradients if m >= 2 * p and not before else 0.0
    if candidate.recompute:
        return max(kept) + beside
    return min(m, p) * sum(before) + min(m, 2 * (p - at) - 1 if before else p - at) * last + beside


def _is_fused(node: Node) -> bool:
    """Return True if a node may be part of a fused kernel."""
    return node.op.elementwise or node.op.rows is not None or node.op.alias


def _view_source(tensor: Tensor) -> Tensor:
    """Return the tensor of which another one is, or may become, a view."""
    while tensor.node.op.alias or tensor.node.op.name == "permute_dims":
        tensor = tensor.node.inputs[0]
    return tensor


def _bytes(made: GraphProblem, tensor: Tensor) -> float:
    """Return the bytes of a tensor of the step."""
    spec = made.specs.get(tensor)
    return 0.0 if spec is None else float(nbytes(spec))
