"""A GPT in numbers, and the cost of its parts on a device.

    GPT ─block_cost, head_cost→ graphs of abstract weights ─planned on one device→ BlockCost

Weights are declared and never allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from math import ceil

import graphflow.init as init
from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, ScheduleError
from graphflow.frontend.builders import placeholder, variable
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.ir.spec import nbytes
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.passes import optimize
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.building.outlook import outlook
from graphflow.transforms.reverse_mode import gradients


@checks_arguments(ArgumentError)
@dataclass(frozen=True)
class GPT:
    """The sizes of a GPT.

    Args:
        layers: the number of blocks.
        width: the elements of a token.
        heads: the heads of attention.
        sequence: the tokens of a sample.
        vocabulary: the rows of the embedding, which is also the head.
        fused: whether attention keeps its scores on the chip, as kernels have done since 2022.
            Otherwise they go through memory, as in the systems whose figures were published before.
    """

    layers: int
    width: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200
    fused: bool = True

    def __post_init__(self) -> None:
        where = f"GPT at {user_location()}"
        for each in fields(self)[:-1]:
            set_frozen_fields(
                self, **{each.name: check_count(where, each.name, getattr(self, each.name))}
            )
        if not isinstance(self.fused, bool):
            raise ScheduleError(f"{where}: fused must be True or False, not {self.fused!r}")
        if self.width % self.heads:
            raise ScheduleError(
                f"{where}: a width of {self.width} does not divide into {self.heads} heads"
            )

    @property
    def weights(self) -> int:
        """The number of weights."""
        return self.layers * self.weights_of_a_block + self.weights_of_the_ends

    @property
    def weights_of_a_block(self) -> int:
        """The weights of attention, the two products after it, biases and norms."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def weights_of_the_ends(self) -> int:
        """The weights of the token and position embeddings. The last stage of a pipeline has those
        of tokens once more."""
        return (self.vocabulary + self.sequence) * self.width

    def flops(self, batch: int, recompute: bool = False) -> float:
        """Return the floating point operations of the matrix products in a training step."""
        h, s, layers = self.width, self.sequence, self.layers
        forward = layers * (24 * batch * s * h * h + 4 * batch * s * s * h)
        head = 2 * batch * s * h * self.vocabulary
        return (4.0 if recompute else 3.0) * forward + 3.0 * head


def check_count(where: str, what: str, number: object) -> int:
    """Return a count as an int.

    Raises:
        ScheduleError: it is no int of at least 1.
    """
    count = as_count(number)
    if count is None:
        raise ScheduleError(f"{where}: {what} must be an int of at least 1, not {number!r}")
    return count


# Costs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockCost:
    """The cost of a part of a network for one micro-batch.

    Attributes:
        forward, backward: the seconds of each pass.
        activations: the bytes that the backward pass reads.
    """

    forward: float
    backward: float
    activations: float


@cache
def block_cost(
    model: GPT, hardware: str, tensor: int, micro: int, sequence: bool = False
) -> BlockCost:
    """Return the cost of one block, or of the part that one of `tensor` devices has.

    Args:
        model: the GPT.
        hardware: the product's name.
        tensor: the tensor-parallel devices.
        micro: samples of a micro-batch.
        sequence: whether norms and residual sums are split along tokens. Products then read the
            gathered tokens of all devices, which are not kept.
    """
    h, own = model.width, model.width // tensor
    heads, s = model.heads // tensor, model.sequence
    x = placeholder("float16", (micro, ceil(s / tensor) if sequence else s, h), name="x")
    weights: list[Tensor] = []
    made: list[Tensor] = []  # sent to other devices
    got: list[Tensor] = []  # received from them

    def weight(*shape: int) -> Tensor:
        weights.append(variable(init.zeros(shape, "float16")))
        return weights[-1]

    def exchange(mine: Tensor, tokens: int) -> Tensor:
        if not sequence:
            return mine
        made.append(mine)
        got.append(placeholder("float16", (micro, tokens, h), name=f"got{len(got)}"))
        return got[-1]

    def normalize(y: Tensor) -> Tensor:
        return exchange(FUNCTIONS["layer_norm"](y, weight(h), weight(h)), s)

    def add_residual(y: Tensor, part: Tensor) -> Tensor:
        sums: Tensor = y + exchange(part, int(y.shape[1])) + weight(h)
        return sums

    n = normalize(x)
    q, k, v = (_split_heads(n @ weight(h, own) + weight(own), heads) for _ in range(3))
    seen = FUNCTIONS["permute_dims"](_attention(model, q, k, v), (0, 2, 1, 3))
    seen = FUNCTIONS["reshape"](seen, (micro, s, own))
    y = add_residual(x, seen @ weight(own, h))
    n = normalize(y)
    up = FUNCTIONS["gelu"](n @ weight(h, 4 * own) + weight(4 * own))
    y = add_residual(y, up @ weight(4 * own, h))
    return _graph_cost([y, *made], [x, *got, *weights], hardware, dict.fromkeys(got, tensor))


@cache
def head_cost(model: GPT, hardware: str, tensor: int, micro: int) -> BlockCost:
    """Return the cost of the last product and the loss, for a part of the vocabulary."""
    x = placeholder("float16", (micro * model.sequence, model.width), name="x")
    table = variable(init.zeros((model.width, ceil(model.vocabulary / tensor)), "float16"))
    scores = x @ table
    top = FUNCTIONS["log_softmax"](scores.astype("float32"))
    return _graph_cost([FUNCTIONS["mean"](top)], [x, table], hardware)


def _attention(model: GPT, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention as one kernel, or by way of its scores."""
    if model.fused:
        fused: Tensor = FUNCTIONS["attention"](q, k, v, causal=True)
        return fused
    scaled = q * int(q.shape[-1]) ** -0.5
    scores = scaled @ FUNCTIONS["permute_dims"](k, (0, 1, 3, 2))  # the softmax kernel masks
    seen: Tensor = FUNCTIONS["softmax"](scores) @ v
    return seen


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Move the heads of (batch, tokens, width) in front of the tokens."""
    b, s, width = x.shape
    cut = FUNCTIONS["reshape"](x, (b, s, heads, width // heads))
    turned: Tensor = FUNCTIONS["permute_dims"](cut, (0, 2, 1, 3))
    return turned


def _graph_cost(
    ys: list[Tensor], xs: list[Tensor], hardware: str, shares: Mapping[Tensor, int] | None = None
) -> BlockCost:
    """Return the cost of a graph on one device.

    Args:
        ys: the results.
        xs: the inputs and weights.
        hardware: the product's name.
        shares: for activations that are split over devices, into how many parts; default: whole.
    """
    seeds = [placeholder(y.dtype, y.shape, name=f"seed{i}") for i, y in enumerate(ys) if y.ndim]
    one = Cluster.hypothetical(1, hardware)
    forward = optimize(Graph(ys))
    whole = optimize(Graph([*ys, *gradients(ys, xs, seeds or None)]))

    def seconds(graph: Graph) -> float:
        return outlook(graph, one, {}, "single").seconds

    ahead = seconds(forward)
    inside = set(Graph(whole.outputs[: len(ys)]).nodes)
    kept = {
        _view_source(t)
        for node in whole.nodes
        if node not in inside
        for t in node.inputs
        if t.node in inside
    }
    size = sum(
        nbytes(t.spec) / (shares or {}).get(t, 1)
        for t in kept
        if t.node.op.name not in ("variable", "constant")
    )
    return BlockCost(ahead, seconds(whole) - ahead, float(size))


def _view_source(tensor: Tensor) -> Tensor:
    """Return the tensor that reshapes are views of."""
    while tensor.node.op.name == "reshape":
        tensor = tensor.node.inputs[0]
    return tensor
