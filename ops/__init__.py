"""The op families. Importing this package fills the registry."""

from collections.abc import Mapping, Sequence
from typing import Any

from graphflow.op import Op, run_elementwise_by
from graphflow.ops import (
    activations,
    adaptive,
    attention_packed,
    attention_rows,
    batch_norm,
    bitwise,
    collectives,
    comm,
    complex,
    control,
    conv,
    convert,
    correlation,
    creation,
    debug,
    decompose,
    deform,
    determinant,
    einsum,
    elementwise,
    embedding,
    extrema,
    fft,
    fourier,
    getitem,
    gram,
    grid,
    host,
    index,
    linalg,
    linear_algebra,
    magnitude,
    moments,
    nn,
    norm,
    places,
    pool,
    pool_max,
    pool_mean,
    product,
    quantiles,
    random,
    recurrence,
    reduce,
    resize,
    roi,
    sampling,
    scatter,
    search,
    select,
    shape,
    signal,
    singular,
    softmax,
    solve,
    sort,
    sparse,
    special,
    state,
    suppression,
    transcendental,
    unfold,
    vision,
    window,
)

__all__ = [
    "activations", "adaptive", "attention_packed", "attention_rows", "batch_norm", "bitwise",
    "collectives", "comm", "complex", "control", "conv", "convert", "correlation", "creation",
    "debug", "decompose", "deform", "determinant", "einsum", "elementwise", "embedding", "extrema",
    "fft", "fourier", "getitem", "gram", "grid", "host", "index", "linalg", "linear_algebra",
    "magnitude", "moments", "nn", "norm", "places", "pool", "pool_max", "pool_mean", "product",
    "quantiles", "random", "recurrence", "reduce", "resize", "roi", "sampling", "scatter", "search",
    "select", "shape", "signal", "singular", "softmax", "solve", "sort", "sparse", "special",
    "state", "suppression", "transcendental", "unfold", "vision", "window",
]  # fmt: skip


def _generated(op: Op, xp: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    from graphflow.ops.kernels.regions import computed

    return computed(op, xp, arrays, attrs)


run_elementwise_by(_generated)
