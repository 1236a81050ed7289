"""The functions of the Python array API standard (2024.12), for tensors of graphs.

`x.__array_namespace__()` returns this module, so that code which is written for the standard builds
a graph when it is given a tensor. Names of graphflow that have the standard's signature are the
same functions here; `creation`, `signatures`, `linalg` and `fft` adapt the others. Functions whose
result has a shape that depends on values are refused.

Source: https://data-apis.org/array-api/2024.12/
"""

from __future__ import annotations

from math import e, inf, nan, pi

from graphflow.array_api import fft, linalg
from graphflow.array_api.creation import (
    arange,
    asarray,
    astype,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from graphflow.array_api.data_types import (
    bool,
    can_cast,
    complex64,
    complex128,
    finfo,
    float32,
    float64,
    iinfo,
    int8,
    int16,
    int32,
    int64,
    isdtype,
    result_type,
    uint8,
    uint16,
    uint32,
    uint64,
)
from graphflow.array_api.inspection import VERSIONS, __array_namespace_info__
from graphflow.array_api.signatures import (
    cumulative_prod,
    cumulative_sum,
    diff,
    nonzero,
    reshape,
    round,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
    unstack,
)
from graphflow.ops.matrices.einsum import tensordot
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.matrices.triangles import tril, triu
from graphflow.ops.matrices.vector_products import vecdot
from graphflow.ops.ordering.search import count_nonzero, searchsorted
from graphflow.ops.ordering.sort import argsort, sort
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
    sign,
    signbit,
    square,
    subtract,
    trunc,
)
from graphflow.ops.pointwise.bitwise import (
    bitwise_and,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
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
from graphflow.ops.pointwise.complex import conj, imag, real
from graphflow.ops.pointwise.neighbours import nextafter
from graphflow.ops.pointwise.select import clip, maximum, minimum, where
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
    exp,
    expm1,
    hypot,
    log,
    log1p,
    log2,
    log10,
    logaddexp,
    sin,
    sinh,
    sqrt,
    tan,
    tanh,
)
from graphflow.ops.reductions.cumulative import prod
from graphflow.ops.reductions.extrema import argmax, argmin, max, min
from graphflow.ops.reductions.reduce import all, any, mean, sum
from graphflow.ops.reductions.variance import std, var
from graphflow.ops.tensors.repetition import broadcast_arrays, broadcast_to, meshgrid, repeat, tile
from graphflow.ops.tensors.shape import (
    expand_dims,
    matrix_transpose,
    moveaxis,
    permute_dims,
    squeeze,
)
from graphflow.ops.tensors.slicing import concat, flip, roll, stack
from graphflow.ops.tensors.take import take
from graphflow.ops.tensors.take_along_axis import take_along_axis

__array_api_version__ = VERSIONS[-1]
newaxis = None

__all__ = [
    "VERSIONS", "__array_api_version__", "__array_namespace_info__", "abs", "acos", "acosh", "add",
    "all", "any", "arange", "argmax", "argmin", "argsort", "asarray", "asin", "asinh", "astype",
    "atan", "atan2", "atanh", "bitwise_and", "bitwise_invert", "bitwise_left_shift", "bitwise_or",
    "bitwise_right_shift", "bitwise_xor", "bool", "broadcast_arrays", "broadcast_to", "can_cast",
    "ceil", "clip", "complex128", "complex64", "concat", "conj", "copysign", "cos", "cosh",
    "count_nonzero", "cumulative_prod", "cumulative_sum", "diff", "divide", "e", "empty",
    "empty_like", "equal", "exp", "expand_dims", "expm1", "eye", "fft", "finfo", "flip", "float32",
    "float64", "floor", "floor_divide", "from_dlpack", "full", "full_like", "greater",
    "greater_equal", "hypot", "iinfo", "imag", "inf", "int16", "int32", "int64", "int8", "isdtype",
    "isfinite", "isinf", "isnan", "less", "less_equal", "linalg", "linspace", "log", "log10",
    "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor",
    "matmul", "matrix_transpose", "max", "maximum", "mean", "meshgrid", "min", "minimum",
    "moveaxis", "multiply", "nan", "negative", "newaxis", "nextafter", "nonzero", "not_equal",
    "ones", "ones_like", "permute_dims", "pi", "positive", "pow", "prod", "real", "reciprocal",
    "remainder", "repeat", "reshape", "result_type", "roll", "round", "searchsorted", "sign",
    "signbit", "sin", "sinh", "sort", "sqrt", "square", "squeeze", "stack", "std", "subtract",
    "sum", "take", "take_along_axis", "tan", "tanh", "tensordot", "tile", "tril", "triu", "trunc",
    "uint16", "uint32", "uint64", "uint8", "unique_all", "unique_counts", "unique_inverse",
    "unique_values", "unstack", "var", "vecdot", "where", "zeros", "zeros_like",
]  # fmt: skip
