"""Support vector machines as matrix products; and classifiers with string labels.

String labels are numbered, and classified by the same graphs. Kernels are computed in float64,
since distances are differences of squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce as reduce_by
from itertools import combinations
from operator import mul
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from graphflow.errors import OnnxError
from graphflow.frontend import control_flow as control
from graphflow.ir.op import Tensor, as_tensor
from graphflow.onnx.loading.host import host_nodes as host
from graphflow.onnx.loading.reading.domains import ML
from graphflow.onnx.loading.reading.value_kinds import Array
from graphflow.onnx.loading.translation.node_call import NodeCall, RunOnHost
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.onnx.loading.translation.segments import OnnxBody
from graphflow.onnx.operators.machine_learning.post_transform import apply_post_transform
from graphflow.ops.matrices import matmul as linalg
from graphflow.ops.pointwise import activations, arithmetic, comparison, select, transcendental
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.reductions import extrema, reduce
from graphflow.ops.tensors.creation import full
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import expand_dims, reshape, swapaxes
from graphflow.ops.tensors.slicing import concat
from graphflow.ops.tensors.take import take


def _rows(call: NodeCall) -> Tensor:
    """Return the features as (rows, features) in float64; a vector counts as one row."""
    x = astype(call.tensor(0), "float64")
    return expand_dims(x, 0) if x.ndim == 1 else x


def _floats(call: NodeCall, name: str) -> Array:
    return np.asarray(call.attr(name, []), np.float64)


def _matrix(call: NodeCall, values: Array, rows: int) -> Array:
    """Reshape values to a matrix of `rows` rows."""
    if rows < 1 or values.size % rows:
        raise OnnxError(f"{call.label}: {values.size} numbers are not {rows} rows of equal size")
    return values.reshape(rows, -1)


def _kernel(call: NodeCall, x: Tensor, vectors: Array) -> Tensor:
    """Compute the kernel of each row of x and each vector: (rows, vectors)."""
    how = call.attr("kernel_type", "LINEAR")
    gamma, shift, degree = [*call.attr("kernel_params", []), 0.0, 0.0, 0.0][:3]
    product: Tensor = linalg.matmul(x, vectors, transpose_b=True)
    if how == "LINEAR":
        return product
    if how == "POLY":
        return _power(product * gamma + shift, int(degree))
    if how == "SIGMOID":
        squashed: Tensor = transcendental.tanh(product * gamma + shift)
        return squashed
    if how == "RBF":
        lengths = reduce.sum(x * x, axis=1, keepdims=True)
        apart = lengths + np.square(vectors).sum(1) - product * 2.0
        near: Tensor = transcendental.exp(select.maximum(apart, 0.0) * -gamma)
        return near
    raise call.unsupported_error(f"kernel_type {how!r}; it is LINEAR, POLY, RBF or SIGMOID")


def _power(x: Tensor, degree: int) -> Tensor:
    """Raise x to an integral power; small powers are products, in a tenth of the time of pow."""
    if 1 <= degree <= 8:
        product: Tensor = reduce_by(mul, [x] * degree)
        return product
    result: Tensor = arithmetic.pow(x, degree)
    return result


@operator("SVMRegressor", domain=ML)
def _regressor(call: NodeCall) -> Outputs:
    x, weights, rho = _rows(call), _floats(call, "coefficients"), _floats(call, "rho")
    count = call.attr("n_supports", 0)
    if count:
        vectors = _matrix(call, _floats(call, "support_vectors"), count)
        x = _kernel(call, x, vectors)
    scores = linalg.matmul(x, weights.reshape(-1, 1)) + rho[:1]
    if call.attr("one_class", 0):
        scores = select.where(comparison.greater(scores, 0), 1.0, -1.0)
    return astype(
        apply_post_transform(call, scores, call.attr("post_transform", "NONE")), "float32"
    )


@operator("SVMClassifier", domain=ML)
def _classifier(call: NodeCall) -> Outputs:
    """Return labels, and scores of pairs of classes or (with probabilities) of classes."""
    labels = call.attr("classlabels_ints", [])
    if call.attr("classlabels_strings"):
        raise RunOnHost("labels are strings")
    classes, weights = max(len(labels), 1), _floats(call, "coefficients")
    rho, sizes = _floats(call, "rho"), call.attr("vectors_per_class", [])
    probable = bool(sum(sizes) and call.attr("prob_a"))
    if not sum(sizes):
        rows = _matrix(call, weights, classes)
        scores = linalg.matmul(_rows(call), rows, transpose_b=True) + rho[:1]
        votes = scores
    else:
        scores = _score_pairs(call, weights, rho, sizes)
        votes = _votes(scores, classes)
        if probable:
            scores = _probabilities(call, scores, classes)
    best = extrema.argmax(votes, axis=1)
    if len(rho) == 1 and classes == 2:
        certain = not probable and bool((weights >= 0).all())
        if certain:
            best = select.where(comparison.greater_equal(extrema.max(votes, axis=1), 0.5), 1, best)
        table = labels
    elif len(rho) == 1 and classes == 1:
        best = astype(comparison.greater(extrema.max(votes, axis=1), 0), "int64")
        table = [0, 1]
    else:
        table = labels or [0]
    if scores.shape[1] == 1 and len(rho) == 1 and classes == 2:
        scores = concat([-scores, scores], 1)
    scores = astype(
        apply_post_transform(call, scores, call.attr("post_transform", "NONE")), "float32"
    )
    return [take(as_tensor(np.asarray(table, np.int64)), best, 0), scores]


def _score_pairs(call: NodeCall, weights: Array, rho: Array, sizes: Sequence[int]) -> Tensor:
    """Return scores (rows, pairs of classes), above 0 for the first class of a pair."""
    count = sum(sizes)
    vectors = _matrix(call, _floats(call, "support_vectors"), count)
    pairs = list(combinations(range(len(sizes)), 2))
    if weights.size != count * (len(sizes) - 1) or len(rho) < len(pairs):
        raise OnnxError(
            f"{call.label}: {weights.size} coefficients and {len(rho)} rho for {count} vectors of "
            f"{len(sizes)} classes"
        )
    given, ends = weights.reshape(-1, count), np.cumsum([0, *sizes])
    table = np.zeros((count, len(pairs)))
    for column, (i, j) in enumerate(pairs):
        first, second = slice(ends[i], ends[i + 1]), slice(ends[j], ends[j + 1])
        table[first, column] = given[j - 1, first]
        table[second, column] = given[i, second]
    scores: Tensor = linalg.matmul(_kernel(call, _rows(call), vectors), table) + rho[: len(pairs)]
    return scores


def _votes(scores: Tensor, classes: int) -> Tensor:
    """Count the pairs that each class wins."""
    pairs = list(combinations(range(classes), 2))
    wins, losses = np.zeros((len(pairs), classes)), np.zeros((len(pairs), classes))
    for row, (i, j) in enumerate(pairs):
        wins[row, i], losses[row, j] = 1, 1
    won = astype(comparison.greater(scores, 0), "float64")
    votes: Tensor = linalg.matmul(won, wins) + linalg.matmul(1 - won, losses)
    return votes


def _probabilities(call: NodeCall, scores: Tensor, classes: int) -> Tensor:
    """Compute probabilities of classes (rows, classes) from those of pairs.

    Source: Wu, Lin & Weng, JMLR 5, 2004, second method; Gauss-Seidel steps as in libsvm.
    """
    a, b = _floats(call, "prob_a"), _floats(call, "prob_b")
    chance = select.clip(activations.sigmoid(-(scores * a + b)), 1e-7, 1 - 1e-7)
    pairs = list(combinations(range(classes), 2))
    places = np.full((classes, classes), 2 * len(pairs))
    for at, (i, j) in enumerate(pairs):
        places[i, j], places[j, i] = at, len(pairs) + at
    # Rows of the data lie last from here on, since there are more of them than classes.
    chance = swapaxes(chance, 0, 1)
    every = concat([chance, 1 - chance, chance[:1] * 0], 0)
    won = reshape(take(every, as_tensor(places.reshape(-1)), 0), (classes, classes, -1))
    own = reduce.sum(won * won, axis=0, keepdims=True) * np.eye(classes)[:, :, None]
    q = own - won * swapaxes(won, 0, 1)  # won[i, j]: the probability of i among i and j

    def residual(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q·p, p·Q·p, and True for rows that have not converged."""
        qp = reduce.sum(q * p, axis=1)  # q is symmetric
        pqp = reduce.sum(p * qp, axis=0, keepdims=True)
        error = extrema.max(arithmetic.abs(qp - pqp), axis=0, keepdims=True)
        return qp, pqp, comparison.greater_equal(error, 0.005 / classes)

    def step(p: Tensor) -> Tensor:
        qp, pqp, moves = residual(p)
        new = p
        for t in range(classes):
            own, part = q[t, t : t + 1], qp[t : t + 1]
            change = (pqp - part) / own
            grown = change + 1
            one = np.eye(classes)[t][:, None]
            pqp = (pqp + change * (change * own + part * 2)) / (grown * grown)
            new = (new + change * one) / grown
            qp = (qp + change * q[t]) / grown
        return select.where(moves, new, p)

    start = broadcast_to(full((classes, 1), 1 / classes, "float64"), (classes, scores.shape[0]))
    settled: Tensor = control.while_loop(
        lambda p: reduce.any(residual(p)[2]), step, start, max_iterations=max(100, classes)
    )
    return swapaxes(settled, 0, 1)


# Labels that are strings ------------------------------------------------------------------------


@host.host_routine("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier", domain=ML)
def _classify_strings(
    run: host.HostRun, node: host.HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]
) -> Any:
    """Run the classifier with numbers for labels as a graph, and look up the labels."""
    words = node.attr("classlabels_strings") or []
    if len(words) < 2 or inputs[0].dtype.kind not in "iuf":
        return host.run_reference(run, node, inputs)
    numbered = NodeProto()
    numbered.CopyFrom(node.proto)
    del numbered.attribute[:]
    kept = [a for a in node.proto.attribute if a.name != "classlabels_strings"]
    ints = "classlabels_int64s" if node.proto.op_type.startswith("Tree") else "classlabels_ints"
    numbered.attribute.extend([*kept, helper.make_attribute(ints, list(range(len(words))))])
    del numbered.input[:], numbered.output[:]
    numbered.input.append("x")
    numbered.output.extend(["label", "scores"])
    body = OnnxBody([numbered], ("x",), ("label", "scores"), node.opsets)
    labels, scores = run.program_for(node.proto, body).run(run, {"x": np.asarray(inputs[0])})
    return [np.asarray(words, object)[labels], scores]
