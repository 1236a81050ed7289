"""Variables with a row for each replica, in a session with another number of replicas than the
checkpoint's."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.init import ReplicaRows
from graphflow.ir.op import Node
from graphflow.runtime.checkpoint.manifest import Signature
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray

Array = np.ndarray[Any, Any]


def differs_in_rows(node: Node, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return True if a value has other rows than a variable with a row for each replica, and is
    like it otherwise."""
    own = node.specs[0]
    return (
        isinstance(node.attrs["initial"], ReplicaRows)
        and dtype == own.dtype.name
        and shape != own.shape
        and shape[1:] == own.shape[1:]
        and shape[:1] > (0,)
    )


def is_loadable(node: Node, signature: Signature | None) -> bool:
    """Return True if a value of this dtype and shape can be loaded into a variable."""
    if signature is None:
        return False
    spec = node.specs[0]
    return signature == (spec.dtype.name, spec.shape) or differs_in_rows(node, *signature)


def fit_rows(node: Node, value: Array | LazyArray) -> Array | LazyArray:
    """Return a loaded value with as many rows as the variable has replicas (see `ReplicaRows`)."""
    if differs_in_rows(node, value.dtype.name, value.shape):
        fitted: Array = node.attrs["initial"].fit_rows(np.asarray(value))
        return fitted
    return value


__all__ = ["fit_rows", "is_loadable"]
