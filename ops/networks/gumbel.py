"""`gf.nn.gumbel_softmax`: choices of classes with a gradient."""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import normalize_axis, require_kind
from graphflow.ops.networks.losses.losses import require_positive
from graphflow.ops.pointwise.convert import stop_gradient
from graphflow.ops.pointwise.transcendental import log
from graphflow.ops.randomness.random import uniform
from graphflow.ops.reductions.extrema import argmax
from graphflow.ops.reductions.softmax import softmax
from graphflow.ops.tensors.take import one_hot


@composite("logits", to="high")
@function
def gumbel_softmax(
    logits: Any, temperature: float = 1.0, hard: bool = False, axis: int = -1
) -> Tensor:
    """Draw shares of classes with probabilities softmax(logits), anew in each step.

    They are softmax((logits + Gumbel noise) / temperature): nearly one class at low temperatures,
    equal shares at high ones. The gradient flows to the logits.

    Args:
        logits: floats.
        temperature: a positive number.
        hard: give 1 to the class with the largest share, 0 to others. The gradient stays that of
            the shares.
        axis: the axis of the classes.

    Returns:
        Floats of the shape and dtype of the logits, which add up to 1 along the axis.

    Raises:
        DTypeError: the logits are not float.
        ShapeError: axis is outside the logits.
        ArgumentError: temperature is not a positive number.

    Source: Jang, Gu and Poole, Categorical Reparameterization with Gumbel-Softmax, ICLR 2017.
    """
    x = as_tensor(logits)
    require_kind(x.spec, "float")
    at = normalize_axis(axis, x.ndim)
    temperature = require_positive("gumbel_softmax", "temperature", temperature)
    noise = -log(-log(uniform(x.shape, dtype="float64")))
    shares = softmax((x + FUNCTIONS["astype"](noise, x.dtype)) / temperature, axis=at)
    if not hard:
        return shares
    chosen = FUNCTIONS["moveaxis"](one_hot(argmax(shares, axis=at), x.shape[at], x.dtype), -1, at)
    result: Tensor = chosen + (shares - stop_gradient(shares))
    return result


__all__ = ["gumbel_softmax"]
