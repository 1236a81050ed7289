from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.passes import optimize
from graphflow.runtime.memory.memory_layout import MemoryLayout, plan_layout
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, Partition, partition
from tests.properties.random_graphs import random_case
from tests.runtime.programs import CPU, OTHER, make_partition, place_nodes

ELSEWHERE = {"constant", "placeholder", "variable", "recv", "send"}
SHAPE = (4, 3)


def layout_of(*fetches: Tensor) -> MemoryLayout:
    return plan_layout(make_partition(*fetches), {"batch": 5})


def variable(name: str, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Tensor:
    return gf.variable(np.ones(shape, dtype), name=name)


def map_deferred_updates(layout: MemoryLayout) -> dict[str, str]:
    """Op to the variable that it updates in place."""
    return {node.op.name: v.node.name for node, v in layout.deferred.items()}


# Updates in place -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        gf.optim.SGD(0.1),
        gf.optim.SGD(0.1, momentum=0.9),
        gf.optim.SGD(0.1, momentum=0.9, nesterov=True),
        gf.optim.Adam(1e-3),
        gf.optim.RMSProp(1e-3),
    ],
    ids=["sgd", "momentum", "nesterov", "adam", "rmsprop"],
)
def test_an_optimisers_last_step_goes_straight_into_the_variable(
    optimizer: gf.optim.Optimizer,
) -> None:
    w = variable("w")
    x = gf.placeholder("float32", (8, 4), name="x")
    train = optimizer.minimize(gf.mean(gf.square(x @ w)), variables=[w])
    graph = optimize(Graph([train]).verify())
    layout = plan_layout(partition(graph, place_nodes(graph))[CPU], {})
    assert "w" in {v.node.name for v in layout.deferred.values()}
    assert not layout.staged


def test_a_final_elementwise_update_is_deferred() -> None:
    v = variable("v")
    layout = layout_of(REGISTRY["group"](gf.assign(v, v - 0.5)), gf.exp(v))
    assert map_deferred_updates(layout) == {"subtract": "v"}


def value_fetched(v: Tensor, w: Tensor) -> list[Tensor]:
    new = v + 1.0
    return [REGISTRY["group"](gf.assign(v, new)), new]


def value_read(v: Tensor, w: Tensor) -> list[Tensor]:
    new = v + 1.0
    return [REGISTRY["group"](gf.assign(v, new)), gf.exp(new)]


def value_twice(v: Tensor, w: Tensor) -> list[Tensor]:
    new = v + 1.0
    return [REGISTRY["group"](gf.assign(v, new), gf.assign(w, new))]


def assigned_read(v: Tensor, w: Tensor) -> list[Tensor]:
    return [gf.exp(gf.assign(v, v + 1.0))]


def value_in_a_group(v: Tensor, w: Tensor) -> list[Tensor]:
    new = v + 1.0
    return [REGISTRY["group"](gf.assign(v, new), new)]


def not_elementwise(v: Tensor, w: Tensor) -> list[Tensor]:
    return [REGISTRY["group"](gf.assign(v, gf.flip(v, 0)))]


def broadcast(v: Tensor, w: Tensor) -> list[Tensor]:
    small = gf.variable(np.ones(3, "float32"), name="small")
    return [REGISTRY["group"](gf.assign(v, small + w), gf.assign(small, small * 2.0), w)]


def peer_that_changes(v: Tensor, w: Tensor) -> list[Tensor]:
    return [REGISTRY["group"](gf.assign(v, v + w), gf.assign(w, gf.flip(w, 0)))]


def alias_of_a_peer_that_changes(v: Tensor, w: Tensor) -> list[Tensor]:
    view = gf.reshape(gf.reshape(w, (12,)), SHAPE)
    return [REGISTRY["group"](gf.assign(v, v + view), gf.assign(w, gf.flip(w, 0)))]


@pytest.mark.parametrize(
    "build",
    [
        value_fetched,
        value_read,
        value_twice,
        assigned_read,
        value_in_a_group,
        not_elementwise,
        broadcast,
        peer_that_changes,
        alias_of_a_peer_that_changes,
    ],
)
def test_an_update_is_not_deferred_where_old_or_new_value_is_read_elsewhere(
    build: Callable[[Tensor, Tensor], list[Tensor]],
) -> None:
    v, w = variable("v"), variable("w")
    layout = layout_of(*build(v, w))
    assert "v" not in map_deferred_updates(layout).values()


def test_a_fetched_update_is_not_deferred() -> None:
    v = variable("v")
    assert (
        map_deferred_updates(layout_of(gf.assign(v, v + 1.0))) == {}
    )  # it is wanted before the step commits


def test_updates_of_integers_are_not_deferred_since_their_kernels_may_refuse() -> None:
    v = variable("v", dtype="int32")
    assert map_deferred_updates(layout_of(REGISTRY["group"](gf.assign(v, gf.pow(v, v))))) == {}


def test_a_peer_that_stays_may_be_read_in_place() -> None:
    v, w = variable("v"), variable("w")
    layout = layout_of(REGISTRY["group"](gf.assign(v, v + w)))
    assert map_deferred_updates(layout) == {"add": "v"}


def test_swapped_variables_are_staged_and_one_that_keeps_its_value_is_not() -> None:
    v, w, u = variable("v"), variable("w"), variable("u")
    to_v, to_w = gf.assign(v, w), gf.assign(w, gf.reshape(gf.reshape(v, (12,)), SHAPE))
    layout = layout_of(REGISTRY["group"](to_v, to_w, gf.assign(u, gf.reshape(u, SHAPE))))
    assert {a.inputs[0].node.name for a in layout.staged} == {"v", "w"}
    assert {a.inputs[0].node.name for a in layout.commits} == {"v", "w", "u"}


def test_a_value_from_a_variable_that_stays_is_not_staged() -> None:
    v, w = variable("v"), variable("w")
    assert layout_of(gf.assign(v, w)).staged == frozenset()


# Sharing memory ---------------------------------------------------------------------------------


def test_a_chain_of_elementwise_nodes_takes_one_block() -> None:
    y = gf.flip(gf.placeholder("float32", (100,), name="x"), 0)
    for _ in range(10):
        y = gf.tanh(y) + 1.0
    assert layout_of(gf.sum(y)).arena.nbytes == 448 + 64


def test_in_place_needs_the_same_spec_and_a_dead_input() -> None:
    x = gf.flip(gf.placeholder("float32", (100,), name="x"), 0)
    y = gf.exp(x)
    other = gf.flip(x, 0)
    part = make_partition(gf.flip(y, 0), other)  # x is read after y is made
    layout = plan_layout(part, {})
    (exp,) = part.graph.of_op("exp")
    assert layout.offset(exp.outputs[0]) != layout.offset(exp.inputs[0])
    halved = layout_of(gf.astype(x, "float16"))  # another size
    assert len(set(halved.blocks.values())) == 2


def spans(part: Partition, layout: MemoryLayout) -> list[tuple[int, int, int, int, Tensor]]:
    """Offset, end, birth and last reader of each tensor in the arena, found independently."""
    nodes = part.graph.nodes
    position = {node: i for i, node in enumerate(nodes)}
    position.update({node: position[f.last] for node, f in layout.regions.items()})
    end = len(nodes)
    late = set(part.fetches.values())
    for node in nodes:
        if node.op.name in ("send", "assign") or node in layout.deferred:
            late.update(node.inputs)
    result = []
    for root in layout.blocks:
        family = [t for n in nodes for t in n.outputs if layout.roots[t] is root] or [root]
        death = position[root.node]
        for member in family:
            readers = part.graph.consumers[member.node]
            death = max([death, *(position[r] for r in readers if member in set(r.inputs))])
            death = end if member in late else death
        if root.node in layout.staged:
            death = end
        offset = layout.offset(root)
        nbytes = int(np.prod(layout.specs[root].shape)) * layout.specs[root].dtype.itemsize
        result.append((offset, offset + nbytes, position[root.node], death, root))
    return result


def may_take_over(node: Node, before: Tensor, layout: MemoryLayout) -> bool:
    """Whether the node's result may lie in the memory of one of its inputs."""
    fused = layout.regions.get(node)
    if fused is not None:
        (ways,) = (
            w for w, t in zip(fused.result_axes, fused.results, strict=True) if t.node is node
        )
        pairs = zip(fused.operands, fused.region.operands, strict=True)
        seen = [(t, o.axes) for t, o in pairs if layout.roots[t] is before]
        long = [n != 1 for n in fused.sizes]
        return len(seen) == 1 and all(
            t.spec == node.outputs[0].spec
            and all(a == b for a, b, matters in zip(axes, ways, long, strict=True) if matters)
            for t, axes in seen
        )
    read = [t for t in node.inputs if layout.roots[t] is before]
    in_place = node.op.in_place and len(read) == 1 and read[0] is node.inputs[0]
    return (
        (node.op.elementwise or in_place)
        and bool(read)
        and all(layout.specs[t] == layout.specs[node.outputs[0]] for t in read)
    )


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=40)
def test_no_tensor_is_overwritten_while_it_is_still_to_be_read(seed: int, two: bool) -> None:
    graph = random_case(seed, nodes=15).graph
    rng = np.random.default_rng(seed)
    devices: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op.name == "assign":
            devices[node] = devices[node.inputs[0].node]
        elif node.op.name not in UNPLACED_OPS:
            devices[node] = OTHER if two and rng.random() < 0.5 else CPU
    for part in partition(graph, devices).values():
        layout = plan_layout(part, {"batch": 5})
        lives = spans(part, layout)
        for i, (start, end, birth, death, tensor) in enumerate(lives):
            assert end <= layout.arena.nbytes
            for other_start, other_end, other_birth, other_death, other in lives[:i]:
                apart = end <= other_start or other_end <= start
                one_after_the_other = death < other_birth or other_death < birth
                handed_over = (
                    death == other_birth and may_take_over(other.node, tensor, layout)
                ) or (other_death == birth and may_take_over(tensor.node, other, layout))
                assert apart or one_after_the_other or handed_over, (tensor, other)


def test_every_tensor_has_a_place() -> None:
    part = make_partition(*random_case(3).fetches)
    layout = plan_layout(part, {"batch": 5})
    for node in part.graph.nodes:
        for tensor in node.outputs:
            root = layout.roots[tensor]
            somewhere_else = root.node.op.name in ELSEWHERE or root.node in layout.deferred
            fused = layout.regions.get(root.node)
            somewhere_else |= fused is not None and not any(root is t for t in fused.results)
            assert somewhere_else or root in layout.blocks


def test_a_long_chain_is_laid_out_in_time_proportional_to_it() -> None:
    y = gf.placeholder("float32", (2,), name="x")
    for _ in range(20_000):  # would take minutes if each node looked at all before it
        y = gf.tanh(y)
    assert layout_of(y).arena.nbytes == 64
