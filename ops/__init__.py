"""The op families. Importing this package fills the registry."""

from graphflow.ops import (
    activations,
    comm,
    convert,
    creation,
    debug,
    einsum,
    elementwise,
    extrema,
    getitem,
    index,
    linalg,
    nn,
    norm,
    product,
    random,
    reduce,
    select,
    shape,
    softmax,
    state,
    transcendental,
    window,
)

__all__ = [
    "activations", "comm", "convert", "creation", "debug", "einsum", "elementwise", "extrema",
    "getitem", "index", "linalg", "nn", "norm", "product", "random", "reduce", "select", "shape",
    "softmax", "state", "transcendental", "window",
]  # fmt: skip
