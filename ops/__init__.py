"""The op families. Importing this package fills the registry."""

from collections.abc import Mapping, Sequence
from typing import Any

from graphflow.ir.op import Op, set_elementwise_runner
from graphflow.ops import nn
from graphflow.ops.attention import packed_qkv as attention_packed
from graphflow.ops.attention import row_layout as attention_rows
from graphflow.ops.base import state_ops as state
from graphflow.ops.communication import collectives
from graphflow.ops.communication import send_recv as comm
from graphflow.ops.control_flow import control
from graphflow.ops.host_calls import debug
from graphflow.ops.host_calls import host_call as host
from graphflow.ops.images import adaptive_pooling as adaptive
from graphflow.ops.images import deformable_conv as deform
from graphflow.ops.images import grid_sample as grid
from graphflow.ops.images import nms as suppression
from graphflow.ops.images import pixel_ops as vision
from graphflow.ops.images import resize, roi
from graphflow.ops.images import sparse_sampling as sampling
from graphflow.ops.matrices import decompositions as decompose
from graphflow.ops.matrices import determinant, einsum, gram, solve, sparse
from graphflow.ops.matrices import linalg_namespace as linear_algebra
from graphflow.ops.matrices import matmul as linalg
from graphflow.ops.matrices import norms as magnitude
from graphflow.ops.matrices import svd as singular
from graphflow.ops.networks import batch_norm, norm
from graphflow.ops.ordering import quantiles, search, sort
from graphflow.ops.pointwise import (
    activations,
    bitwise,
    complex,
    convert,
    select,
    special,
    transcendental,
)
from graphflow.ops.pointwise import arithmetic as elementwise
from graphflow.ops.randomness import random
from graphflow.ops.reductions import cumulative as product
from graphflow.ops.reductions import extrema, reduce, softmax
from graphflow.ops.reductions import linear_recurrence as recurrence
from graphflow.ops.reductions import sharded_moments as moments
from graphflow.ops.spectral import fft, signal
from graphflow.ops.spectral import fft_ops as fourier
from graphflow.ops.tensors import creation, embedding, getitem, scatter, shape
from graphflow.ops.tensors import flat_indices as places
from graphflow.ops.tensors import slicing as window
from graphflow.ops.tensors import take as index
from graphflow.ops.windows import conv, pool, pool_max, pool_mean, unfold
from graphflow.ops.windows import conv_ops as correlation

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
    from graphflow.ops.kernels.fusion.region_kernels import run_op

    return run_op(op, xp, arrays, attrs)


set_elementwise_runner(_generated)
