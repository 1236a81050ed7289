"""NVIDIA's libraries on a GPU, where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphflow.op import Op
from graphflow.spec import TensorSpec


def library_kernel(
    backend: Any, op: Op, specs: Sequence[TensorSpec], attrs: Mapping[str, Any]
) -> Callable[..., None] | None:
    return None
