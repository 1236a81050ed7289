"""Models drawn from a seed: they repeat, build, verify, run, and leave no family out."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from benchmarks.random_models import FAMILIES, INFERENCE, OPTIMIZERS, Step, draw

SEEDS = (0, 1, 2)
SMALL = 2_000_000
"""Bytes of variables and feeds of models that a test runs."""


def signature(step: Step) -> list[str]:
    """Return every node of a step with its op and specs, in build order."""
    return [f"{node.op.name} {node.specs}" for node in gf.Graph(step.fetches).walk()]


def size(step: Step) -> int:
    """Return the bytes of a step's variables and feeds."""
    held = sum(int(node.specs[0].nbytes) for node in gf.Graph(step.fetches).variables)
    return held + sum(array.nbytes for array in step.feeds.values())


def test_a_seed_and_an_index_give_the_same_model_and_the_same_feeds() -> None:
    for index in range(8):
        first, second = draw(3, index), draw(3, index)
        assert first == second
        one, two = first.build(), second.build()
        assert signature(one) == signature(two)
        for a, b in zip(one.feeds.values(), two.feeds.values(), strict=True):
            assert a.dtype == b.dtype
            assert np.array_equal(a, b)


def test_seeds_and_indices_give_different_models() -> None:
    described = {str(draw(seed, index)) for seed in SEEDS for index in range(15)}
    assert len(described) > 0.9 * len(SEEDS) * 15


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_models_build_verify_and_feed_what_they_read(seed: int) -> None:
    for index in range(60):
        model = draw(seed, index)
        step = model.build()
        graph = gf.Graph(step.fetches).verify()
        assert {t.node for t in step.feeds} == set(graph.placeholders), str(model)
        assert bool(graph.of_op("group")) is (model.choices.optimizer != INFERENCE), str(model)


@pytest.mark.slow
def test_every_family_optimizer_and_dtype_is_drawn() -> None:
    models = [draw(5, index) for index in range(300)]
    assert {m.choices.family for m in models} == set(FAMILIES)
    assert {m.choices.optimizer for m in models} == {*OPTIMIZERS, INFERENCE}
    assert {m.choices.dtype for m in models} == {"float32", "float64", "float16", "bfloat16"}
    assert {m.choices.autocast for m in models} == {"", "float16", "bfloat16"}
    assert {m.choices.is_sparse for m in models} == {True, False}
    assert max(m.depth for m in models) > 40
    assert max(m.width for m in models) > 1000
    assert max(m.batch for m in models) > 500


def test_pins_reach_every_layer_and_change_no_choice() -> None:
    model = next(m for m in (draw(1, i) for i in range(100)) if m.depth > 4)
    numbers: list[int] = []

    def pin(number: int) -> str:
        numbers.append(number)
        return f"/worker:{number % 2}"

    pinned, free = model.build(pin), model.build()
    assert numbers == list(range(free.layers))
    assert signature(pinned) == signature(free)
    devices = {str(node.device) for node in gf.Graph(pinned.fetches).variables}
    assert devices == {"/worker:0", "/worker:1"}


def test_one_small_model_of_each_family_runs_a_step_with_finite_numbers() -> None:
    wanted = set(FAMILIES)
    for index in range(300):
        model = draw(4, index)
        if model.choices.family not in wanted:
            continue
        step = model.build()
        if size(step) > SMALL or len(gf.Graph(step.fetches).nodes) > 400:
            continue
        wanted.discard(model.choices.family)
        with gf.Session() as session:
            values = session.run(step.fetches, step.feeds)
        assert np.isfinite(np.asarray(values[0], "float64")).all(), str(model)
    assert not wanted
