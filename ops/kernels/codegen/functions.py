"""The vectorised functions of our own, by the names of trace steps."""

from __future__ import annotations

from collections.abc import Callable

from graphflow.ops.kernels.codegen.vector_math import (
    arccos,
    arcsin,
    arctan,
    erf,
    exp,
    expm1,
    log,
    log1p,
    log2,
    log10,
    sigmoid,
    tanh,
)
from graphflow.ops.kernels.codegen.vector_math_guarded import cos, power, sin

FUNCTIONS: dict[str, Callable[..., str]] = {
    "exp": exp, "expm1": expm1, "log": log, "log1p": log1p, "log2": log2, "log10": log10,
    "tanh": tanh, "erf": erf, "arctan": arctan, "arcsin": arcsin, "arccos": arccos,
    "sigmoid": sigmoid, "sin": sin, "cos": cos, "power": power,
}  # fmt: skip
