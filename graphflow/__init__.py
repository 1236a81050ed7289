"""graphflow: dataflow graphs with autodiff, placed on devices by a cost model.

import graphflow as gf
x = gf.placeholder("float32", (None, 64))
w = gf.variable(gf.init.glorot((64, 10)))
with gf.Session() as s:
    s.run(x @ w, {x: images})
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphflow import errors, init, optim
from graphflow._version import __version__
from graphflow.base.argument_checks import did_you_mean
from graphflow.frontend.builders import assign, constant, placeholder, variable
from graphflow.frontend.control_flow import call, cond, scan, while_loop
from graphflow.frontend.functions import checkpoint, custom_vjp
from graphflow.frontend.functions import trace_once as function
from graphflow.ir.graph import Graph
from graphflow.ir.name_hints import FUNCTION_HINTS, MODULE_CALL_HINTS, install_module_hints
from graphflow.ir.op import Cost, Node, Op, Tensor, autocast, device, name_scope, sample
from graphflow.ir.op import register as register_op
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops import nn
from graphflow.ops.host_calls import debug
from graphflow.ops.host_calls.host_call import host_call
from graphflow.ops.matrices.einsum import einsum, tensordot
from graphflow.ops.matrices.linalg import linalg_namespace as linalg
from graphflow.ops.matrices.linalg.linalg_namespace import diag, diag_embed
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.matrices.sparse import sparse
from graphflow.ops.matrices.triangles import diagonal, trace, tril, triu
from graphflow.ops.matrices.vector_products import outer, vecdot
from graphflow.ops.ordering.histograms import histogram, interp
from graphflow.ops.ordering.membership import isin
from graphflow.ops.ordering.quantiles import median, quantile
from graphflow.ops.ordering.search import (
    bincount,
    compress,
    count_nonzero,
    nonzero,
    searchsorted,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
)
from graphflow.ops.ordering.sort import argsort, cummax, cummin, sort, top_k
from graphflow.ops.pointwise.arithmetic import (
    abs,
    add,
    ceil,
    copysign,
    divide,
    floor,
    floor_divide,
    multiply,
    negative,
    positive,
    pow,
    reciprocal,
    remainder,
    round,
    sign,
    signbit,
    square,
    subtract,
    trunc,
)
from graphflow.ops.pointwise.bitwise import (
    bitcast,
    bitwise_and,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    fmod,
)
from graphflow.ops.pointwise.comparison import (
    equal,
    greater,
    greater_equal,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    not_equal,
)
from graphflow.ops.pointwise.complex import angle, complex, conj, imag, real
from graphflow.ops.pointwise.convert import astype, full_like, ones_like, stop_gradient, zeros_like
from graphflow.ops.pointwise.incomplete_gamma import gammainc, gammaincc
from graphflow.ops.pointwise.neighbours import nextafter
from graphflow.ops.pointwise.select import clip, masked_fill, maximum, minimum, where
from graphflow.ops.pointwise.special import digamma, erfc, erfinv, lgamma, polygamma
from graphflow.ops.pointwise.transcendental import (
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    cos,
    cosh,
    erf,
    exp,
    expm1,
    hypot,
    log,
    log1p,
    log2,
    log10,
    logaddexp,
    rsqrt,
    sin,
    sinh,
    sqrt,
    tan,
    tanh,
)
from graphflow.ops.randomness import random
from graphflow.ops.reductions.cumulative import cumsum, prod
from graphflow.ops.reductions.extrema import argmax, argmin, logsumexp, max, min
from graphflow.ops.reductions.linear_recurrence import cumprod, logcumsumexp
from graphflow.ops.reductions.reduce import all, any, mean, sum
from graphflow.ops.reductions.variance import std, var
from graphflow.ops.spectral import fft, signal
from graphflow.ops.tensors.creation import arange, eye, full, linspace, ones, zeros
from graphflow.ops.tensors.flat_indices import ravel_multi_index
from graphflow.ops.tensors.padding import pad
from graphflow.ops.tensors.repetition import broadcast_arrays, broadcast_to, meshgrid, repeat, tile
from graphflow.ops.tensors.scatter import gather_nd, put_along_axis, scatter, scatter_nd
from graphflow.ops.tensors.segments import segment_sum
from graphflow.ops.tensors.shape import (
    expand_dims,
    matrix_transpose,
    moveaxis,
    permute_dims,
    reshape,
    squeeze,
    swapaxes,
)
from graphflow.ops.tensors.slicing import concat, diff, flip, roll, split, stack, unstack
from graphflow.ops.tensors.take import index_add, one_hot, scatter_add, take
from graphflow.ops.tensors.take_along_axis import gather, take_along_axis
from graphflow.ops.windows.convolve import convolve
from graphflow.transforms.associative_scan import associative_scan
from graphflow.transforms.custom_tangents import custom_jvp
from graphflow.transforms.forward_mode import jvp
from graphflow.transforms.jacobians import hessian, jacobian, vjp
from graphflow.transforms.op_testing import check_op
from graphflow.transforms.reverse_mode import gradients
from graphflow.transforms.vmap import vmap

if TYPE_CHECKING:
    from graphflow import array_api as array_api
    from graphflow import data as data
    from graphflow import launch as launch
    from graphflow import linear as linear
    from graphflow import metrics as metrics
    from graphflow import onnx as onnx
    from graphflow import parallel as parallel
    from graphflow import placement as placement
    from graphflow import training as training
    from graphflow.placement.clusters.cluster import Cluster
    from graphflow.placement.clusters.devices import Device, Link, Worker
    from graphflow.placement.plans.plan import Plan
    from graphflow.planning.plan_function import plan
    from graphflow.sessions.session import Session
    from graphflow.training.fit import fit
    from graphflow.training.one_batch import check_training

for _family in ("coordinate_ops", "file_ops", "sum_ops"):  # workers find ops of linear models, too
    import_module(f"graphflow.linear.cocoa.{_family}")
import_module("graphflow.data.read_data_op")

_CLUSTERS = "graphflow.placement.clusters.cluster"
_DEVICES = "graphflow.placement.clusters.devices"
_LATER = {
    "Cluster": _CLUSTERS, "Device": _DEVICES, "Link": _DEVICES, "Worker": _DEVICES,
    "Plan": "graphflow.placement.plans.plan",
    "plan": "graphflow.planning.plan_function",
    "Session": "graphflow.sessions.session",
    "array_api": "", "placement": "", "onnx": "", "parallel": "", "linear": "",
    "metrics": "", "data": "", "launch": "",
    "training": "", "fit": "graphflow.training.fit",
    "check_training": "graphflow.training.one_batch",
}  # fmt: skip
"""Names, and the modules that they are in; "" for those that are modules themselves."""
_ROOMS = ("nn", "optim", "linalg", "random", "init", "fft", "sparse", "signal", "debug", "parallel",
          "metrics")  # fmt: skip
"""Modules of public names: who asks here for one of theirs is text where it is."""


def __getattr__(name: str) -> Any:
    """Load the modules that plan and run graphs on first use.

    A program that only builds graphs does not wait for them. `onnx` needs the package of that name.
    """
    if name not in _LATER:
        hint = "" if name.startswith("_") else _elsewhere(name)  # tools probe for such names
        text = f"module 'graphflow' has no attribute {name!r}{hint}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    home = _LATER[name]
    try:
        module = import_module(home or f"graphflow.{name}")
    except ImportError as error:
        if sys.platform != "win32":
            raise
        raise errors.SessionError(
            f"gf.{name} needs Linux or macOS ({error}); on Windows, use WSL2. Here graphs can "
            "be built and planned"
        ) from None
    found = getattr(module, name) if home else module
    globals()[name] = found
    install_module_hints(sys.modules[__name__])  # loading one module loads others
    return found


def _elsewhere(name: str) -> str:
    """Say where a missing name is: in a module of this package, or under another name."""
    rooms = {room: globals().get(room) for room in _ROOMS}
    found = [f"gf.{r}.{name}" for r, m in rooms.items() if name in getattr(m, "__all__", ())]
    if isinstance(kind := getattr(errors, name, None), type) and issubclass(kind, Exception):
        found.append(f"gf.errors.{name}")
    if not found and name in FUNCTION_HINTS:
        found = [FUNCTION_HINTS[name]]
    if found:
        return f"; it is {' or '.join(found)}"
    hint = MODULE_CALL_HINTS.get(name) or did_you_mean(name, __all__, cutoff=0.7)
    return f"; {hint}" if hint else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Cluster",
    "Cost",
    "Device",
    "Graph",
    "Link",
    "Node",
    "Op",
    "Plan",
    "Session",
    "Tensor",
    "TensorSpec",
    "Worker",
    "__version__",
    "abs",
    "acos",
    "acosh",
    "add",
    "all",
    "angle",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "array_api",
    "asin",
    "asinh",
    "assign",
    "associative_scan",
    "astype",
    "atan",
    "atan2",
    "atanh",
    "autocast",
    "bincount",
    "bitcast",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "broadcast_arrays",
    "broadcast_to",
    "call",
    "ceil",
    "check_op",
    "check_training",
    "checkpoint",
    "clip",
    "complex",
    "compress",
    "concat",
    "cond",
    "conj",
    "constant",
    "convolve",
    "copysign",
    "cos",
    "cosh",
    "count_nonzero",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "custom_jvp",
    "custom_vjp",
    "data",
    "debug",
    "device",
    "diag",
    "diag_embed",
    "diagonal",
    "diff",
    "digamma",
    "divide",
    "einsum",
    "equal",
    "erf",
    "erfc",
    "erfinv",
    "errors",
    "exp",
    "expand_dims",
    "expm1",
    "eye",
    "fft",
    "flip",
    "fit",
    "floor",
    "floor_divide",
    "fmod",
    "full",
    "full_like",
    "function",
    "gammainc",
    "gammaincc",
    "gather",
    "gather_nd",
    "gradients",
    "greater",
    "greater_equal",
    "hessian",
    "histogram",
    "host_call",
    "hypot",
    "imag",
    "index_add",
    "init",
    "interp",
    "isfinite",
    "isin",
    "isinf",
    "isnan",
    "jacobian",
    "jvp",
    "launch",
    "less",
    "less_equal",
    "lgamma",
    "linalg",
    "linspace",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logcumsumexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logsumexp",
    "masked_fill",
    "matmul",
    "matrix_transpose",
    "max",
    "maximum",
    "mean",
    "median",
    "meshgrid",
    "metrics",
    "min",
    "minimum",
    "moveaxis",
    "multiply",
    "name_scope",
    "negative",
    "nextafter",
    "nn",
    "nonzero",
    "not_equal",
    "one_hot",
    "ones",
    "ones_like",
    "optim",
    "outer",
    "pad",
    "parallel",
    "permute_dims",
    "placeholder",
    "placement",
    "plan",
    "polygamma",
    "positive",
    "pow",
    "prod",
    "put_along_axis",
    "quantile",
    "random",
    "ravel_multi_index",
    "real",
    "reciprocal",
    "register_op",
    "remainder",
    "repeat",
    "reshape",
    "roll",
    "round",
    "rsqrt",
    "scan",
    "scatter",
    "scatter_add",
    "scatter_nd",
    "searchsorted",
    "segment_sum",
    "sign",
    "signal",
    "signbit",
    "sample",
    "sin",
    "sinh",
    "sort",
    "sparse",
    "spec",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "stop_gradient",
    "subtract",
    "sum",
    "swapaxes",
    "take",
    "take_along_axis",
    "tan",
    "tanh",
    "tensordot",
    "tile",
    "top_k",
    "trace",
    "training",
    "tril",
    "triu",
    "trunc",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "unstack",
    "var",
    "variable",
    "vecdot",
    "vjp",
    "vmap",
    "where",
    "while_loop",
    "zeros",
    "zeros_like",
]

install_module_hints(sys.modules[__name__])
