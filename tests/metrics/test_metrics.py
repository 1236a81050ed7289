"""Metrics over uneven batches against scikit-learn over all examples at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, OpError, ShapeError

measures = pytest.importorskip("sklearn.metrics", reason="pip install scikit-learn runs it")
Array = np.ndarray[Any, Any]
SIZES = (64, 64, 1, 37)  # of batches
N = sum(SIZES)
m = gf.metrics

_random = np.random.default_rng(5)
LABELS = _random.integers(0, 4, N)
LOGITS = _random.normal(size=(N, 5)).astype("float32") + 2 * np.eye(5, dtype="float32")[LABELS]
CLASSES = LOGITS.argmax(1)
TWO = _random.integers(0, 2, N)
SCORES = np.round(np.clip(0.4 * _random.normal(size=N) + 0.3 * TWO + 0.3, 0, 1), 1)  # many equal
REAL = 1e6 + _random.normal(size=(N, 3))
CLOSE = REAL + 0.3 * _random.normal(size=(N, 3))
WEIGHTS = _random.integers(0, 3, N).astype("float64")


def over_batches(make: Callable[..., Any], *arrays: Array, **how: Any) -> Any:
    """Return a metric of arrays that are fed batch by batch."""
    inputs = [gf.placeholder(str(a.dtype), (None, *a.shape[1:])) for a in arrays]
    metric = make(*inputs)
    ends = np.cumsum(SIZES)
    feeds = [
        {x: a[end - size : end] for x, a in zip(inputs, arrays, strict=True)}
        for size, end in zip(SIZES, ends, strict=True)
    ]
    with gf.Session(**how) as session:
        return m.evaluate(session, {"it": metric}, feeds)["it"]


CASES: dict[str, tuple[Callable[..., Any], list[Array], Callable[[], Any]]] = {
    "accuracy": (m.accuracy, [LOGITS, LABELS], lambda: measures.accuracy_score(LABELS, CLASSES)),
    "accuracy of classes": (m.accuracy, [CLASSES, LABELS],
                            lambda: measures.accuracy_score(LABELS, CLASSES)),
    "accuracy of scores": (m.accuracy, [SCORES, TWO],
                           lambda: measures.accuracy_score(TWO, SCORES > 0.5)),
    "threshold": (lambda x, y: m.accuracy(x, y, threshold=0.3), [SCORES, TWO],
                  lambda: measures.accuracy_score(TWO, SCORES >= 0.3)),
    "top k": (lambda x, y: m.top_k(x, y, 2), [LOGITS, LABELS],
              lambda: measures.top_k_accuracy_score(LABELS, LOGITS, k=2, labels=range(5))),
    "confusion": (lambda x, y: m.confusion_matrix(x, y, 5), [LOGITS, LABELS],
                  lambda: measures.confusion_matrix(LABELS, CLASSES, labels=range(5))),
    "auc": (m.auc, [SCORES, TWO], lambda: measures.roc_auc_score(TWO, SCORES)),
    "mse": (m.mse, [CLOSE, REAL], lambda: measures.mean_squared_error(REAL, CLOSE)),
    "mae": (m.mae, [CLOSE, REAL], lambda: measures.mean_absolute_error(REAL, CLOSE)),
    "r2": (m.r2, [CLOSE[:, 0], REAL[:, 0]], lambda: measures.r2_score(REAL[:, 0], CLOSE[:, 0])),
    "mean": (m.mean, [CLOSE], CLOSE.mean),
    "perplexity": (lambda x, y: m.perplexity(gf.nn.cross_entropy(x, y)), [LOGITS, LABELS],
                   lambda: np.exp(measures.log_loss(
                       LABELS, np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True),
                       labels=range(5)))),
    "weighted accuracy": (lambda x, y, w: m.accuracy(x, y, weights=w), [LOGITS, LABELS, WEIGHTS],
                          lambda: measures.accuracy_score(LABELS, CLASSES, sample_weight=WEIGHTS)),
    "weighted auc": (lambda x, y, w: m.auc(x, y, weights=w), [SCORES, TWO, WEIGHTS],
                     lambda: measures.roc_auc_score(TWO, SCORES, sample_weight=WEIGHTS)),
    "weighted r2": (lambda x, y, w: m.r2(x, y, weights=w), [CLOSE[:, 0], REAL[:, 0], WEIGHTS],
                    lambda: measures.r2_score(REAL[:, 0], CLOSE[:, 0], sample_weight=WEIGHTS)),
    "weighted mse": (lambda x, y, w: m.mse(x, y, weights=w), [CLOSE, REAL, WEIGHTS],
                     lambda: measures.mean_squared_error(REAL, CLOSE, sample_weight=WEIGHTS)),
}  # fmt: skip
OF_CLASSES = {
    "precision": (m.precision, measures.precision_score),
    "recall": (m.recall, measures.recall_score), "f1": (m.f1, measures.f1_score),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_batches_give_the_metric_of_all_examples(name: str) -> None:
    make, arrays, wanted = CASES[name]
    np.testing.assert_allclose(over_batches(make, *arrays), wanted(), 1e-6)


@pytest.mark.parametrize("name", OF_CLASSES)
@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "none", "binary"])
def test_scores_of_classes_are_those_of_scikit_learn(name: str, average: str) -> None:
    ours, theirs = OF_CLASSES[name]
    if average == "binary":
        found = over_batches(ours, SCORES, TWO)
        wanted = theirs(TWO, SCORES > 0.5)
    else:
        found = over_batches(lambda x, y: ours(x, y, 5, average=average), LOGITS, LABELS)
        classes = range(5) if average == "none" else None
        kind = None if average == "none" else average
        wanted = theirs(LABELS, CLASSES, average=kind, labels=classes, zero_division=0)
    np.testing.assert_allclose(found, wanted, 1e-12)


def test_shards_of_a_batch_change_nothing() -> None:
    """The rows of a batch over two devices, where 37 do not divide evenly."""
    two = gf.Cluster.here(devices=("cpu:0", "cpu:1"), threads=1)
    for name in ("accuracy", "auc", "r2"):
        make, arrays, wanted = CASES[name]
        assert over_batches(make, *arrays, cluster=two) == pytest.approx(wanted(), 1e-6)


def test_padding_of_no_weight_does_not_count_even_if_it_is_not_finite() -> None:
    losses = np.array([[1.0, 2.0, np.nan], [4.0, np.inf, np.nan]])
    mask = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    with gf.Session() as session:
        found = m.evaluate(session, {"mean": m.mean(losses, weights=mask)}, [{}, {}])
    assert found == {"mean": pytest.approx(7 / 3)}


def test_a_metric_of_ones_own_is_sums_and_a_ratio() -> None:
    x = gf.placeholder("float64", (None,))
    root = m.Metric((gf.sum(x * x), gf.sum(gf.ones_like(x))), lambda t: np.sqrt(t[0] / t[1]))
    with gf.Session() as session:
        found = m.evaluate(session, {"root": root}, [{x: [3.0]}, {x: [4.0, 5.0]}])
    assert found["root"] == pytest.approx(np.sqrt(50 / 3))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda x, y: m.accuracy(y, x), DTypeError, "labels must be ints or bools, not float32"),
        (lambda x, y: m.accuracy(x[None], y), ShapeError, r"outputs must be \(…, classes\)"),
        (m.mse, ShapeError, "predictions and labels differ in shape"),
        (lambda x, y: m.f1(x, y, 5), ArgumentError, "is for 2 classes; of 5, take"),
        (lambda x, y: m.f1(x, y, 5, average="mean"), ArgumentError, "average must be one of"),
        (lambda x, y: m.top_k(x, y, 0), ArgumentError, "k must be an int from 1, not 0"),
        (lambda x, y: m.mean(x, weights=np.ones(7)), ShapeError, "must have the first axes"),
    ],
)
def test_wrong_inputs_are_refused(make: Any, kind: Any, message: str) -> None:
    x, y = gf.placeholder("float32", (4, 5)), gf.placeholder("int64", (4,))
    with pytest.raises(kind, match=message):
        make(x, y)


def test_labels_out_of_range_and_no_batches_are_told() -> None:
    y = gf.placeholder("int64", (None,))
    metric = m.confusion_matrix(y, y, 3)
    with gf.Session() as session:
        with pytest.raises(ArgumentError, match="there was no batch"):
            m.evaluate(session, {"it": metric}, [])
        with pytest.raises(OpError, match="3"):
            m.evaluate(session, {"it": metric}, [{y: [0, 3]}])
        with pytest.raises(ArgumentError, match="'it' must be a metric"):
            m.evaluate(session, {"it": y}, [{y: [0]}])  # type: ignore[dict-item]
