"""The translations, one family a file. Importing this package fills the registry."""

from graphflow.onnx.operators import (
    activation,
    control,
    convolution,
    elementwise,
    index,
    normalization,
    pooling,
    product,
    quantize,
    random,
    recurrent,
    reduction,
    shape,
    signal,
    training,
    vision,
)

__all__ = [
    "activation",
    "control",
    "convolution",
    "elementwise",
    "index",
    "normalization",
    "pooling",
    "product",
    "quantize",
    "random",
    "recurrent",
    "reduction",
    "shape",
    "signal",
    "training",
    "vision",
]
