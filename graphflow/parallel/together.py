"""Several partial sums in one exchange: flat and one after the other, added up, taken apart again.

Small tensors each cost an exchange as much as large ones do, so those that are finished about the
same time go together (`buckets.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from graphflow.op import FUNCTIONS, Node, Tensor
from graphflow.parallel.collectives import all_reduce, reduce_scatter
from graphflow.parallel.layouts import Layout, Value
from graphflow.parallel.mesh import Place
from graphflow.parallel.moves import Moves, Note
from graphflow.parallel.parts import cut
from graphflow.spec import product


def summed(moves: Moves, values: Sequence[Value], axis: str, cause: Node) -> list[Value]:
    """Sums over groups along an axis of the mesh, of several values: every place has them."""

    def exchange(group: Sequence[Place]) -> Sequence[Tensor]:
        rows = [
            _row(moves, place, cause, [moves.part(v, place) for v in values]) for place in group
        ]
        with moves.between(cause):
            return all_reduce(rows)

    layouts = [_without(value.layout, axis) for value in values]
    sums = _taken_apart(moves, values, layouts, axis, cause, exchange)
    travels = 2 * sum(moves.group_bytes(value, axis) for value in values)
    note = Note(moves, cause, f"{len(values)} gradients")
    note("all-reduce", axis, (moves.mesh.sizes[axis] - 1) * travels)
    return sums


def scattered(
    moves: Moves, values: Sequence[Value], layouts: Sequence[Layout], axis: str, cause: Node
) -> list[Value]:
    """Such sums of which each place of a group has its piece.

    Args:
        layouts: of the results, each of which is cut along the axis of the mesh last (see
            `Moves.scatters`).
    """

    def pieces(own: Place, to: Place) -> Iterable[Tensor]:
        """What a place has of another one's pieces."""
        for value, layout in zip(values, layouts, strict=True):
            part = moves.part(value, own)
            sizes = zip(value.spec.shape, value.layout.dims, layout.dims, strict=True)
            for d, (size, have, want) in enumerate(sizes):
                if have != want:
                    piece = moves.cuts.piece(size, want, to)
                    start = piece.start - moves.cuts.piece(size, have, own).start
                    part = cut(part, d, start, piece.size)
            yield part

    def exchange(group: Sequence[Place]) -> Sequence[Tensor]:
        rows = []
        for own in group:
            with moves.at(own, cause):
                parts = [part for to in group for part in pieces(own, to)]
            rows.append(_row(moves, own, cause, parts))
        each = list(zip(values, layouts, strict=True))
        sizes = [sum(_size(moves, *one, to) for one in each) for to in group]
        with moves.between(cause):
            return reduce_scatter(rows, axis=0, sizes=sizes)

    sums = _taken_apart(moves, values, layouts, axis, cause, exchange)
    travels = sum(moves.group_bytes(value, axis) for value in values)
    note = Note(moves, cause, f"{len(values)} gradients")
    note("reduce-scatter", axis, (moves.mesh.sizes[axis] - 1) * travels)
    return sums


def _size(moves: Moves, value: Value, layout: Layout, place: Place) -> int:
    """Elements of the part of a value at a place, by its layout."""
    return int(product(moves.local_shape(value.spec.shape, layout, place)))  # type: ignore[arg-type]


def _without(layout: Layout, axis: str) -> Layout:
    """A layout whose sums along an axis of the mesh are done."""
    return replace(layout, partial=tuple(p for p in layout.partial if p[0] != axis))


def _row(moves: Moves, place: Place, cause: Node, parts: Sequence[Tensor]) -> Tensor:
    """Tensors of a place, flat and one after the other."""
    with moves.at(place, cause):
        row: Tensor = FUNCTIONS["concat"]([FUNCTIONS["reshape"](part, (-1,)) for part in parts])
    return row


def _taken_apart(
    moves: Moves,
    values: Sequence[Value],
    layouts: Sequence[Layout],
    axis: str,
    cause: Node,
    exchange: Callable[[Sequence[Place]], Sequence[Tensor]],
) -> list[Value]:
    """The parts of what a group gets in one exchange; groups that have the same parts at the same
    devices get the same."""
    found: list[dict[Place, Tensor]] = [{} for _ in values]
    known: dict[tuple[Tensor, ...], list[Place]] = {}
    for group in moves.mesh.groups(axis):
        own = tuple(moves.part(v, place) for place in group for v in values)
        twin = known.setdefault(own, group)
        if twin is not group:
            for parts in found:
                parts.update({p: parts[q] for p, q in zip(group, twin, strict=True)})
            continue
        for place, row in zip(group, exchange(group), strict=True):
            begin = 0
            for value, layout, parts in zip(values, layouts, found, strict=True):
                shape = moves.local_shape(value.spec.shape, layout, place)
                size = _size(moves, value, layout, place)
                with moves.at(place, cause):
                    parts[place] = FUNCTIONS["reshape"](cut(row, 0, begin, size), shape)
                begin += size
    return [
        Value(value.spec, layout, tuple(parts[p] for p in moves.mesh.places))
        for value, layout, parts in zip(values, layouts, found, strict=True)
    ]


__all__ = ["scattered", "summed"]
