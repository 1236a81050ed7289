"""Gradients through a filter, in the graph of one model: which ones, and the state that they need.

`minimize` calls this before a strategy partitions the graph. It puts one `compressed_sum` node
behind the gradients, and variables with a row for each replica beside them. They are the user's
variables as the slots of an optimiser are: a step commits them, and checkpoints hold them.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.formatting import show_count
from graphflow.errors import ShardingError
from graphflow.frontend.builders import assign
from graphflow.init import ReplicaRows
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Tensor, name_scope, next_stream, origin_scope
from graphflow.ir.spec import kind
from graphflow.parallel.compression.emission import COMPRESSED
from graphflow.parallel.compression.filter import Filter
from graphflow.parallel.compression.traffic import Traffic, first_state, traffic_of


def filter_gradients(
    rule: Filter,
    gradients: Sequence[Tensor],
    variables: Sequence[Tensor],
    replicas: int,
    scale: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients of which a filter compresses the sums over replicas, and updates of its
    state.

    A gradient travels as it is if the filter does not apply to it, or would send as much.

    Args:
        rule: the filter.
        gradients: dense gradients.
        variables: the variable of each.
        replicas: the number of replicas.
        scale: the number by which the gradients are multiplied, if they are.

    Raises:
        ShardingError: the filter saves no bytes at all, or changes a shape or dtype.
    """
    if replicas == 1:
        return [*gradients], []
    found = [_traffic(rule, gradient, replicas) for gradient in gradients]
    chosen = [i for i, traffic in enumerate(found) if traffic is not None and traffic.saves]
    if not chosen:
        raise ShardingError(_describe_waste(rule, found, replicas))
    state, counts = [], []
    for i in chosen:
        own = _state_variables(rule, gradients[i], variables[i], replicas)
        state += own
        counts.append(len(own))
    read = [variables[i] for i in chosen] if rule.reads_value else []
    inputs = [*(gradients[i] for i in chosen), *state, *read, *([] if scale is None else [scale])]
    with name_scope("train"):
        node = REGISTRY[COMPRESSED](
            *inputs, rule=rule, count=len(chosen), states=tuple(counts), stream=next_stream(),
            scaled=scale is not None, reads=bool(read),
        )  # fmt: skip
        outputs = [node] if isinstance(node, Tensor) else [*node]
        after = outputs[len(chosen) : len(chosen) + len(state)]
        updates = [assign(old, new) for old, new in zip(state, after, strict=True)]
    sums = [*gradients]
    for i, total in zip(chosen, outputs, strict=False):
        sums[i] = total
    return sums, updates


def replica_variables(graph: Graph) -> list[Tensor]:
    """Return the variables of a graph that have a row for each replica."""
    return [
        node.outputs[0]
        for node in graph.variables
        if isinstance(node.attrs["initial"], ReplicaRows)
    ]


def _traffic(rule: Filter, gradient: Tensor, replicas: int) -> Traffic | None:
    """Return the bytes of a gradient's exchange; None if the filter does not apply to it."""
    if kind(gradient.dtype) != "float" or not rule.applies(gradient.spec):
        return None
    return traffic_of(rule, gradient.spec, replicas)


def _state_variables(
    rule: Filter, gradient: Tensor, variable: Tensor, replicas: int
) -> list[Tensor]:
    """Make the variables that hold the state of a gradient's exchange."""
    made = []
    with origin_scope(variable.node, "train/"):
        for number, row in enumerate(first_state(rule, gradient.spec)):
            residual = rule.feedback and number == 0
            name = "residual" if residual else f"filter_state_{number}"
            initial = ReplicaRows(row, replicas, adds_up=residual)
            tensor: Tensor = REGISTRY["variable"](
                initial=initial, trainable=False, shape=initial.shape,
                dtype=str(initial.dtype), named=False, name=f"{variable.node.name}/{name}",
            )  # fmt: skip
            made.append(tensor)
    return made


def _describe_waste(rule: Filter, found: Sequence[Traffic | None], replicas: int) -> str:
    """Describe a filter that saves no bytes."""
    known = [traffic for traffic in found if traffic is not None]
    if not known:
        return (
            f"{rule!r} applies to none of the {show_count(len(found), 'gradient')}; give another "
            "filter, or leave out compress="
        )
    filtered, plain = (round(sum(each)) for each in zip(*known, strict=True))
    return (
        f"{rule!r} saves nothing: with {replicas} replicas each receives {filtered:,} bytes a step "
        f"of {show_count(len(known), 'gradient')}, and {plain:,} without it; send less of each, "
        "or leave out compress="
    )


__all__ = ["filter_gradients", "replica_variables"]
