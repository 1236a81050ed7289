"""The loss of connectionist temporal classification: against all alignments, slopes, refusals."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn

RANDOM = np.random.default_rng(0)


def value(tensor: Any) -> Any:
    return evaluate([tensor])[0]


def log_probabilities(*shape: int, spread: float = 1.0) -> np.ndarray:
    x = RANDOM.normal(0, spread, shape)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def by_all_alignments(x: np.ndarray, labels: list[int], blank: int) -> float:
    """Return the loss as a sum over all sequences of classes that collapse to the labels."""
    total = 0.0
    for path in product(range(x.shape[1]), repeat=len(x)):
        merged = [c for i, c in enumerate(path) if not i or c != path[i - 1]]
        if [c for c in merged if c != blank] == labels:
            total += np.exp(sum(x[t, c] for t, c in enumerate(path)))
    return -np.log(total) if total else np.inf


@pytest.mark.parametrize("labels", [[], [1], [1, 1], [2, 0], [0, 2, 0], [0, 0, 0]])
def test_the_loss_is_that_of_all_alignments(labels: list[int]) -> None:
    x = log_probabilities(5, 4)
    want = by_all_alignments(x, labels, 3)
    assert value(nn.ctc_loss(x, np.array(labels, "int64"), blank=3)) == pytest.approx(want)
    padded = np.array([[*labels, 7, -1], [2, 1, 1, 1, 1][: len(labels) + 2]])
    both = value(nn.ctc_loss(np.stack([x, x], 1), padded, [5, 4], [len(labels), 1], blank=3))
    np.testing.assert_allclose(both, [want, by_all_alignments(x[:4], [2], 3)])


def test_impossible_alignments_are_infinite_without_a_slope() -> None:
    x = gf.placeholder("float32", (2, 1, 3))
    for zero, told in ((False, np.inf), (True, 0.0)):
        loss = nn.ctc_loss(x, [[1, 1]], zero_infinity=zero)
        have, slope = evaluate(
            [loss, *gf.gradients(loss, [x])], {x: log_probabilities(2, 1, 3).astype("f")}
        )
        assert have.tolist() == [told] and not slope.any()
    certain = np.where(np.arange(3) == 1, 0.0, -np.inf)
    assert value(nn.ctc_loss(np.stack([certain] * 3), np.array([1]))) == 0
    assert np.isnan(value(nn.ctc_loss(np.full((3, 3), np.nan), np.array([1]))))
    assert value(nn.ctc_loss(np.zeros((0, 2, 3)), np.zeros((2, 0), "int64"))).tolist() == [0, 0]


def test_long_and_unlikely_sequences_keep_their_digits() -> None:
    x = np.where(np.arange(4) == 0, 0.0, -30.0) + np.zeros((2000, 1, 1))
    loss = value(nn.ctc_loss(x, np.full((1, 3), 2)))  # three labels with blanks between them
    ways = np.log(2000.0 * 1999 * 1998 / 6)
    assert loss[0] == pytest.approx(90 - ways, rel=1e-3)
    far = value(nn.ctc_loss(np.full((3000, 1, 2), -1e4), np.array([[1]])))
    assert far[0] == pytest.approx(3e7 - np.log(3000 * 3001 / 2), rel=1e-12)


def test_slopes_of_both_orders_are_those_of_differences() -> None:
    given = log_probabilities(6, 2, 4, spread=2.0)
    x = gf.placeholder("float64", given.shape)
    loss = nn.ctc_loss(nn.log_softmax(x), [[1, 1, 2], [3, 0, 0]], [6, 4], [3, 1], reduction="mean")
    (slope,) = gf.gradients(loss, [x])
    along = RANDOM.normal(size=given.shape)
    (second,) = gf.gradients(gf.sum(slope * along), [x])
    low, high = (given + h * along for h in (-1e-5, 1e-5))
    ends = [evaluate([loss, slope], {x: at}) for at in (low, high)]
    first, again = evaluate([slope, second], {x: given})
    assert (ends[1][0] - ends[0][0]) / 2e-5 == pytest.approx((first * along).sum(), rel=1e-6)
    np.testing.assert_allclose((ends[1][1] - ends[0][1]) / 2e-5, again, rtol=1e-5, atol=1e-8)


def test_a_session_computes_what_the_interpreter_does_and_vmap_stacks_calls() -> None:
    given = log_probabilities(30, 8, 5).astype("f")
    labels, counts = RANDOM.integers(1, 5, (8, 6)), RANDOM.integers(0, 7, 8)
    x, y = gf.placeholder("float32", ("t", "b", 5)), gf.placeholder("int32", ("b", "s"))
    loss = nn.ctc_loss(x, y, target_lengths=gf.placeholder("int32", ("b",), name="n"))
    feeds = {
        x: given,
        y: labels.astype("int32"),
        gf.Graph([loss]).placeholders[2].outputs[0]: counts.astype("int32"),
    }
    wanted = [loss, *gf.gradients(loss, [x])]
    want = evaluate(wanted, feeds)
    with gf.Session() as s:
        for have, other in zip(s.run(wanted, feeds), want, strict=True):
            assert have.tolist() == other.tolist()
    each = gf.vmap(lambda a, b, n: nn.ctc_loss(a, b, target_lengths=n), in_axes=(1, 0, 0))
    np.testing.assert_allclose(value(each(given, labels, counts)), want[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("mistake", "error", "told"),
    [
        (lambda: nn.ctc_loss(np.zeros((4, 2, 3)), [1, 2]), ShapeError, r"\(4, 2, 3\) and \(2,\)"),
        (lambda: nn.ctc_loss(np.zeros((4, 2, 3)), [[1, 2]]), ShapeError, "ctc at .*: 1 != 2"),
        (lambda: nn.ctc_loss(np.zeros((4, 3)), [1.5]), DTypeError, "ints"),
        (lambda: nn.ctc_loss(np.zeros((4, 3)), [1], blank=3), ShapeError, "blank 3 is none of 3"),
        (lambda: nn.ctc_loss(np.zeros((4, 3)), [1], blank=0.5), ArgumentError, "blank"),
        (lambda: nn.ctc_loss(np.zeros((4, 3)), [1], reduction="avg"), ArgumentError, "reduction"),
        (lambda: nn.ctc_loss(np.zeros((4, 3)), [1], zero_infinity=1), ArgumentError, "zero_inf"),
        (lambda: value(nn.ctc_loss(np.zeros((4, 3)), [5])), IndexError, "target 5 of sequence 0"),
        (
            lambda: value(nn.ctc_loss(np.zeros((4, 2, 3)), [[1], [1]], [4, 9])), IndexError,
            r"input length 9 of sequence 1 is outside \[0, 4\]",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told(mistake: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        mistake()
