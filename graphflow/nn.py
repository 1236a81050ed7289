"""`gf.nn`: what networks are made of."""

from __future__ import annotations

from graphflow.ops.activations import elu, gelu, leaky_relu, relu, sigmoid, silu, softplus
from graphflow.ops.nn import dropout
from graphflow.ops.norm import layer_norm
from graphflow.ops.softmax import cross_entropy, log_softmax, softmax
from graphflow.ops.transcendental import tanh

__all__ = [
    "cross_entropy",
    "dropout",
    "elu",
    "gelu",
    "layer_norm",
    "leaky_relu",
    "log_softmax",
    "relu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "tanh",
]
