"""Tensors that stand side by side in one are cut each by itself, and nothing travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.parallel import Shard


def build_gated_layer(strategy: Any) -> tuple[list[Any], gf.Tensor, list[gf.Tensor]]:
    """A layer whose gate stands beside what it opens, and one behind it."""
    gf.random.seed(1)
    x = gf.placeholder("float64", ("n", 6), name="x")
    first = gf.variable(gf.init.glorot((6, 16), dtype="float64"), name="first")
    second = gf.variable(gf.init.glorot((8, 5), dtype="float64"), name="second")
    gate, value = gf.split(x @ first, 2, -1)
    loss = gf.mean(gf.square((gf.nn.silu(gate) * value) @ second))
    train = gf.optim.Adam(0.01).minimize(loss, strategy=strategy)
    return [loss, train], x, [first, second]


def test_a_gate_beside_its_value_takes_one_all_reduce() -> None:
    strategy = Shard({"model": 4}, {"second": ("model",)})
    report = strategy.report(build_gated_layer(strategy)[0])
    assert [c.kind for c in report.collectives] == ["all-reduce"]
    found = []
    for each in (strategy, None):
        fetches, x, variables = build_gated_layer(each)
        random = np.random.default_rng(0)
        with gf.Session() as s:
            losses = [s.run(fetches, {x: random.normal(size=(7, 6))})[0] for _ in range(3)]
            found.append([*losses, *(s.get(v) for v in variables)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_stretches_of_any_lengths_are_cut_as_whole_ones_are(data: Any) -> None:
    each = data.draw(st.integers(2, 5))
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    used = data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))
    shards = data.draw(st.integers(2, min(each, 3)))
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    total = each * sum(lengths)
    values = [random.normal(size=(each * n, 3)) for n in lengths]

    def build_model(strategy: Any) -> tuple[Any, gf.Tensor, gf.Tensor]:
        x = gf.placeholder("float64", ("n", 4), name="x")
        w = gf.variable(np.linspace(-1, 1, 4 * total).reshape(4, total), name="w")
        parts = gf.split(gf.sin(x @ w), [each * n for n in lengths], -1)
        loss = gf.constant(0.0, "float64")
        for i in sorted(used):
            own = gf.variable(values[i], name=f"own{i}")
            loss = loss + gf.mean(gf.square(parts[i] @ own))
        return [loss, gf.optim.SGD(0.1).minimize(loss, strategy=strategy)], x, w

    batch = random.normal(size=(3, 4))
    found = []
    rules = {f"own{i}": ("model",) for i in used}
    for strategy in (Shard({"model": shards}, rules), None):
        fetches, x, w = build_model(strategy)
        with gf.Session() as s:
            first = s.run(fetches, {x: batch})[0]
            found.append([first, s.run(fetches, {x: batch})[0], s.get(w)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rule", [{"x": (None, "m")}, {"x": ("m",)}])
def test_a_table_of_which_a_part_is_read_is_cut_as_it_is_said(rule: dict[str, Any]) -> None:
    x = gf.variable(np.arange(48.0).reshape(6, 8), name="x")
    y = gf.sum(gf.square(x[:4, :6]))
    strategy = Shard({"m": 2}, rule)
    train = gf.optim.SGD(0.25).minimize(y, strategy=strategy)
    with gf.Session() as s:
        assert s.run([y, train])[0] == np.square(np.arange(48.0).reshape(6, 8)[:4, :6]).sum()
        expected = np.arange(48.0).reshape(6, 8)
        expected[:4, :6] /= 2
        np.testing.assert_allclose(s.get(x), expected)
