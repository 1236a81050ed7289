"""The translations, one family a file. Importing this package fills the registry."""

from graphflow.onnx.operators import (
    activation,
    control,
    elementwise,
    index,
    product,
    reduction,
    shape,
)

__all__ = [
    "activation", "control", "elementwise", "index", "product", "reduction", "shape",
]  # fmt: skip
