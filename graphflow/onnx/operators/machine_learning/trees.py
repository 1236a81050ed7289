"""Ensembles of decision trees: all trees descend together, one level in each step.

A table holds the nodes of all trees. Leaves lead to themselves, so every position is a leaf after
as many steps as the deepest tree has levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import OnnxError
from graphflow.ir.op import Tensor, as_tensor
from graphflow.ir.spec import kind
from graphflow.onnx.loading.reading.domains import ML
from graphflow.onnx.loading.reading.reader import tensor_to_array
from graphflow.onnx.loading.reading.value_kinds import Array
from graphflow.onnx.loading.translation.node_call import NodeCall, RunOnHost
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.onnx.operators.machine_learning.post_transform import apply_post_transform
from graphflow.ops.pointwise import comparison, select
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.reductions import extrema
from graphflow.ops.reductions import reduce as sums
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import expand_dims
from graphflow.ops.tensors.slicing import stack, window
from graphflow.ops.tensors.take import take
from graphflow.ops.tensors.take_along_axis import take_along_axis

_COMPARISONS: dict[int, Callable[[Any, Any], Tensor]] = {
    0: comparison.less_equal, 1: comparison.less, 2: comparison.greater_equal,
    3: comparison.greater, 4: comparison.equal, 5: comparison.not_equal,
}  # fmt: skip
_MEMBER, _LEAF = 6, 7
_WORDS = {
    "BRANCH_LEQ": 0, "BRANCH_LT": 1, "BRANCH_GTE": 2, "BRANCH_GT": 3, "BRANCH_EQ": 4,
    "BRANCH_NEQ": 5, "LEAF": _LEAF,
}  # fmt: skip


@dataclass(frozen=True)
class Forest:
    """The nodes of all trees, as arrays (n,).

    Attributes:
        modes: the comparison of each node, or a leaf.
        features, splits: the feature that a node compares, and the number that it compares with.
        yes, no: the next node if the comparison is true or false.
        missing: True if a missing value (NaN) leads to `yes`.
        roots: the first node of each tree, (trees,).
        members: the sets that nodes of mode MEMBER test, (n, m), padded with NaN.
    """

    modes: Array
    features: Array
    splits: Array
    yes: Array
    no: Array
    missing: Array
    roots: Array
    members: Array | None = None

    def levels(self, label: str) -> list[Array]:
        """Return the nodes reached after each step; after the last step, all are leaves.

        Raises:
            OnnxError: a node leads to a node that does not exist, or back to itself.
        """
        n = len(self.modes)
        ends = np.concatenate([self.yes, self.no, self.roots])
        if ends.size and not 0 <= ends.min() <= ends.max() < n:
            raise OnnxError(f"{label}: a tree leads to a node that does not exist")
        levels = [np.unique(self.roots)]
        while (inner := levels[-1][self.modes[levels[-1]] != _LEAF]).size:
            if len(levels) > n:
                raise OnnxError(f"{label}: a tree leads back to one of its nodes")
            levels.append(np.unique(np.concatenate([self.yes[inner], self.no[inner]])))
        return levels

    def leaves(self, x: Tensor, label: str) -> Tensor:
        """Find the leaf in each tree for each row of x (rows, features): (rows, trees)."""
        features, yes, no, missing = map(
            as_tensor, (self.features, self.yes, self.no, self.missing)
        )
        test = self._test(x.dtype)
        places: Tensor = broadcast_to(as_tensor(self.roots), (x.shape[0], len(self.roots)))
        for _ in self.levels(label)[1:]:
            value = take_along_axis(x, take(features, places, 0), 1)
            goes = test(value, places)
            if self.missing.any():
                lost = comparison.logical_and(comparison.isnan(value), take(missing, places, 0))
                goes = comparison.logical_or(goes, lost)
            places = select.where(goes, take(yes, places, 0), take(no, places, 0))
        return places

    def _test(self, dtype: np.dtype[Any]) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function (values, nodes) that compares each value at its node."""
        splits, modes = as_tensor(self.splits.astype(dtype)), as_tensor(self.modes)
        members = None if self.members is None else as_tensor(self.members.astype(dtype))
        used = [int(mode) for mode in np.unique(self.modes) if mode != _LEAF]

        def passes(mode: int, value: Tensor, places: Tensor) -> Tensor:
            if mode == _MEMBER and members is not None:
                same = comparison.equal(expand_dims(value, -1), take(members, places, 0))
                found: Tensor = sums.any(same, axis=-1)
                return found
            return _COMPARISONS[mode](value, take(splits, places, 0))

        def test(value: Tensor, places: Tensor) -> Tensor:
            if len(used) == 1:
                return passes(used[0], value, places)
            mode = take(modes, places, 0)
            chosen = [
                comparison.logical_and(comparison.equal(mode, m), passes(m, value, places))
                for m in used
            ]
            passed: Tensor = reduce(comparison.logical_or, chosen)
            return passed

        return test


def _as_floats(x: Tensor) -> Tensor:
    return x if kind(x.dtype) == "float" else astype(x, "float32")


def _aggregate_leaves(leaves: Tensor, weights: Array, how: str, dtype: Any) -> Tensor:
    """Aggregate the weights (nodes, targets) of the leaves of all trees: (rows, targets)."""
    found = take(as_tensor(weights.astype(dtype)), leaves, 0)
    if how == "MIN":
        return extrema.min(found, axis=1)
    if how == "MAX":
        return extrema.max(found, axis=1)
    return (sums.mean if how == "AVERAGE" else sums.sum)(found, axis=1)


def _weights(
    call: NodeCall, n: int, targets: int, how: str, at: Array, ids: Array, values: Array
) -> Array:
    """Return each leaf's weight for each target; neutral values elsewhere: (n, targets)."""
    if at.size and not (0 <= ids.min() <= ids.max() < targets):
        raise OnnxError(f"{call.label}: a leaf is for a target that is none of {targets}")
    if how in ("SUM", "AVERAGE"):
        table = np.zeros((n, targets), values.dtype)
        np.add.at(table, (at, ids), values)
        return table
    if how not in ("MIN", "MAX"):
        raise call.unsupported_error(f"aggregate_function {how!r}")
    most = np.finfo(values.dtype).max
    table = np.full((n, targets), most if how == "MIN" else -most, values.dtype)
    (np.minimum if how == "MIN" else np.maximum).at(table, (at, ids), values)
    return table


# TreeEnsemble: nodes and leaves apart -----------------------------------------------------------


def _ints(call: NodeCall, name: str, default: Any = None) -> Array:
    value = call.required_attr(name) if default is None else call.attr(name, default)
    return np.asarray(value, np.int64)


def _tensor(call: NodeCall, name: str) -> Array | None:
    value = call.attr(name)
    return None if value is None else tensor_to_array(value, call.label)


def _sets(call: NodeCall, modes: Array) -> Array | None:
    """Return the set of each node as a row, padded with NaN; None if no node tests a set."""
    values = _tensor(call, "membership_values")
    at = np.flatnonzero(modes == _MEMBER)
    if values is None or not at.size:
        if at.size:
            raise OnnxError(f"{call.label}: there are no membership_values")
        return None
    ends = np.flatnonzero(np.isnan(values))
    if len(ends) != len(at):
        raise OnnxError(f"{call.label}: {len(ends)} sets for {len(at)} nodes that look into one")
    parts = [part[~np.isnan(part)] for part in np.split(values, ends)][: len(at)]
    table = np.full((len(modes), max(len(p) for p in parts)), np.nan, values.dtype)
    for i, part in zip(at, parts, strict=True):
        table[i, : len(part)] = part
    return table


@operator("TreeEnsemble", domain=ML)
def _ensemble(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    modes = tensor_to_array(call.required_attr("nodes_modes"), call.label).astype(np.int64)
    splits = tensor_to_array(call.required_attr("nodes_splits"), call.label)
    values = tensor_to_array(call.required_attr("leaf_weights"), call.label)
    n, ends = len(modes), len(values)

    def append_leaves(nodes: Array, leaves: Any) -> Array:
        if len(nodes) != n:
            raise OnnxError(f"{call.label}: {n} modes, but {len(nodes)} of another attribute")
        return np.concatenate([nodes, np.broadcast_to(leaves, ends)])

    def next_of(which: str) -> Array:
        is_leaf = _ints(call, f"nodes_{which}leafs")
        return append_leaves(
            _ints(call, f"nodes_{which}nodeids") + n * is_leaf, n + np.arange(ends)
        )

    sets = _sets(call, modes)
    if sets is not None:
        sets = np.concatenate([sets, np.full((ends, sets.shape[1]), np.nan, sets.dtype)])
    forest = Forest(
        append_leaves(modes, _LEAF),
        append_leaves(_ints(call, "nodes_featureids"), 0),
        append_leaves(splits, splits.dtype.type(0)),
        next_of("true"),
        next_of("false"),
        append_leaves(_ints(call, "nodes_missing_value_tracks_true", [0] * n), 0).astype(bool),
        _ints(call, "tree_roots"),
        sets,
    )
    code = call.attr("aggregate_function", 1)
    how = {0: "AVERAGE", 1: "SUM", 2: "MIN", 3: "MAX"}.get(code, str(code))
    table = _weights(
        call, n + ends, call.required_attr("n_targets"), how, n + np.arange(ends),
        _ints(call, "leaf_targetids"), values,
    )  # fmt: skip
    scores = _aggregate_leaves(forest.leaves(x, call.label), table, how, x.dtype)
    return apply_post_transform(call, scores, call.attr("post_transform", 0))


# TreeEnsembleRegressor and TreeEnsembleClassifier: nodes named by tree and number -----------------


def _floats(call: NodeCall, name: str) -> Array | None:
    """Return an attribute that is a list of floats, or a tensor under a longer name."""
    wide = _tensor(call, f"{name}_as_tensor")
    value = call.attr(name)
    return wide if wide is not None or value is None else np.asarray(value, np.float32)


def _named_forest(call: NodeCall) -> tuple[Forest, dict[tuple[int, int], int]]:
    """Return the forest, and the indices of its nodes by tree and number."""
    trees, numbers = call.required_attr("nodes_treeids"), call.required_attr("nodes_nodeids")
    places = {key: i for i, key in enumerate(zip(trees, numbers, strict=True))}
    words = call.required_attr("nodes_modes")
    unknown = sorted(set(words) - _WORDS.keys())
    if unknown or len(words) != len(trees):
        raise call.unsupported_error(f"{len(words)} modes, unknown: {unknown}")
    modes = np.array([_WORDS[word] for word in words], np.int64)
    leaf = modes == _LEAF

    def next_of(name: str) -> Array:
        ids = call.required_attr(name)
        try:
            return np.array(
                [i if leaf[i] else places[tree, ids[i]] for i, tree in enumerate(trees)], np.int64
            )
        except (KeyError, IndexError) as error:
            raise OnnxError(f"{call.label}: {name} leads to no node: {error}") from None

    yes, no = next_of("nodes_truenodeids"), next_of("nodes_falsenodeids")
    children = set(yes[~leaf].tolist()) | set(no[~leaf].tolist())
    values = _floats(call, "nodes_values")
    if values is None or len(values) != len(modes):
        raise OnnxError(f"{call.label}: nodes_values are not as many as nodes")
    missing = _ints(call, "nodes_missing_value_tracks_true", [0] * len(modes)).astype(bool)
    roots = [i for i in range(len(modes)) if i not in children]
    forest = Forest(
        modes,
        np.where(leaf, 0, _ints(call, "nodes_featureids")),
        values,
        yes,
        no,
        missing & ~leaf,
        np.array(roots, np.int64),
    )
    if len(np.unique(np.concatenate(forest.levels(call.label)))) < len(modes):
        raise OnnxError(f"{call.label}: a tree has no first node, only nodes that others lead to")
    return forest, places


def _scores(call: NodeCall, what: str, targets: int, how: str) -> Tensor:
    """Return scores (rows, targets); the attributes of leaf weights begin with `what`."""
    x = _as_floats(call.tensor(0))
    forest, places = _named_forest(call)
    values = _floats(call, f"{what}_weights")
    if values is None:
        raise OnnxError(f"{call.label}: attribute '{what}_weights' is missing")
    keys: Sequence[Any] = list(
        zip(
            call.required_attr(f"{what}_treeids"),
            call.required_attr(f"{what}_nodeids"),
            strict=True,
        )
    )
    lost = [key for key in keys if key not in places]
    if lost:
        raise OnnxError(f"{call.label}: a weight for node {lost[0]}, which does not exist")
    at = np.array([places[key] for key in keys], np.int64)
    ids = _ints(call, f"{what}_ids")
    table = _weights(call, len(forest.modes), targets, how, at, ids, values)
    scores = _aggregate_leaves(forest.leaves(x, call.label), table, how, x.dtype)
    base = _floats(call, "base_values")
    return scores if base is None else scores + base.astype(x.dtype)


@operator("TreeEnsembleRegressor", domain=ML)
def _regressor(call: NodeCall) -> Outputs:
    how = call.attr("aggregate_function", "SUM")
    scores = _scores(call, "target", call.required_attr("n_targets"), how)
    return astype(
        apply_post_transform(call, scores, call.attr("post_transform", "NONE")), "float32"
    )


@operator("TreeEnsembleClassifier", domain=ML)
def _classifier(call: NodeCall) -> Outputs:
    """Return labels and scores. Weights of a single class are those of the second of two."""
    labels = call.attr("classlabels_int64s")
    if not labels:
        raise RunOnHost("labels are strings")
    post = call.attr("post_transform", "NONE")
    scores = _scores(call, "class", len(labels), "SUM")
    given = set(call.required_attr("class_ids"))
    if len(given) == 1 and len(labels) <= 2:
        (column,) = given
        second = window(scores, 1, column, 1)
        first = 1 - second if post in ("NONE", "PROBIT") else -second
        scores = stack([first[:, 0], second[:, 0]], 1)
    scores = astype(apply_post_transform(call, scores, post), "float32")
    chosen = extrema.argmax(scores, axis=1)
    table = labels if len(labels) > 1 else [0, labels[0]]
    return [take(as_tensor(np.asarray(table, np.int64)), chosen, 0), scores]
