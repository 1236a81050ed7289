"""Normalisation against torch, on random shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

F = torch.nn.functional
SHAPES = st.tuples(st.integers(2, 4), st.integers(1, 6)).flatmap(
    lambda head: st.lists(st.integers(2, 4), max_size=2).map(lambda tail: (*head, *tail))
)
IMAGES = st.tuples(*[st.integers(1, 4)] * 2, *[st.integers(2, 4)] * 2)
SEEDS = st.integers(0, 99)
EPSILONS = st.sampled_from([1e-5, 0.1])


def draw(shape: tuple[int, ...], seed: int, parameters: int) -> list[np.ndarray]:
    """x, and parameters (C,) above 0."""
    rng = np.random.default_rng(seed)
    return [rng.normal(1, 2, shape), *(rng.uniform(0.5, 2, shape[1]) for _ in range(parameters))]


@given(SHAPES, SEEDS, EPSILONS)
@settings(max_examples=25)
def test_batch_norm_by_given_statistics(shape: tuple[int, ...], seed: int, epsilon: float) -> None:
    x, scale, bias, mean, variance = draw(shape, seed, 4)
    agree(
        lambda x, w, b: nn.batch_norm(x, w, b, mean, variance, epsilon=epsilon),
        lambda x, w, b: F.batch_norm(
            x, torch.tensor(mean), torch.tensor(variance), w, b, eps=epsilon
        ),
        [x, scale, bias],
    )


@given(SHAPES, SEEDS, st.floats(0, 1), st.booleans())
@settings(max_examples=25)
def test_batch_norm_in_training_and_what_becomes_of_its_statistics(
    shape: tuple[int, ...], seed: int, momentum: float, channels_last: bool
) -> None:
    x, scale, bias, mean, variance = draw(shape, seed, 4)
    moved: list[Any] = []

    def ours(x: Any, w: Any, b: Any) -> Any:
        y, *stats = nn.batch_norm(
            x, w, b, mean, variance, training=True, momentum=momentum, channels_last=channels_last
        )
        moved.append(((x, w, b), stats))
        return y

    m, v = torch.tensor(mean), torch.tensor(variance)

    def theirs(x: Any, w: Any, b: Any) -> Any:
        if channels_last:
            x = x.movedim(-1, 1)
        y = F.batch_norm(x, m, v, w, b, training=True, momentum=momentum)
        return y.movedim(1, -1) if channels_last else y

    given = np.moveaxis(x, 1, -1) if channels_last else x
    agree(ours, theirs, [np.ascontiguousarray(given), scale, bias], rtol=1e-7, atol=1e-8)
    fed, stats = moved[0]
    feeds = dict(zip(fed, (given, scale, bias), strict=True))
    for have, want in zip(evaluate(stats, feeds), (m, v), strict=True):
        np.testing.assert_allclose(have, want.numpy(), rtol=1e-9)


@given(IMAGES, SEEDS, EPSILONS, st.booleans())
@settings(max_examples=25)
def test_instance_norm(
    shape: tuple[int, ...], seed: int, epsilon: float, channels_last: bool
) -> None:
    def ours(x: Any, w: Any, b: Any) -> Any:
        return nn.instance_norm(x, w, b, epsilon, channels_last)

    def theirs(x: Any, w: Any, b: Any) -> Any:
        x = x.movedim(-1, 1) if channels_last else x
        y = F.instance_norm(x, weight=w, bias=b, eps=epsilon)
        if y.requires_grad:  # torch's gradient is wrong for cotangents that are views
            y.register_hook(lambda g: g.contiguous())
        return y.movedim(1, -1) if channels_last else y

    x, w, b = draw(shape, seed, 2)
    if channels_last:
        x = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    agree(ours, theirs, [x, w, b], rtol=1e-7, atol=1e-8)


@given(SHAPES, st.integers(1, 3), SEEDS, EPSILONS, st.booleans())
@settings(max_examples=25)
def test_group_norm(
    shape: tuple[int, ...], groups: int, seed: int, epsilon: float, channels_last: bool
) -> None:
    shape = (shape[0], shape[1] * groups, *shape[2:], 3)

    def theirs(x: Any, w: Any, b: Any) -> Any:
        x = x.movedim(-1, 1) if channels_last else x
        y = F.group_norm(x, groups, w, b, epsilon)
        return y.movedim(1, -1) if channels_last else y

    x, w, b = draw(shape, seed, 2)
    if channels_last:
        x = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    agree(
        lambda x, w, b: nn.group_norm(x, groups, w, b, epsilon, channels_last),
        theirs,
        [x, w, b],
        rtol=1e-7,
        atol=1e-8,
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), SEEDS, EPSILONS)
@settings(max_examples=25)
def test_layer_and_rms_norm_over_the_last_axes(
    shape: list[int], rank: int, seed: int, epsilon: float
) -> None:
    inner = tuple(shape[-rank:])
    axes = tuple(range(-len(inner), 0))
    rng = np.random.default_rng(seed)
    x, w, b = rng.normal(size=shape), rng.normal(size=inner), rng.normal(size=inner)
    agree(
        lambda x, w, b: nn.layer_norm(x, w, b, axes, epsilon),
        lambda x, w, b: F.layer_norm(x, inner, w, b, epsilon),
        [x, w, b],
        rtol=1e-6,
        atol=1e-7,
    )
    agree(
        lambda x, w: nn.rms_norm(x, w, axes, epsilon),
        lambda x, w: F.rms_norm(x, inner, w, epsilon),
        [x, w],
    )
