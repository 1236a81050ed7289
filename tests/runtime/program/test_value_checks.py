"""Integers that ops refuse: native checks raise the op's error, and the step changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import OpError

X = np.arange(12, dtype="float32").reshape(4, 3)


def test_an_index_outside_names_its_node_and_the_next_step_runs() -> None:
    x, i, j = gf.placeholder("float32", (4, 3)), *(gf.placeholder("int64", (2,)) for _ in range(2))
    first = gf.take(x, i, 0)
    second = gf.take(first, j, 1)
    count = gf.variable(np.zeros(1, "float32"), name="count")
    step = gf.assign(count, count + 1)
    with gf.Session() as s:
        for bad, where in (([0, 4], "index 4 is outside axis 0 of size 4"), ([-5, 9], "index -5")):
            with pytest.raises(OpError, match=where) as caught:
                s.run([second, step], {x: X, i: np.array(bad), j: np.array([0, 1])})
            assert f"made at {first.node.location}" in str(caught.value)
        with pytest.raises(OpError, match="index 3 is outside axis 1") as caught:
            s.run([second, step], {x: X, i: np.array([0, 1]), j: np.array([0, 3])})
        assert f"made at {second.node.location}" in str(caught.value)
        found, _ = s.run([second, step], {x: X, i: np.array([0, -1]), j: np.array([2, 0])})
        np.testing.assert_array_equal(found, [[2, 0], [11, 9]])
        assert s.get(count) == [1]


def test_a_traced_step_refuses_the_same() -> None:
    x, i = gf.placeholder("float32", (4, 3)), gf.placeholder("int32", (4, 1))
    y = gf.take_along_axis(x, i, 1)
    with gf.Session() as s, s.trace():
        s.run(y, {x: X, i: np.zeros((4, 1), "int32")})
        with pytest.raises(OpError, match="index 7 is outside axis 1 of size 3"):
            s.run(y, {x: X, i: np.full((4, 1), 7, "int32")})
        np.testing.assert_array_equal(s.run(y, {x: X, i: np.full((4, 1), -1, "int32")}), X[:, 2:])


def test_labels_are_checked_once_for_the_loss_and_its_gradient() -> None:
    x, labels = gf.placeholder("float32", (4, 3)), gf.placeholder("uint8", (4,))
    loss = gf.mean(gf.nn.cross_entropy(x, labels))
    with gf.Session() as s:
        for fetches in ([loss, gf.gradients(loss, [x])], gf.gradients(loss, [x])):
            with pytest.raises(OpError, match=r"\[0, 3\), got values from 0 to 200; logits have 3"):
                s.run(fetches, {x: X, labels: np.array([0, 200, 1, 2], "uint8")})
            s.run(fetches, {x: X, labels: np.array([0, 2, 1, 2], "uint8")})


def test_a_loop_checks_the_indices_of_each_turn() -> None:
    x, at = gf.placeholder("float32", (4,)), gf.placeholder("int64", (3,))
    _, found = gf.scan(
        lambda total, i: (total + gf.take(x, i), gf.take(x, i)), gf.constant(0.0, "float32"), at
    )
    with gf.Session() as s:
        np.testing.assert_array_equal(
            s.run(found, {x: X[:, 1], at: np.array([2, 0, 3])}), [7, 1, 10]
        )
        with pytest.raises(OpError, match="index 4 is outside"):
            s.run(found, {x: X[:, 1], at: np.array([2, 4, 3])})
