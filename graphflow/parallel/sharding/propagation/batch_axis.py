"""Placeholders of a graph that hold the batch, that is samples along their first axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.ir.spec import Dim, Size
from graphflow.strategy import strategy_of


def batch_placeholders(graph: Graph, wanted: Sequence[Tensor | str] | None = None) -> list[Tensor]:
    """Return the placeholders that hold the batch.

    By default these are the placeholders whose first axis has the size that most have; if sizes are
    symbolic, the symbol that most have.

    Args:
        graph: the graph.
        wanted: the placeholders, or their names, if the user names them. Placeholders that are not
            in the graph are left out.

    Raises:
        ShardingError: in a training step there is no such placeholder; or two sizes are equally
            common; or `wanted` names what is not there, or is no list.
    """
    every = {graph.names[node]: node.outputs[0] for node in graph.placeholders}
    if wanted is not None:
        trains = strategy_of(graph) is not None
        _check_wanted(wanted, every, strict=trains)
        named = [t if isinstance(t, Tensor) else every.get(t) for t in wanted]
        found = [t for t in named if t is not None and t.node in graph.names]
        if trains and not found:
            raise _unknown_placeholder_error(wanted[0], every)
        return found
    same = equal_sizes(graph)
    firsts = [(t, same.get(t.shape[0], t.shape[0])) for t in every.values() if t.ndim]
    symbolic = [(t, size) for t, size in firsts if isinstance(size, Dim)]
    sizes: Counter[Size] = Counter(size for _, size in symbolic or firsts)
    (size, most), *others = sizes.most_common(2) or [(0, 0)]
    if not most or (others and others[0][1] == most):
        if strategy_of(graph) is None:
            return []  # for example a fetch of weights: whole at each place
        names = ", ".join(f"{name!r} {t.shape}" for name, t in every.items()) or "none"
        raise ShardingError(
            f"which placeholders hold the batch? There are {names}; say it, batch=[x, y], or give "
            "the batch one name: gf.placeholder('float32', ('batch', 784))"
        )
    return [t for t, first in firsts if first == size]


def _check_wanted(wanted: object, every: Mapping[str, Tensor], strict: bool) -> None:
    """Refuse a `batch=` argument that is no list of placeholders or names.

    Raises:
        ShardingError: see above.
    """
    if (
        isinstance(wanted, str)
        or not isinstance(wanted, Sequence)
        or not wanted
        or not all(isinstance(each, Tensor | str) for each in wanted)
    ):
        raise ShardingError(
            f"batch must be a list of placeholders or their names, such as [x, 'y'], not {wanted!r}"
        )
    for each in wanted:
        if isinstance(each, Tensor) and (each.node.op.name != "placeholder" or not each.ndim):
            raise ShardingError(
                f"batch names {each!r}, which is no placeholder with a batch along its first axis"
            )
    for name in wanted:
        if strict and isinstance(name, str) and name not in every:
            raise _unknown_placeholder_error(name, every)


def _unknown_placeholder_error(named: object, every: Mapping[str, Tensor]) -> ShardingError:
    """Return the error of a batch that names a placeholder which the step does not have."""
    return ShardingError(
        f"batch names {named!r}, but the training step has no such placeholder; there are "
        f"{', '.join(map(repr, every)) or 'none'}"
    )


def equal_sizes(graph: Graph) -> dict[Size, Size]:
    """Map each symbolic size to the number, or else the first symbol, that ops require it to
    equal."""
    found: dict[Size, Size] = {}

    def first(size: Size) -> Size:
        while size in found and found[size] != size:
            size = found[size]
        return size

    for _, equal in graph.equations:
        x, y = sorted(map(first, equal), key=lambda size: isinstance(size, Dim))
        if isinstance(y, Dim):
            found[y] = found.setdefault(x, x)
    return {size: first(size) for size in found if isinstance(size, Dim)}
