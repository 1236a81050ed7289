"""Checks of the arguments of a Pipeline, against numbers and against a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphflow.base.argument_checks import signature_of
from graphflow.errors import GraphflowError, ScheduleError, ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.ir.spec import sole_symbol
from graphflow.parallel.mesh.size_partitioner import MAX_SYMBOLS
from graphflow.parallel.pipelining.schedule import Schedule
from graphflow.parallel.pipelining.stages import origin_of

MAX_NODES = 500_000
"""The most nodes, about, that a pipeline's graph may have."""


def is_stage_list(stages: Any) -> bool:
    """Return True if an argument that is no number is "auto" or a list of stages."""
    if isinstance(stages, str | bytes):
        return stages == "auto"
    return isinstance(stages, Sequence) and bool(stages)


def call_schedule(
    make: Callable[[int, int], Any], stages: int, microbatches: int, where: str
) -> Schedule:
    """Call a schedule function and check what it returns.

    Raises:
        ScheduleError: it raises an error of its own, or returns no Schedule.
    """
    try:
        made = make(stages, microbatches)
    except GraphflowError:
        raise
    except Exception as error:
        raise ScheduleError(
            f"{where}: {_describe_function(make)} raised {type(error).__name__} for {stages} "
            f"stages and {microbatches} micro-batches: {error}"
        ) from error
    if not isinstance(made, Schedule):
        raise ScheduleError(
            f"{where}: {_describe_function(make)} gives a schedule, a gf.parallel.Schedule such as "
            f"gf.parallel.one_f_one_b(stages, microbatches), not {made!r}"
        )
    return made


def _describe_function(function: Any) -> str:
    """Describe a schedule function for messages."""
    return f"schedule={getattr(function, '__qualname__', repr(function))}"


def check_function(function: Any, where: str) -> None:
    """Refuse a function that cannot be called with the numbers of stages and micro-batches.

    Raises:
        ScheduleError: see above.
    """
    try:
        signature_of(function).bind(2, 4)
    except TypeError as error:
        raise ScheduleError(
            f"{where}: {_describe_function(function)} is called with the numbers of stages and "
            f"micro-batches, but {error}; give a function of two arguments, lambda stages, "
            "microbatches: …"
        ) from None
    except ValueError:
        return  # a C function without a signature


def check_batch(
    batch: Sequence[Tensor], microbatches: int, fed: Mapping[str, int], times: int
) -> None:
    """Refuse a batch smaller than its micro-batches, before any of them is written.

    Args:
        batch: the placeholders that hold the batch.
        microbatches: the number of micro-batches.
        fed: the sizes of symbols that are fed.
        times: the factor by which a product multiplies the Pipeline's own number.

    Raises:
        ShardingError: see above.
    """
    for tensor in batch:
        size = tensor.shape[0]
        symbol = sole_symbol(size)
        count = size if isinstance(size, int) else fed.get(symbol) if symbol else None
        if count is not None and count < microbatches:
            fewer = f", or give it microbatches={count // times} at most" if count >= times else ""
            if times > 1:
                fewer += ", or a smaller accumulate="
            raise ShardingError(
                f"a batch of {count} (of {tensor.name!r}, made at {tensor.node.location}) is "
                f"smaller than the {microbatches} micro-batches of the Pipeline; feed at least "
                f"{microbatches}{fewer}"
            )


def check_microbatch_count(graph: Graph, batch: Sequence[Tensor], microbatches: int) -> None:
    """Refuse more micro-batches than can be written. Each has nodes of its own.

    Raises:
        ScheduleError: see above.
    """
    nodes = len(graph.nodes)
    most = max(1, MAX_NODES // max(1, nodes))
    if not all(isinstance(tensor.shape[0], int) for tensor in batch):
        most = min(most, MAX_SYMBOLS)
    if microbatches > most:
        raise ScheduleError(
            f"a Pipeline of {microbatches:,} micro-batches would write the {nodes:,} nodes of its "
            f"step for each of them, {microbatches * nodes:,} in all; give it "
            f"microbatches={most} at most, and a batch of as many times the size of one"
        )


def losses_of(graph: Graph) -> list[Tensor]:
    """Return the losses that the training steps of a graph minimise. They need not be part of the
    graph.

    A step that was built for one device does not record its loss. Then the loss is taken to be the
    last node for which gradients were made.
    """
    recorded = [node.attrs.get("loss") for node in graph.of_op("group")]
    losses = list(dict.fromkeys(loss for loss in recorded if loss is not None))
    if losses:
        return losses
    origins = {origin_of(node) for node in graph.nodes if node.origin is not None}
    made = [node for node in origins if node.op.name != "variable"]
    return [max(made, key=lambda node: node.serial).outputs[0]] if made else []


def is_training(graph: Graph) -> bool:
    """Return True if a graph assigns variables."""
    return bool(graph.of_op("assign"))
