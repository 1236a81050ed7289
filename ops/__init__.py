"""The op families. Importing this package fills the registry."""

from graphflow.ops import elementwise, state

__all__ = ["elementwise", "state"]

from graphflow.ops import creation, einsum, getitem, index, linalg, shape, window

__all__ += ["creation", "einsum", "getitem", "index", "linalg", "shape", "window"]
