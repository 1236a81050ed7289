"""Feature preparation, label encoding and linear models, on numbers. Strings run on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.ir.op import Tensor, as_tensor
from graphflow.ir.spec import kind
from graphflow.onnx.loading.host import host_nodes as host
from graphflow.onnx.loading.reading.domains import ML
from graphflow.onnx.loading.reading.reader import tensor_to_array
from graphflow.onnx.loading.reading.value_kinds import Array
from graphflow.onnx.loading.translation.node_call import NodeCall, RunOnHost
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.onnx.operators.machine_learning.post_transform import apply_post_transform
from graphflow.ops.matrices import matmul as linalg
from graphflow.ops.ordering.search import searchsorted
from graphflow.ops.pointwise import arithmetic, comparison, select, transcendental
from graphflow.ops.pointwise.convert import astype, full_like
from graphflow.ops.reductions import extrema, reduce
from graphflow.ops.tensors import slicing as window
from graphflow.ops.tensors.padding import pad
from graphflow.ops.tensors.shape import expand_dims, reshape
from graphflow.ops.tensors.take import take

# Features -------------------------------------------------------------------------------------


@operator("ArrayFeatureExtractor", domain=ML)
def _extract(call: NodeCall) -> Outputs:
    """Select columns of the last axis; a vector counts as a matrix of one row."""
    x, places = call.tensor(0), reshape(call.tensor(1), (-1,))
    found = take(x, places, x.ndim - 1)
    return expand_dims(found, 0) if x.ndim == 1 else found


@operator("Binarizer", domain=ML)
def _binarize(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    return astype(comparison.greater(x, call.attr("threshold", 0.0)), x.dtype)


@operator("Scaler", domain=ML)
def _scale(call: NodeCall) -> Outputs:
    x = _floats(call.tensor(0))
    offset, scale = (np.asarray(call.required_attr(name), x.dtype) for name in ("offset", "scale"))
    return astype((x - offset) * scale, "float32")


@operator("Normalizer", domain=ML)
def _normalize(call: NodeCall) -> Outputs:
    x, how = _floats(call.tensor(0)), call.attr("norm", "MAX")
    axis = x.ndim - 1
    if how == "MAX":
        norm = extrema.max(arithmetic.abs(x), axis=axis, keepdims=True)
    elif how == "L1":
        norm = reduce.sum(arithmetic.abs(x), axis=axis, keepdims=True)
    elif how == "L2":
        norm = transcendental.sqrt(reduce.sum(x * x, axis=axis, keepdims=True))
    else:
        raise call.unsupported_error(f"norm {how!r}; it is MAX, L1 or L2")
    return astype(x / select.maximum(norm, 1e-30), "float32")


@operator("Imputer", domain=ML)
def _impute(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    word = "float" if kind(x.dtype) == "float" else "int64"
    lost = call.attr(f"replaced_value_{word}", 0)
    values = np.asarray(call.required_attr(f"imputed_value_{word}s"), x.dtype)
    absent = comparison.isnan(x) if lost != lost else comparison.equal(x, lost)
    return select.where(absent, values, x)


@operator("OneHotEncoder", domain=ML)
def _one_hot(call: NodeCall) -> Outputs:
    categories = call.attr("cats_int64s")
    if not categories and not call.attr("cats_strings"):
        raise call.unsupported_error("there are no categories")
    if not categories or not call.attr("zeros", 1):
        raise RunOnHost("categories are strings, or must all be known")
    x = astype(call.tensor(0), "int64")
    return astype(comparison.equal(expand_dims(x, -1), np.asarray(categories)), "float32")


@operator("FeatureVectorizer", domain=ML)
def _vectorize(call: NodeCall) -> Outputs:
    """Concatenate rows of features, each input cropped or padded to a given width."""
    parts = []
    for x, wide in zip(call.tensors(), call.required_attr("inputdimensions"), strict=True):
        rows = expand_dims(x, -1) if x.ndim == 1 else x
        have = call.static_size(rows.shape[1])
        if have > wide:
            rows = window.window(rows, 1, 0, wide)
        elif have < wide:
            rows = pad(rows, [(0, 0), (0, wide - have)])
        parts.append(astype(rows, "float32"))
    return window.concat(parts, 1)


def _floats(x: Tensor) -> Tensor:
    return x if kind(x.dtype) == "float" else astype(x, "float32")


# Labels ---------------------------------------------------------------------------------------


def _encoder_items(call: NodeCall, what: str) -> Array:
    """Return the keys or values of an encoder from whichever attribute holds them."""
    for suffix, dtype in (("floats", "float32"), ("int64s", "int64")):
        items = call.attr(f"{what}_{suffix}")
        if items:
            return np.asarray(items, dtype)
    tensor = call.attr(f"{what}_tensor")
    array = None if tensor is None else tensor_to_array(tensor, call.label)
    if (
        array is None
        or array.dtype.kind not in "iuf"
        or (array.dtype.kind == "f" and np.isnan(array).any())
    ):
        raise RunOnHost("keys or values are strings, or not numbers")
    return array.reshape(-1)


def _default(call: NodeCall, dtype: np.dtype[Any]) -> Any:
    tensor = call.attr("default_tensor")
    if tensor is not None:
        return tensor_to_array(tensor, call.label).reshape(-1)[0].item()
    return call.attr("default_int64", -1) if dtype.kind in "iu" else call.attr("default_float", 0.0)


@operator("LabelEncoder", domain=ML)
def _encode(call: NodeCall) -> Outputs:
    """Look up each key's value in the sorted keys; the last value counts for a repeated key."""
    keys, values = _encoder_items(call, "keys"), _encoder_items(call, "values")
    if len(keys) != len(values) or not len(keys):
        raise call.unsupported_error(f"{len(keys)} keys for {len(values)} values")
    known = dict(zip(keys.tolist(), values.tolist(), strict=True))
    line = np.array(sorted(known), keys.dtype)
    table = np.array([known[key] for key in line.tolist()], values.dtype)
    x = call.tensor(0)
    if x.dtype != line.dtype:
        line = line.astype(x.dtype)
    places = select.minimum(searchsorted(line, x), len(line) - 1)
    found = take(as_tensor(table), places, 0)
    hit = comparison.equal(take(as_tensor(line), places, 0), x)
    return select.where(hit, found, full_like(found, _default(call, values.dtype)))


@host.host_routine("ZipMap", domain=ML)
def _zip(
    run: host.HostRun, node: host.HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]
) -> Any:
    """Return a dictionary from label to score for each row."""
    labels = node.attr("classlabels_int64s") or node.attr("classlabels_strings") or []
    rows = np.atleast_2d(inputs[0]).tolist()
    return [[dict(zip(labels, row, strict=True)) for row in rows]]


# Linear models --------------------------------------------------------------------------------


def _linear(call: NodeCall, rows: int) -> Tensor:
    """Compute x · coefficientsᵀ + intercepts, for coefficients (rows, features)."""
    x = _floats(call.tensor(0))
    weights = np.asarray(call.required_attr("coefficients"), x.dtype)
    if weights.size % rows:
        raise call.unsupported_error(f"{weights.size} coefficients for {rows} rows")
    scores: Tensor = linalg.matmul(x, weights.reshape(rows, -1), transpose_b=True)
    intercepts = call.attr("intercepts")
    return scores + np.asarray(intercepts, x.dtype) if intercepts else scores


@operator("LinearRegressor", domain=ML)
def _regress(call: NodeCall) -> Outputs:
    scores = _linear(call, call.attr("targets", 1))
    return astype(
        apply_post_transform(call, scores, call.attr("post_transform", "NONE")), "float32"
    )


@operator("LinearClassifier", domain=ML)
def _classify(call: NodeCall) -> Outputs:
    """Return labels and scores. A single row of coefficients scores the second of two classes."""
    labels = call.attr("classlabels_ints")
    if not labels:
        raise RunOnHost("labels are strings")
    post = call.attr("post_transform", "NONE")
    features = call.static_size(call.spec(0).shape[-1])
    rows = len(call.required_attr("coefficients")) // max(features, 1)
    scores = _linear(call, rows)
    if rows == 1 and len(labels) == 2:
        scores = window.concat([-scores, scores], 1)
    scores = astype(apply_post_transform(call, scores, post), "float32")
    if rows == 1 and len(labels) == 1:
        limit = 0.0 if post == "NONE" else 0.5
        passed = comparison.greater_equal(reshape(scores, (-1,)), limit)
        return [select.where(passed, np.int64(labels[0]), np.int64(0)), scores]
    return [
        take(as_tensor(np.asarray(labels, np.int64)), extrema.argmax(scores, axis=1), 0),
        scores,
    ]
