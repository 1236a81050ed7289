"""Collective ops: reductions and exchanges of the tensors of several ranks.

A collective has a node for each rank, with the tensors of all ranks as inputs. Its value is a plain
function of these, in a fixed order (`reduction_order.py`), so every placement gives the same bits.
Nodes that differ only in their rank are a group. If a group lies on several devices, partitioning
makes one exchange of it, and the cost model counts what that sends. The gradient of a group is a
group again (`joint`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from graphflow.ir.op import (
    FUNCTIONS,
    Cost,
    Node,
    Op,
    Tensor,
    device,
    origin_scope,
    register,
    sample,
)
from graphflow.ir.spec import Size, TensorSpec, kind, nbytes, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.communication.collective_rules import (
    Hosts,
    Sizes,
    copy_into,
    exchange_into,
    gather_into,
    infer_broadcast,
    infer_exchange,
    infer_gather,
    infer_reduce,
    infer_scatter,
    part,
    reduce_into,
    replace_size,
    scatter_into,
)

G = FUNCTIONS


# Groups ---------------------------------------------------------------------------------------


def group_key(node: Node) -> Hashable:
    """Return what the nodes of one group have in common; None if the node is no collective."""
    if node.op.joint is None:
        return None
    attrs = tuple(sorted((k, v) for k, v in node.attrs.items() if k != "rank"))
    return (node.op.name, node.inputs, attrs)


def groups_of(nodes: Iterable[Node]) -> list[list[Node]]:
    """Return the complete groups among some nodes, each in order of rank."""
    found: dict[Hashable, list[dict[int, Node]]] = {}
    for node in nodes:
        if node.op.joint is not None:
            groups = found.setdefault(group_key(node), [])
            rank = node.attrs["rank"]
            group = next((g for g in groups if rank not in g), None)
            if group is None:
                groups.append(group := {})
            group[rank] = node
    return [
        [group[rank] for rank in range(rank_count(next(iter(group.values()))))]
        for groups in found.values()
        for group in groups
        if len(group) == rank_count(next(iter(group.values())))
    ]


def own_inputs(node: Node) -> tuple[Tensor, ...]:
    """Return the inputs that a node's device needs for an exchange: that of its own rank."""
    rank: int = node.attrs["rank"]
    return node.inputs[rank : rank + 1]


def rank_count(node: Node) -> int:
    """Return the number of ranks in a node's group."""
    count: int = node.attrs.get("count", len(node.inputs))
    return count


def received_bytes(
    node: Node, source: int, specs: Sequence[TensorSpec], known: Callable[[Size], int] = int
) -> float:
    """Return the bytes of input `source` that the device of another rank receives in an exchange.

    In an all-reduce each rank receives a share of every other rank's tensor, and from every other
    rank its share of the result: 2 (n - 1) / n of the bytes in all.

    Args:
        node: the node of the receiving rank.
        source: the rank that sends.
        specs: the specs of the inputs, with known shapes.
        known: maps a size to its number.
    """
    whole = float(nbytes(specs[source]))
    if node.op.name == "all_reduce":
        return 2 * whole / rank_count(node)
    sizes: Any = node.attrs.get("sizes")
    if sizes is None:
        return whole
    own = [*map(known, sizes[source] if node.op.name == "all_to_all" else sizes)]
    rank: int = node.attrs["rank"]
    return whole * own[rank] / max(1, sum(own))


# Gradients ------------------------------------------------------------------------------------


def _reduce_vjp(
    g: Tensor, y: Tensor, *xs: Tensor, rank: int, reduction: str, algorithm: str, hosts: Hosts
) -> Sequence[Tensor]:
    """Return all_reduce's cotangents. For max and min, ties share the cotangent equally."""
    if reduction == "sum":
        return (g,) * len(xs)
    if reduction == "mean":
        return (g / len(xs),) * len(xs)
    if reduction == "prod":
        return [g * _product([x for j, x in enumerate(xs) if j != i], g) for i in range(len(xs))]
    attained = [G["equal"](x, y) for x in xs]
    first, *others = (G["astype"](a, y.dtype) for a in attained)
    each = g / sum(others, first)
    return [G["where"](a, each, 0) for a in attained]


def _product(xs: Sequence[Tensor], like: Tensor) -> Any:
    """Return the product of conjugated tensors; ones like `like` if there are none."""
    result: Any = None
    for x in xs:
        x = G["conj"](x) if kind(x.dtype) == "complex" else x
        result = x if result is None else result * x
    return G["ones_like"](like) if result is None else result


def _reduce_joint(nodes: Sequence[Node], gs: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """Return the cotangents of a whole group of all_reduce, as collectives; None for products."""
    first = nodes[0]
    reduction, xs = first.attrs["reduction"], first.inputs
    if reduction == "prod":
        return None
    attrs = {**first.attrs, "reduction": "mean" if reduction == "mean" else "sum"}
    total = group(all_reduce, gs, nodes, attrs)
    if reduction in ("sum", "mean"):
        return total
    attained, counted = [], []
    for node, x in zip(nodes, xs, strict=True):
        with origin_scope(node):
            attained.append(G["equal"](x, node.outputs[0]))
            counted.append(G["astype"](attained[-1], x.dtype))
    ties = group(all_reduce, counted, nodes, attrs)
    return [G["where"](a, t / n, 0) for a, t, n in zip(attained, total, ties, strict=True)]


def _scatter_vjp(
    g: Tensor, y: Tensor, *xs: Tensor, rank: int, axis: int, sizes: Sizes, reduction: str,
    algorithm: str, hosts: Hosts,
) -> Sequence[Tensor]:  # fmt: skip
    """Return reduce_scatter's cotangents: zeros outside of the rank's part."""
    if reduction == "mean":
        g = g / len(xs)
    parts = [g if i == rank else _zeros(g, axis, size) for i, size in enumerate(sizes)]
    return (G["concat"](parts, axis),) * len(xs)


def _zeros(g: Tensor, axis: int, size: Size) -> Tensor:
    """Return zeros like g with another size of one axis."""
    zeros: Tensor = G["zeros"](replace_size(g.shape, axis, size), g.dtype)
    return zeros


def _scatter_joint(nodes: Sequence[Node], gs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the cotangents of a whole group of reduce_scatter: an all_gather."""
    first = nodes[0]
    if first.attrs["reduction"] == "mean":
        gs = [g / len(gs) for g in gs]
    return group(all_gather, gs, nodes, {"axis": first.attrs["axis"]})


def _gather_vjp(g: Tensor, y: Tensor, *xs: Tensor, rank: int, axis: int) -> Sequence[Tensor]:
    """Return all_gather's cotangents: the part of each rank."""
    at: list[Size] = [0]
    for x in xs:
        at.append(at[-1] + x.shape[axis])
    return [part(g, axis, at[i], at[i + 1]) for i in range(len(xs))]


def _gather_joint(nodes: Sequence[Node], gs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the cotangents of a whole group of all_gather: a reduce_scatter."""
    axis = nodes[0].attrs["axis"]
    attrs = {
        "axis": axis, "sizes": tuple(x.shape[axis] for x in nodes[0].inputs),
        "reduction": "sum", "algorithm": "auto", "hosts": None,
    }  # fmt: skip
    return group(reduce_scatter, gs, nodes, attrs)


def _exchange_vjp(
    g: Tensor, y: Tensor, *xs: Tensor, rank: int, split_axis: int, concat_axis: int,
    sizes: tuple[Sizes, ...],
) -> Sequence[Tensor]:  # fmt: skip
    """Return all_to_all's cotangents: zeros outside of the parts sent to this rank."""
    back: list[Tensor] = []
    at: Size = 0
    for x, own in zip(xs, sizes, strict=True):
        size = own[rank] if split_axis == concat_axis else x.shape[concat_axis]
        mine = part(g, concat_axis, at, at + size)
        at = at + size
        parts = [mine if i == rank else _zeros(mine, split_axis, s) for i, s in enumerate(own)]
        back.append(G["concat"](parts, split_axis))
    return back


def _exchange_joint(nodes: Sequence[Node], gs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the cotangents of a whole group of all_to_all: the exchange in the other direction."""
    first = nodes[0]
    split, concat, sizes = (first.attrs[k] for k in ("split_axis", "concat_axis", "sizes"))
    back = tuple(
        tuple(
            sizes[j][i] if split == concat else first.inputs[j].shape[concat]
            for j in range(len(nodes))
        )
        for i in range(len(nodes))
    )
    attrs = {"split_axis": concat, "concat_axis": split, "sizes": back}
    return group(all_to_all, gs, nodes, attrs)


def _broadcast_joint(nodes: Sequence[Node], gs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Sum all ranks' cotangents at rank 0. No node reads the sums at other ranks."""
    attrs = {"reduction": "sum", "algorithm": "auto", "hosts": None}
    return group(all_reduce, gs, nodes, attrs)[:1]


def group(op: Op, tensors: Sequence[Any], like: Sequence[Any], attrs: Any) -> list[Tensor]:
    """Return one node for each rank. It is pinned where that rank's tensor in `like` is, or belongs
    to that node as its gradient."""
    results = []
    for rank, each in enumerate(like):
        near = device(each.node.device) if isinstance(each, Tensor) else origin_scope(each)
        with near:
            results.append(op(*tensors, **{**attrs, "rank": rank}))
    return results


# Ops ------------------------------------------------------------------------------------------


def _kernel(into: Any, infer: Any) -> Any:
    """Return a kernel that allocates its result and calls one that writes into it."""

    def kernel(xp: Any, *xs: Any, **attrs: Any) -> Any:
        made = infer(*(TensorSpec(x.shape, x.dtype) for x in xs), **attrs)
        out = xp.empty(made.shape, made.dtype)
        into(xp, out, *xs, **attrs)
        return out

    return kernel


def _reduction_cost(*xs: TensorSpec, **attrs: Any) -> Cost:
    """Return the cost of one rank's share of the work."""
    return Cost(flops=xs[0].size, bytes=3 * xs[0].nbytes)


def _copy_cost(*xs: TensorSpec, **attrs: Any) -> Cost:
    """Return the cost of a collective that only copies."""
    return Cost(flops=0)


def _batch_rule(*names: str) -> Any:
    """Return the batching rule of ops whose axis attributes count from the front."""

    def rule(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
        moved = {name: attrs[name] + 1 for name in names}
        return op(*batching.batch_all(inputs, batched), **{**attrs, **moved})

    return rule


_SAMPLE = spec("float32", (4, 3))
_FREE: dict[str, Any] = {"algorithm": "auto", "hosts": None}

all_reduce = register(
    Op(
        "all_reduce",
        infer=infer_reduce,
        kernel=_kernel(reduce_into, infer_reduce),
        into=reduce_into,
        vjp=_reduce_vjp,
        joint=_reduce_joint,
        batch=batching.rows,
        cost=_reduction_cost,
        samples=[
            sample(*[_SAMPLE] * 3, rank=1, reduction="sum", **_FREE),
            sample(*[_SAMPLE] * 3, rank=0, reduction="mean", algorithm="ring", hosts=None),
            sample(*[_SAMPLE] * 2, rank=0, reduction="prod", algorithm="tree", hosts=None),
            sample(*[_SAMPLE] * 4, rank=0, reduction="max", algorithm="two_level",
                   hosts=(0, 1, 0, 1)),
            sample(*[spec("int32", (5,))] * 2, rank=1, reduction="min", **_FREE),
        ],
        doc="The sum (or mean, product, largest, smallest) of all ranks' tensors, at one rank.",
    )
)  # fmt: skip

reduce_scatter = register(
    Op(
        "reduce_scatter",
        infer=infer_scatter,
        kernel=_kernel(scatter_into, infer_scatter),
        into=scatter_into,
        vjp=_scatter_vjp,
        joint=_scatter_joint,
        batch=_batch_rule("axis"),
        cost=_reduction_cost,
        samples=[
            sample(*[_SAMPLE] * 2, rank=1, axis=1, sizes=(2, 1), reduction="sum", **_FREE),
            sample(*[_SAMPLE] * 3, rank=2, axis=1, sizes=(1, 1, 1), reduction="mean", **_FREE),
        ],
        doc="A rank's part, along an axis, of the sum of all ranks' tensors.",
    )
)

all_gather = register(
    Op(
        "all_gather",
        infer=infer_gather,
        kernel=_kernel(gather_into, infer_gather),
        into=gather_into,
        vjp=_gather_vjp,
        joint=_gather_joint,
        batch=_batch_rule("axis"),
        cost=_copy_cost,
        halves=True,
        samples=[
            sample(_SAMPLE, spec("float32", (4, 2)), rank=0, axis=1),
            sample(*[_SAMPLE] * 3, rank=2, axis=0),
        ],
        doc="All ranks' tensors, joined along an axis, at one rank.",
    )
)

broadcast = register(
    Op(
        "broadcast",
        infer=infer_broadcast,
        kernel=lambda xp, x, rank, count: xp.copy(x),
        into=copy_into,
        vjp=lambda g, y, x, rank, count: (g,),
        joint=_broadcast_joint,
        batch=batching.rows,
        cost=_copy_cost,
        halves=True,
        samples=[sample(_SAMPLE, rank=1, count=2)],
        doc="The tensor of rank 0, at one rank.",
    )
)

all_to_all = register(
    Op(
        "all_to_all",
        infer=infer_exchange,
        kernel=_kernel(exchange_into, infer_exchange),
        into=exchange_into,
        vjp=_exchange_vjp,
        joint=_exchange_joint,
        batch=_batch_rule("split_axis", "concat_axis"),
        cost=_copy_cost,
        halves=True,
        samples=[
            sample(*[spec("float32", (2, 4))] * 2, rank=1, split_axis=1, concat_axis=0,
                   sizes=((2, 2), (2, 2))),
            sample(*[spec("float32", (3, 5))] * 2, rank=0, split_axis=1, concat_axis=1,
                   sizes=((3, 2), (3, 2))),
            sample(*[spec("float32", (3, 2))] * 3, rank=2, split_axis=0, concat_axis=1,
                   sizes=((1, 1, 1),) * 3),
        ],
        doc="The parts, along an axis, that all ranks have for one of them, joined there.",
    )
)  # fmt: skip
