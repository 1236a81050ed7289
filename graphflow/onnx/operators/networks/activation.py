"""Activations and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphflow.ir.op import Tensor
from graphflow.ir.spec import product
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.onnx.operators.shape import axis_of
from graphflow.ops.networks import piecewise_activations as piecewise
from graphflow.ops.pointwise import activations, rectifiers
from graphflow.ops.pointwise.transcendental import exp
from graphflow.ops.reductions import extrema, reduce, softmax
from graphflow.ops.tensors.shape import expand_dims, reshape


def _register_plain(name: str, function: Callable[[Any], Tensor]) -> None:
    @operator(name)
    def translate(call: NodeCall) -> Outputs:
        return function(call.tensor(0))


for _name, _function in {
    "Sigmoid": activations.sigmoid, "Softplus": activations.softplus,
    "Softsign": activations.softsign, "Mish": activations.mish,
    "HardSwish": piecewise.hard_swish, "Relu": rectifiers.relu,
}.items():  # fmt: skip
    _register_plain(_name, _function)


def _register_parametric(name: str, function: Callable[..., Tensor], **defaults: Any) -> None:
    """Register an activation whose attributes are the function's arguments, in order."""

    @operator(name)
    def translate(call: NodeCall) -> Outputs:
        arguments = [call.attr(key, default) for key, default in defaults.items()]
        return function(call.tensor(0), *arguments)


_register_parametric("LeakyRelu", rectifiers.leaky_relu, alpha=0.01)
_register_parametric("Elu", rectifiers.elu, alpha=1.0)
_register_parametric("Celu", rectifiers.celu, alpha=1.0)
_register_parametric(
    "Selu", rectifiers.selu, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875
)
_register_parametric("Swish", activations.swish, alpha=1.0)
_register_parametric("ThresholdedRelu", piecewise.thresholded_relu, alpha=1.0)
_register_parametric("HardSigmoid", piecewise.hard_sigmoid, alpha=0.2, beta=0.5)
_register_parametric("Shrink", piecewise.shrink, lambd=0.5, bias=0.0)


@operator("Gelu")
def _gelu(call: NodeCall) -> Outputs:
    tanh = call.attr("approximate", "none") == "tanh"
    return activations.gelu(call.tensor(0), approximate="tanh" if tanh else None)


@operator("PRelu")
def _prelu(call: NodeCall) -> Outputs:
    x, slope = call.tensor(0), call.tensor(1)
    if call.version < 7 and slope.ndim == 1 and slope.shape[0] != 1:
        slope = expand_dims(slope, tuple(range(1, x.ndim - 1)))
    return piecewise.prelu(x, slope)


@operator("Softmax", since=13)
def _softmax(call: NodeCall) -> Outputs:
    """Translate Softmax; for float16, round after each step as the function in ONNX's schema."""
    x = call.tensor(0)
    axis = axis_of(call, -1, x.ndim)
    if x.dtype != "float16":
        return softmax.softmax(x, axis)
    parts = exp(x - extrema.max(x, axis=axis, keepdims=True))
    return parts / reduce.sum(parts, axis=axis, keepdims=True)


@operator("LogSoftmax", since=13)
def _log_softmax(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    return softmax.log_softmax(x, axis_of(call, -1, x.ndim))


@operator("Hardmax", since=13)
def _hardmax(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    return piecewise.hardmax(x, axis_of(call, -1, x.ndim))


def _register_flattened(name: str, function: Callable[..., Tensor]) -> None:
    """Register an operator of opsets before 13, where all axes from `axis` on count as one."""

    @operator(name)
    def translate(call: NodeCall) -> Outputs:
        x = call.tensor(0)
        axis = axis_of(call, 1, x.ndim)
        rows = reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))
        return reshape(function(rows, -1), x.shape)


_register_flattened("Softmax", softmax.softmax)
_register_flattened("LogSoftmax", softmax.log_softmax)
_register_flattened("Hardmax", piecewise.hardmax)
