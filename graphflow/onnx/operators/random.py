"""Random numbers. The standard specifies no generator; ours draws new numbers in each step.

With a `seed`, a model draws the same numbers after each load.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from graphflow.ir.op import Tensor
from graphflow.ir.spec import Shape
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.ops.ordering.search import searchsorted
from graphflow.ops.pointwise import arithmetic
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.randomness import random
from graphflow.ops.randomness.probabilities import categorical_logits
from graphflow.ops.reductions import cumulative as product
from graphflow.ops.reductions.softmax import softmax
from graphflow.ops.tensors.creation import arange
from graphflow.ops.tensors.shape import expand_dims, reshape
from graphflow.ops.tensors.slicing import window


def _seed_scope(call: NodeCall) -> Any:
    """Seed our generator with the bits of the seed, a float; without one, change nothing."""
    seed = call.attr("seed")
    if seed is None:
        return nullcontext()
    return random.seed(int(struct.unpack("<I", struct.pack("<f", seed))[0]))


def _uniform(call: NodeCall, shape: Shape, dtype: Any) -> Tensor:
    return random.uniform(shape, call.attr("low", 0.0), call.attr("high", 1.0), dtype)


def _normal(call: NodeCall, shape: Shape, dtype: Any) -> Tensor:
    return random.normal(shape, call.attr("mean", 0.0), call.attr("scale", 1.0), dtype)


def _register_draw(name: str, draw: Callable[[NodeCall, Shape, Any], Tensor]) -> None:
    @operator(name)
    def of_shape(call: NodeCall) -> Outputs:
        with _seed_scope(call):
            return draw(call, tuple(call.required_attr("shape")), call.dtype("dtype", 1))

    @operator(f"{name}Like")
    def like(call: NodeCall) -> Outputs:
        code = call.attr("dtype")
        dtype = call.spec(0).dtype if code is None else call.dtype_of(code)
        with _seed_scope(call):
            return draw(call, call.spec(0).shape, dtype)


_register_draw("RandomUniform", _uniform)
_register_draw("RandomNormal", _normal)


@operator("Bernoulli")
def _bernoulli(call: NodeCall) -> Outputs:
    p = call.tensor(0)
    code = call.attr("dtype")
    with _seed_scope(call):
        return astype(random.bernoulli(p), p.dtype if code is None else call.dtype_of(code))


@operator("Multinomial")
def _multinomial(call: NodeCall) -> Outputs:
    """Draw classes: search uniform numbers in the running sums of probabilities.

    Row i of the sums is shifted to [i, i + 1), so one search serves all rows. Uniform numbers of 24
    bits stay exact in float64.
    """
    scores = call.tensor(0)
    rows, classes = scores.shape
    count = call.attr("sample_size", 1)
    checked = astype(categorical_logits(scores, axis=1), "float64")
    sums = product.cumsum(softmax(checked, -1), 1)
    sums = sums / window(sums, 1, classes - 1, 1)
    unit = expand_dims(astype(arange(rows), "float64"), 1)
    with _seed_scope(call):
        drawn = astype(random.uniform((rows, count)), "float64")
    found = searchsorted(reshape(sums + unit, (-1,)), drawn + unit, side="right")
    chosen = arithmetic.subtract(found, expand_dims(arange(rows) * classes, 1))
    return astype(chosen, call.dtype("dtype", 6))
