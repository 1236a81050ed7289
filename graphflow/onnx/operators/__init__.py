"""Translations of ONNX operators to ops. Importing this package fills the operator registry."""

from graphflow.onnx.operators import (
    control,
    elementwise,
    index,
    machine_learning,
    networks,
    product,
    quantize,
    random,
    reduction,
    shape,
    signal,
)

__all__ = [
    "control",
    "elementwise",
    "index",
    "machine_learning",
    "networks",
    "product",
    "quantize",
    "random",
    "reduction",
    "shape",
    "signal",
]
