"""The op families. Importing this package fills the registry."""

from graphflow.ops import comm, elementwise, state

__all__ = ["comm", "elementwise", "state"]

from graphflow.ops import creation, einsum, getitem, index, linalg, shape, window

__all__ += ["creation", "einsum", "getitem", "index", "linalg", "shape", "window"]

from graphflow.ops import activations, convert, debug, extrema, nn, norm, product, random, reduce
from graphflow.ops import select, softmax, transcendental

__all__ += ["activations", "convert", "debug", "extrema", "nn", "norm", "product", "random"]
__all__ += ["reduce", "select", "softmax", "transcendental"]
