"""The outer optimiser of LocalSGD: from the mean difference of replicas to the next parameters.

θ ← outer(θ, mean over k of (θ − θ_k)): the difference takes the place of a gradient. The step is
built once, as a graph of its own, and written at each device, so that all replicas compute the same
bits and nothing of it travels.

Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021; Douillard et al., "DiLoCo",
    arXiv:2311.08105.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphflow import init
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.optim import SGD, Optimizer
from graphflow.parallel.local_training.replica_unroller import ReplicaUnroller
from graphflow.parallel.local_training.turn_copy import TurnCopy

Values = Mapping[Node, Sequence[Tensor]]
"""For each parameter, its value at each device of each replica."""


class OuterStep(NamedTuple):
    """The outer step of some parameters, as a graph.

    Attributes:
        references: for each parameter, the variable that holds θ.
        differences: for each parameter, the placeholder of the mean difference.
        graph: the updates of the references, and of the optimiser's slots.
    """

    references: Mapping[Node, Node]
    differences: Mapping[Node, Node]
    graph: Graph

    def take(self, unroller: ReplicaUnroller, differences: Values) -> None:
        """Write the step at each device. The references have the new values then.

        Args:
            unroller: has the current values.
            differences: the mean differences of the parameters.
        """
        owner = {node: parameter for parameter, node in self.differences.items()}
        made: dict[tuple[Node, int], Tensor] = {}
        for place, device in enumerate(unroller.owners):
            name = unroller.mesh.tag(unroller.mesh.places[place])[1:]
            copy = TurnCopy({}, f"outer/{name}/", device, 0, {}, unroller.rank)
            mapped: dict[Tensor, Tensor] = {}
            for node in self.graph.nodes:
                match node.op.name:
                    case "constant":
                        mapped[node.outputs[0]] = node.outputs[0]
                    case "placeholder":
                        mapped[node.outputs[0]] = differences[owner[node]][place]
                    case "variable":
                        mapped[node.outputs[0]] = unroller.current[node][place]
                    case "assign":
                        value = mapped[node.outputs[0]] = mapped[node.inputs[1]]
                        made[node.inputs[0].node, place] = value
                    case "group":
                        pass
                    case _:
                        own = copy.rebuild(node, tuple(mapped[t] for t in node.inputs))
                        mapped.update(zip(node.outputs, own.outputs, strict=True))
        for (variable, place), value in made.items():
            unroller.current[variable][place] = value


def build_outer_step(outer: Optimizer, parameters: Sequence[Node]) -> OuterStep:
    """Return the outer step of some parameters."""
    references, differences = {}, {}
    for node in parameters:
        spec = node.specs[0]
        shape = tuple(int(size) for size in spec.shape)
        references[node] = REGISTRY["variable"](
            initial=init.zeros(shape, spec.dtype), trainable=False, shape=shape,
            dtype=spec.dtype.name, named=False, name=f"outer/{node.name}",
        ).node  # fmt: skip
        differences[node] = REGISTRY["placeholder"](
            shape=shape, dtype=spec.dtype.name, name=f"outer/{node.name}/difference"
        ).node
    group = outer.apply(
        [differences[v].outputs[0] for v in parameters],
        [references[v].outputs[0] for v in parameters],
    )
    return OuterStep(references, differences, Graph([group]))


def is_averaging(outer: Optimizer | None) -> bool:
    """Return True if an outer step gives the mean of replicas, which needs no θ."""
    if outer is None:
        return True
    if not isinstance(outer, SGD) or outer.momentum or outer.weight_decay:
        return False
    return not isinstance(outer.lr, Tensor) and outer.lr == 1


__all__ = ["OuterStep", "build_outer_step", "is_averaging"]
