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
    recurrent,
    reduction,
    shape,
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
    "recurrent",
    "reduction",
    "shape",
    "vision",
]
