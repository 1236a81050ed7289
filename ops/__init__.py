"""The op families. Importing this package fills the registry with every op."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphflow.ir.op import Op, set_elementwise_runner, set_float32_runner
from graphflow.ops import nn
from graphflow.ops.attention import packed_qkv
from graphflow.ops.base import state_ops
from graphflow.ops.communication import (
    active_sum,
    byte_planes,
    channels,
    collectives,
    compressed_sum,
    pushed_gradient,
    send_recv,
)
from graphflow.ops.control_flow import concurrent, control, numbered_call
from graphflow.ops.host_calls import debug, host_call
from graphflow.ops.images import (
    adaptive_pooling,
    deformable_conv,
    grid_sample,
    nms,
    pixel_ops,
    resize,
    roi,
    sparse_sampling,
)
from graphflow.ops.matrices import einsum, gram, matmul, triangles, vector_products
from graphflow.ops.matrices.linalg import (
    decompositions,
    determinant,
    eigen,
    least_squares,
    linalg_namespace,
    norms,
    solve,
    svd,
)
from graphflow.ops.matrices.sparse import sparse
from graphflow.ops.networks import batch_norm, norm
from graphflow.ops.ordering import quantiles, search, sort
from graphflow.ops.pointwise import (
    activations,
    arithmetic,
    bitwise,
    complex,
    convert,
    rectifiers,
    select,
    special,
    transcendental,
)
from graphflow.ops.randomness import random
from graphflow.ops.reductions import (
    cumulative,
    extrema,
    linear_recurrence,
    pair_coupling,
    reduce,
    sharded_moments,
    softmax,
    variance,
)
from graphflow.ops.spectral import fft, fft_ops, signal
from graphflow.ops.tables import id_routes
from graphflow.ops.tensors import (
    creation,
    embedding,
    flat_indices,
    getitem,
    repetition,
    scatter,
    shape,
    slicing,
    table_rows,
    take,
    take_along_axis,
    window_rows,
)
from graphflow.ops.windows import conv, conv_ops, pool, pool_max, pool_mean, unfold

__all__ = [
    "activations", "active_sum", "adaptive_pooling", "arithmetic", "batch_norm", "bitwise",
    "byte_planes", "channels", "collectives", "complex", "compressed_sum", "concurrent", "control",
    "conv",
    "conv_ops", "convert", "creation", "cumulative", "debug",
    "decompositions", "deformable_conv", "determinant", "eigen", "einsum", "embedding",
    "extrema", "fft", "fft_ops", "flat_indices", "getitem", "gram", "grid_sample", "host_call",
    "id_routes", "least_squares", "linalg_namespace", "linear_recurrence", "matmul", "nms", "nn",
    "norm", "norms", "numbered_call", "packed_qkv", "pair_coupling", "pixel_ops", "pool",
    "pool_max", "pool_mean",
    "pushed_gradient",
    "quantiles", "random",
    "rectifiers", "reduce", "repetition", "resize", "roi", "scatter", "search", "select",
    "send_recv", "shape", "sharded_moments", "signal", "slicing", "softmax", "solve", "sort",
    "sparse", "sparse_sampling", "special", "state_ops", "svd", "table_rows", "take",
    "take_along_axis", "transcendental", "triangles", "unfold", "variance", "vector_products",
    "window_rows",
]  # fmt: skip


def _run_generated(op: Op, xp: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    # Imported late: the kernel generators import llvmlite, which `import graphflow` must not load.
    from graphflow.ops.kernels.fusion.region_kernels import run_op

    return run_op(op, xp, arrays, attrs)


def _run_in_float32(
    into: Callable[..., None], out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]
) -> None:
    from graphflow.ops.kernels.fusion.half_conversion import run_in_float32  # for the same reason

    run_in_float32(into, out, arrays, attrs)


set_elementwise_runner(_run_generated)
set_float32_runner(_run_in_float32)
