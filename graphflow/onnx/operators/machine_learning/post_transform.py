"""The attribute `post_transform` of `ai.onnx.ml`: from scores to probabilities."""

from __future__ import annotations

import math

from graphflow.ir.op import Tensor
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.ops.pointwise import activations, arithmetic, comparison, select, transcendental
from graphflow.ops.reductions import extrema, reduce
from graphflow.ops.reductions.softmax import softmax

_NAMES = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def apply_post_transform(call: NodeCall, scores: Tensor, how: str | int) -> Tensor:
    """Transform scores (rows, classes) by a transformation of a name or a number."""
    if isinstance(how, int):
        how = _NAMES[how] if 0 <= how < len(_NAMES) else str(how)
    if how == "NONE":
        return scores
    if how == "SOFTMAX":
        result: Tensor = softmax(scores, -1)
        return result
    if how == "LOGISTIC":
        between: Tensor = activations.sigmoid(scores)
        return between
    if how == "SOFTMAX_ZERO":
        return _softmax_zero(scores)
    if how == "PROBIT":
        return _probit(scores)
    raise call.unsupported_error(f"post_transform {how!r}; it is one of {', '.join(_NAMES)}")


def _softmax_zero(x: Tensor) -> Tensor:
    """Compute a softmax in which zeros stay zeros; rows of zeros become 0.5."""
    most = extrema.max(x, axis=-1, keepdims=True)
    parts = select.where(
        comparison.greater(arithmetic.abs(x), 1e-7),
        transcendental.exp(x - most),
        x * transcendental.exp(-most),
    )
    total = reduce.sum(parts, axis=-1, keepdims=True)
    none = comparison.equal(total, 0)
    return select.where(none, 0.5, parts / select.where(none, 1.0, total))


def _probit(x: Tensor) -> Tensor:
    """Compute √2·erf⁻¹(2x - 1), with an error below 2e-3.

    Source: Winitzki, "A handy approximation for the error function and its inverse", 2008.
    """
    a = 0.147
    y = x * 2 - 1
    inner = (1 - y) * (1 + y)
    log = transcendental.log(select.where(comparison.equal(inner, 0), 1.0, inner))
    half = 2 / (math.pi * a) + log * 0.5
    root = transcendental.sqrt(transcendental.sqrt(half * half - log / a) - half)
    result: Tensor = arithmetic.sign(y) * root * math.sqrt(2)
    return result
