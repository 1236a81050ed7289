"""The op families. Importing this package fills the registry."""

from graphflow.ops import (
    activations,
    comm,
    control,
    complex,
    convert,
    creation,
    debug,
    decompose,
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
    singular,
    softmax,
    solve,
    state,
    transcendental,
    window,
)

__all__ = [
    "activations", "comm", "control", "complex", "convert", "creation", "debug", "decompose", "einsum", "elementwise", "extrema",
    "getitem", "index", "linalg", "nn", "norm", "product", "random", "reduce", "select", "shape",
    "singular", "softmax", "solve", "state", "transcendental", "window",
]  # fmt: skip
