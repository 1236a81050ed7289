"""Operators of neural networks and images."""

from graphflow.onnx.operators.networks import (
    activation,
    attention,
    convolution,
    normalization,
    pooling,
    recurrent,
    training,
    vision,
)

__all__ = [
    "activation",
    "attention",
    "convolution",
    "normalization",
    "pooling",
    "recurrent",
    "training",
    "vision",
]
