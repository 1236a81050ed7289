"""What each ONNX operator is in ops of ours. Importing this package fills the registry."""

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
