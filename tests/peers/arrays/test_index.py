"""Sorting, gathering and scattering against torch, on random shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
SEEDS = st.integers(0, 999)
AXES = st.integers(0, 2)


def numbers(shape: tuple[int, ...], seed: int) -> Any:
    """No two are equal, so that sorting has one gradient."""
    rng = np.random.default_rng(seed)
    return (rng.permutation(int(np.prod(shape))) + rng.uniform(0.1, 0.9)).reshape(shape) / 7 - 1


@settings(max_examples=40, deadline=None)
@given(SHAPES, AXES, SEEDS, st.booleans())
def test_sort_and_top_k(shape: tuple[int, ...], axis: int, seed: int, down: bool) -> None:
    axis %= len(shape)
    k = 1 + seed % shape[axis]
    x = numbers(shape, seed)
    agree(
        lambda x: gf.sort(x, axis, descending=down),
        lambda x: torch.sort(x, axis, down).values,
        [x],
    )
    agree(
        lambda x: gf.top_k(x, k, axis, down)[0],
        lambda x: torch.topk(x, k, axis, down).values,
        [x],
    )
    agree(lambda x: gf.cummax(x, axis), lambda x: torch.cummax(x, axis).values, [x])
    agree(lambda x: gf.cummin(x, axis), lambda x: torch.cummin(x, axis).values, [x])


@settings(max_examples=40, deadline=None)
@given(SHAPES, AXES, SEEDS, st.integers(1, 5))
def test_gather_and_scatter_with_every_reduction(
    shape: tuple[int, ...], axis: int, seed: int, count: int
) -> None:
    axis %= len(shape)
    rng = np.random.default_rng(seed)
    chosen = tuple(count if i == axis else int(rng.integers(1, n + 1)) for i, n in enumerate(shape))
    i = rng.integers(0, shape[axis], chosen)
    t = torch.tensor(i)
    x, u = numbers(shape, seed), numbers(chosen, seed + 1) + 0.01
    agree(lambda x: gf.gather(x, i, axis), lambda x: torch.gather(x, axis, t), [x])
    agree(
        lambda x, u: gf.scatter(x, i, u, axis, "add"),
        lambda x, u: torch.scatter_add(x, axis, t, u),
        [x, u],
    )
    for ours, theirs in (("mul", "prod"), ("min", "amin"), ("max", "amax")):
        agree(
            lambda x, u, r=ours: gf.scatter(x, i, u, axis, r),
            lambda x, u, r=theirs: torch.scatter_reduce(x, axis, t, u, r),
            [x, u],
        )


@settings(max_examples=40, deadline=None)
@given(SHAPES, AXES, SEEDS)
def test_setting_distinct_places(shape: tuple[int, ...], axis: int, seed: int) -> None:
    """Of duplicates, torch says only that some update stays."""
    axis %= len(shape)
    rng = np.random.default_rng(seed)
    i = np.argsort(rng.random(shape), axis)
    i = np.take(i, range(1 + seed % shape[axis]), axis)
    x, u = numbers(shape, seed), numbers(i.shape, seed + 1)
    agree(
        lambda x, u: gf.scatter(x, i, u, axis),
        lambda x, u: torch.scatter(x, axis, torch.tensor(i), u),
        [x, u],
    )


@settings(max_examples=40, deadline=None)
@given(SHAPES, AXES, SEEDS, st.integers(0, 6))
def test_rows_are_taken_and_added(shape: tuple[int, ...], axis: int, seed: int, count: int) -> None:
    axis %= len(shape)
    i = np.random.default_rng(seed).integers(0, shape[axis], count)
    x = numbers(shape, seed)
    u = np.take(x, i, axis) + 1
    agree(
        lambda x: gf.take(x, i, axis),
        lambda x: torch.index_select(x, axis, torch.tensor(i)),
        [x],
    )
    agree(
        lambda x, u: gf.index_add(x, i, u, axis),
        lambda x, u: torch.index_add(x, axis, torch.tensor(i), u),
        [x, u],
    )


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.booleans())
def test_several_index_tensors(seed: int, apart: bool) -> None:
    rng = np.random.default_rng(seed)
    i, j = rng.integers(-3, 3, (2, 4)), rng.integers(-3, 3, (4,))
    x = numbers((3, 4, 5), seed)
    p, q = torch.tensor(i), torch.tensor(j)
    if apart:
        agree(lambda x: x[i, :, j], lambda x: x[p, :, q], [x])
    else:
        agree(lambda x: x[:, i, j], lambda x: x[:, p, q], [x])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), SEEDS)
def test_products_with_sparse_matrices(m: int, n: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((m, n)) * (rng.random((m, n)) < 0.4)
    s = gf.sparse.from_dense(a)
    rows, columns = map(torch.tensor, np.nonzero(a))

    def theirs(values: Any, x: Any) -> Any:
        return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, (m, n)).to_dense() @ x

    agree(
        lambda values, x: s.with_values(values) @ x,
        theirs,
        [a[np.nonzero(a)], rng.standard_normal((n, width))],
    )
