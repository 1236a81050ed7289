"""The linear model behind a training step: predictions = features @ weights, and a loss of these.

    loss ─find_linear_model→ LinearModel: features, weights, predictions, slopes, curvature

A block method needs these parts, since it computes X_bᵀ · slopes for some columns b at a time, and
keeps the predictions up to date.
"""

from __future__ import annotations

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, Node, Tensor
from graphflow.transforms.reverse_mode import gradients


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A loss of `features @ weights`.

    Attributes:
        weights: the variable, (columns,) or (columns, outputs).
        features: (examples, columns).
        predictions: (examples,) or (examples, outputs).
        slopes: the gradient of the loss by the predictions.
        rate: γ, the rate of the SGD that minimises the loss.
        curvature: a bound on the second derivative of the loss by each prediction: a number, or a
            tensor of the shape of the predictions.
    """

    weights: Tensor
    features: Tensor
    predictions: Tensor
    slopes: Tensor
    rate: Tensor
    curvature: Tensor | float

    @property
    def columns(self) -> int:
        """The number of columns of the features."""
        return int(self.weights.shape[0])


def find_linear_model(
    step: Node, weights: Tensor, gradient: Tensor, curvature: float | None
) -> LinearModel:
    """Return the linear model that a training step trains.

    Args:
        step: the group that `minimize` returned.
        weights: the variable that it trains.
        gradient: the gradient by it.
        curvature: a bound on the second derivative of the loss by each prediction; None: found.

    Raises:
        ShardingError: the loss depends on the weights other than by one product; the update is not
            that of plain SGD; the second derivative depends on predictions and no bound is given.
    """
    loss: Tensor = step.attrs["loss"]
    features, predictions = _find_product(loss, weights)
    (slopes,) = gradients(loss, [predictions])
    rate = _find_rate(step, weights, gradient)
    found = _find_curvature(slopes, predictions) if curvature is None else curvature
    return LinearModel(weights, features, predictions, slopes, rate, found)


def _find_product(loss: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features and the predictions of a loss.

    Raises:
        ShardingError: the weights are read otherwise than by one product features @ weights.
    """
    forward = Graph([loss])
    own = weights
    readers = forward.consumers[own.node]
    expanded = len(readers) == 1 and readers[0].op.name == "expand_dims"
    if expanded:
        own = readers[0].outputs[0]
        readers = forward.consumers[own.node]
    product = readers[0]
    if len(readers) != 1 or not _is_product(product, own):
        others = ", ".join(f"{node.name!r} (made at {node.location})" for node in readers)
        raise ShardingError(
            f"the loss must read {weights.name!r} (made at {weights.node.location}) by one product "
            f"features @ {weights.name}, with features of shape (examples, columns), and it is "
            f"read by {others}; a penalty goes into penalty=, such as gf.linear.L2(0.1)"
        )
    predictions = product.outputs[0]
    after = forward.consumers[product]
    if expanded and len(after) == 1 and after[0].op.name == "squeeze":
        predictions = after[0].outputs[0]
    return product.inputs[0], predictions


def _is_product(node: Node, weights: Tensor) -> bool:
    """Return True if a node multiplies a matrix by weights."""
    if node.op.name != "matmul" or any(node.attrs.values()):
        return False
    left, right = node.inputs
    return right is weights and left.ndim == 2


def _find_rate(step: Node, weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the rate of the SGD that updates the weights.

    Raises:
        ShardingError: the update is another one than weights − rate · gradient.
    """
    for assign in (t.node for t in step.inputs):
        if assign.op.name != "assign" or assign.inputs[0] is not weights:
            continue
        value = assign.inputs[1].node
        moved = value.inputs[1].node if value.op.name == "subtract" else value
        if moved.op.name == "multiply" and value.inputs[0] is weights:
            first, second = moved.inputs
            if first is gradient or second is gradient:
                return second if first is gradient else first
    raise ShardingError(
        f"a block method takes the steps of plain descent, and {step.name!r} (made at "
        f"{step.location}) updates {weights.name!r} in another way; write "
        "gf.optim.SGD(rate).minimize(loss, strategy=…), without momentum, weight_decay or "
        "transform"
    )


def _find_curvature(slopes: Tensor, predictions: Tensor) -> Tensor:
    """Return the second derivative of a loss that is quadratic in each prediction.

    Raises:
        ShardingError: it depends on the predictions, or a prediction changes the slope of another.
    """
    name = f"{predictions.name!r} (made at {predictions.node.location})"
    remedy = (
        "give curvature=, a bound on the eigenvalues of the second derivative, such as 0.25 for a "
        "sum of logistic losses, and 0.25 / examples for their mean"
    )
    reached = {predictions.node}
    for node in Graph([slopes]).nodes:
        if node not in reached and any(t.node in reached for t in node.inputs):
            reached.add(node)
            if not (node.op.elementwise and node.specs[0].shape == predictions.shape):
                raise ShardingError(
                    f"the slope of the loss by a prediction in {name} may depend on other "
                    f"predictions, by {node.name!r} (made at {node.location}); {remedy}"
                )
    (second,) = gradients(FUNCTIONS["sum"](slopes), [predictions])
    if predictions.node in Graph([second]).nodes:
        raise ShardingError(
            f"the second derivative of the loss by the predictions {name} depends on them, so no "
            f"bound of it is known; {remedy}"
        )
    return second


__all__ = ["LinearModel", "find_linear_model"]
