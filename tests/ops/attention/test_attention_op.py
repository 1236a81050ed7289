"""Attention and rotary embeddings: against plain formulas, in little memory, refusing bad input."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY
from graphflow.ops import nn
from graphflow.ops.attention import block_patterns as attention_blocks
from graphflow.ops.attention import blockwise
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.ops.kernels.sequence import flash_attention
from graphflow.ops.kernels.sequence.attention_layouts import BandPattern


def value(tensor: Any) -> Any:
    return evaluate([tensor])[0]


def attend_by_matrix(q: Any, k: Any, v: Any, seen: Any = True, scale: float | None = None) -> Any:
    """Attention by the whole matrix; zeros for who sees nothing."""
    group = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, group, -3), np.repeat(v, group, -3)
    scores = q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    return weights @ v / np.where(total == 0, 1, total)


@given(
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    lengths=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    blocks=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 100)),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3, (2, None), (0, 1)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_blocks_of_any_size_give_what_the_whole_matrix_gives(
    heads: tuple[int, int], lengths: tuple[int, int], blocks: tuple[int, int, int], causal: bool,
    window: Any, seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    (shared, group), (t, s) = heads, lengths
    q = rng.normal(size=(2, shared * group, t, 3))
    k, v = rng.normal(size=(2, shared, s, 3)), rng.normal(size=(2, shared, s, 2))
    offset = s - t
    distance = np.arange(s) - np.arange(t)[:, None] - offset
    left, right = window if isinstance(window, tuple) else (window and window - 1,) * 2
    seen = distance <= (0 if causal else s + t if right is None else right)
    seen &= distance >= -(s + t if left is None else left)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("_QUERIES", "_KEYS", "_SCORES"), blocks, strict=True):
            patch.setattr(attention_blocks, name, size)
        have = value(nn.attention(q, k, v, causal=causal, window=window, offset=offset))
    np.testing.assert_allclose(have, attend_by_matrix(q, k, v, seen), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 1, 4, 5), (3, 1, 1, 1, 5), (3, 2, 4, 4, 5)])
def test_masks_broadcast_and_hide_or_are_added(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(3, 2, 4, n, 3)) for n in (4, 5, 5))
    if len(shape) == 4:
        q, k, v = q[0], k[0], v[0]
    mask = rng.random(shape) < 0.7
    want = attend_by_matrix(q, k, v, mask)
    np.testing.assert_allclose(value(nn.attention(q, k, v, mask)), want, rtol=1e-10)
    added = np.where(mask, 0, -np.inf)
    np.testing.assert_allclose(value(nn.attention(q, k, v, added)), want, rtol=1e-10)


def test_who_sees_nothing_gets_zeros_and_no_gradient() -> None:
    x = gf.placeholder("float64", (1, 2, 3))
    for mask in (np.zeros((2, 2), bool), np.full((2, 2), -np.inf)):
        y = nn.attention(x, x, x, mask)
        have, slope = evaluate([y, *gf.gradients(gf.sum(y), [x])], {x: np.ones((1, 2, 3))})
        assert not have.any() and not slope.any()


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_stays_far_below_the_matrix_of_all_pairs(gradient: bool) -> None:
    t = 8192
    q, k, v = np.zeros((3, 1, 1, t, 4), "f")
    attrs = {"scale": 0.5, "left": None, "right": 0, "offset": 0, "softcap": None}
    y, logs = blockwise.attention_kernel(np, q, k, v, **attrs)
    tracemalloc.start()
    if gradient:
        REGISTRY["attention_grad"].run(np, (y, logs, q, k, v, logs), attrs)
    else:
        REGISTRY["attention"].run(np, (q, k, v), attrs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < t * t * 4 / 50


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v, g = rng.normal(size=(4, 1, 4, 512, 32)).astype("f")
    attrs = {"scale": 0.2, "left": None, "right": 0, "offset": 0, "softcap": None}

    def both() -> list[bytes]:
        y, logs = REGISTRY["attention"].run(np, (q, k, v), attrs)
        grads = REGISTRY["attention_grad"].run(np, (g, logs, q, k, v, logs), attrs)
        return [a.tobytes() for a in (y, logs, *grads)]

    alone, pool = both(), Pool(threads)
    with use_pool(pool):
        shared = both()
    pool.close()
    assert alone == shared


def test_sizes_may_be_unknown_and_halves_are_computed_in_float32() -> None:
    q = gf.placeholder("float16", (None, 2, "t", 4))
    y = nn.attention(q, q, q, causal=True)
    assert y.dtype == "float16" and y.shape == q.shape
    x = np.random.default_rng(0).normal(0, 4, (3, 2, 5, 4)).astype("float16")
    have, slope = evaluate([y, *gf.gradients(gf.sum(y), [q])], {q: x})
    wide = x.astype("float64")
    want = attend_by_matrix(wide, wide, wide, np.tri(5, dtype=bool))
    np.testing.assert_allclose(have, want, rtol=2e-3, atol=2e-3)
    assert slope.dtype == "float16" and np.isfinite(slope).all()


@pytest.mark.parametrize("shape", [(5, 4), (None, 5, 4), (None, "t", 4)])
def test_one_head_needs_no_axis(shape: tuple[int | str | None, ...]) -> None:
    q = gf.placeholder("float64", shape)
    x = np.random.default_rng(0).normal(size=(3, 5, 4)[-len(shape) :])
    mask = np.random.default_rng(1).random((*x.shape[:-1], 5)) < 0.6
    y = nn.attention(q, q, q, mask, causal=True, name="alone")
    assert y.shape == q.shape and y.name == "alone"
    have, slope = evaluate([y, *gf.gradients(gf.sum(y**2), [q])], {q: x})
    heads = x[None]
    want = attend_by_matrix(heads, heads, heads, mask & np.tri(5, dtype=bool))[0]
    np.testing.assert_allclose(have, want, atol=1e-12)
    whole = gf.constant(heads)
    loss = gf.sum(nn.attention(whole, whole, whole, mask, causal=True) ** 2)
    np.testing.assert_allclose(value(gf.gradients(loss, [whole])[0])[0], slope, atol=1e-12)


def test_attention_refuses_what_does_not_fit() -> None:
    q, k = gf.placeholder("float32", (2, 4, 3, 8)), gf.placeholder("float32", (2, 4, 5, 8))
    for few in (np.zeros((3, 8), "f"), np.float32(1)):
        told = r"attention at .*test_attention_op.*q \(.*of one rank"
        with pytest.raises(ShapeError, match=told):
            nn.attention(few, k, k)
    with pytest.raises(ShapeError, match="known multiple"):
        nn.attention(q, k[:, :3], k[:, :3])
    with pytest.raises(ShapeError, match="sizes of queries and keys differ"):
        nn.attention(q, k[..., :4], k)
    with pytest.raises(ShapeError, match="k and v differ"):
        nn.attention(q, k, k[:, :, :4])
    with pytest.raises(ShapeError, match="batches differ"):
        nn.attention(q, k[:1], k[:1])
    with pytest.raises(DTypeError, match="q is float32, k float64"):
        nn.attention(q, k.astype("float64"), k)
    with pytest.raises(DTypeError, match="mask must be bool or float32"):
        nn.attention(q, k, k, np.zeros((3, 5), "int64"))
    with pytest.raises(ShapeError, match=r"mask \(3, 4\) does not broadcast"):
        nn.attention(q, k, k, np.zeros((3, 4), bool))
    for wrong in ({"scale": 0}, {"softcap": -1}, {"window": 0}, {"window": (1, 2, 3)},
                  {"causal": 1}, {"offset": 0.5}):  # fmt: skip
        with pytest.raises(ArgumentError, match=rf"attention at .*{next(iter(wrong))}"):
            nn.attention(q, k, k, **wrong)  # type: ignore[arg-type]


# Rotary embeddings ------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [None, 4])
def test_rotary_turns_pairs_as_complex_numbers(interleaved: bool, size: int | None) -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 6))
    n = 6 if size is None else size
    angles = np.arange(5)[:, None] * 100.0 ** (-np.arange(0, n, 2) / n)
    a, b = (x[..., :n:2], x[..., 1:n:2]) if interleaved else (x[..., : n // 2], x[..., n // 2 : n])
    turned = (a + 1j * b) * np.exp(1j * angles)
    have = value(nn.rotary(x, base=100.0, size=size, interleaved=interleaved))
    parts = (
        (have[..., :n:2], have[..., 1:n:2])
        if interleaved
        else (have[..., : n // 2], have[..., n // 2 : n])
    )
    np.testing.assert_allclose(parts[0], turned.real, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(parts[1], turned.imag, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(have[..., n:], x[..., n:])


def test_scores_of_rotary_vectors_depend_on_their_distance_only() -> None:
    q, k = np.random.default_rng(0).normal(size=(2, 1, 8))
    here = [value(nn.rotary(np.repeat(x, 6, 0), np.arange(6) + 3)) for x in (q, k)]
    scores = here[0] @ here[1].T
    np.testing.assert_allclose(np.diag(scores, 2), np.full(4, scores[0, 2]), rtol=1e-9)


def test_rotary_refuses_what_does_not_fit() -> None:
    x = gf.placeholder("float32", (2, 5, 6))
    with pytest.raises(ArgumentError, match=r"rotary at .*test_attention_op.*even int"):
        nn.rotary(x, size=3)
    with pytest.raises(ArgumentError, match="base"):
        nn.rotary(x, base=0)
    with pytest.raises(ShapeError, match="two elements for each angle"):
        nn.rotary(x, size=8)
    with pytest.raises(ShapeError):
        nn.rotary(x, np.arange(4))
    with pytest.raises(ShapeError, match="one shape"):
        nn.rotate(x, np.zeros((5, 3), "f"), np.zeros((5, 2), "f"))
    with pytest.raises(DTypeError, match="cos float64"):
        nn.rotate(x, np.zeros((5, 3)), np.zeros((5, 3)))


@pytest.mark.parametrize("sizes", [(2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 3, 3)])
def test_no_queries_no_keys_and_no_examples_are_sizes_like_any_other(
    sizes: tuple[int, int, int],
) -> None:
    n, t, s = sizes
    q, k = gf.constant(np.ones((n, 4, t, 8))), gf.constant(np.ones((n, 2, s, 8)))
    y = nn.attention(q, k, k, mask=gf.constant(np.ones((t, s), bool)))
    first = gf.gradients(gf.sum(y * y), [q, k])
    second = gf.gradients(gf.sum(first[0]) + gf.sum(first[1] * first[1]), [q, k])
    results = evaluate([y, *first, *second])
    assert [r.shape for r in results] == [q.shape, *[q.shape, k.shape] * 2]
    assert not any(r.any() for r in results if not s)


@pytest.mark.parametrize("window", [(), [], (1,), (1, 2, 3)])
def test_a_window_of_other_than_two_sides_is_refused(window: Any) -> None:
    q = gf.constant(np.ones((1, 3, 4)))
    with pytest.raises(ArgumentError, match=r"test_attention_op\.py.*pair \(left, right\)"):
        nn.attention(q, q, q, window=window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float", "keys", "heads"])
@pytest.mark.parametrize("shape", [(3, 70, 70, 5), (4, 130, 600, 16), (2, 1, 33, 64)])
def test_native_blocks_give_what_the_formula_does(
    shape: tuple[int, ...], mask: str | None, causal: bool
) -> None:
    heads, t, s, d = shape
    rng = np.random.default_rng(0)
    shared = heads // 2 if heads % 2 == 0 else heads
    q, g = (rng.normal(size=(2, heads, t, d)) for _ in range(2))
    k, v = (rng.normal(size=(2, shared, s, d)) for _ in range(2))
    masks = {
        "bool": rng.random((2, 1, t, s)) < 0.7,
        "float": rng.normal(size=(t, s)),
        "keys": rng.random((2, 1, 1, s)) < 0.7,
        "heads": rng.normal(size=(heads, t, 1)),
    }
    given = [] if mask is None else [masks[mask]]
    attrs = {"scale": 0.3, "left": 40 if causal else None, "right": 0 if causal else None,
             "offset": s - t, "softcap": None}  # fmt: skip
    y, logs = REGISTRY["attention"].run(np, [q, k, v, *given], attrs)
    delta = (g * y).sum(-1)
    grads = REGISTRY["attention_grad"].run(np, [g, delta, q, k, v, logs, *given], attrs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise.flash_attention, "is_native", lambda *_: False)
        wanted = REGISTRY["attention"].run(np, [q, k, v, *given], attrs)
        wanted += REGISTRY["attention_grad"].run(np, [g, delta, q, k, v, logs, *given], attrs)
    for native, plain in zip((y, logs, *grads), wanted, strict=True):
        np.testing.assert_allclose(native, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pattern", [
    (None, 0, 0), (None, 0, 30), (None, 0, -30), (3, 2, 0), (0, 0, 100), (20, None, 40),
    (None, 0, -90),
])  # fmt: skip
def test_keys_that_few_or_no_queries_see_have_their_gradients_and_no_others(
    pattern: tuple[int | None, int | None, int],
) -> None:
    rng = np.random.default_rng(1)
    q, g = (rng.normal(size=(2, 75, 9)).astype("float32") for _ in range(2))
    k, v = (rng.normal(size=(1, 133, 9)).astype("float32") for _ in range(2))
    form = BandPattern(0.4, *pattern)
    y, logs = np.full_like(q, np.nan), np.full((2, 75), np.nan, "float32")
    found = [np.full_like(x, np.nan) for x in (q, k, v)]
    flash_attention.forward(y, logs, q, k, v, (), form)
    flash_attention.backward(found, g, np.empty_like(logs), q, k, v, logs, (), form, y=y)

    left, right, offset = pattern
    apart = np.arange(133) - np.arange(75)[:, None] - offset
    seen = np.full(apart.shape, True) if left is None else apart >= -left
    seen = seen if right is None else seen & (apart <= right)
    parts = [gf.placeholder("float64", x.shape) for x in (q, k, v)]
    wanted = nn.attention(*parts, seen[None], scale=0.4)
    loss = gf.sum(wanted * g.astype("float64"))
    feeds = {part: x.astype("float64") for part, x in zip(parts, (q, k, v), strict=True)}
    for have, want in zip(
        (y, *found), evaluate([wanted, *gf.gradients(loss, parts)], feeds), strict=True
    ):
        np.testing.assert_allclose(have, want, rtol=2e-4, atol=2e-5)


def test_attention_has_the_same_bits_for_any_number_of_threads() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 3, 200, 32)).astype("f") for _ in range(3))
    attrs = {"scale": 0.2, "left": None, "right": 0, "offset": 0, "softcap": None}
    found = []
    for threads in (1, 2, 4):
        with use_pool(Pool(threads)):
            y, logs = REGISTRY["attention"].run(np, [q, k, v], attrs)
            grads = REGISTRY["attention_grad"].run(np, [y, logs, q, k, v, logs], attrs)
        found.append([x.tobytes() for x in (y, logs, *grads)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_of_one_tensor_are_attended_to_where_they_are(shared: int, masked: bool) -> None:
    heads, t, d = 4, 70, 8
    rng = np.random.default_rng(shared)
    x = gf.placeholder("float64", (2, t, (heads + 2 * shared) * d))
    given = {x: rng.normal(size=x.shape)}
    mask = rng.random((t, t)) < 0.8 if masked else None

    def cut(start: int, count: int) -> gf.Tensor:
        part = x[:, :, start * d : (start + count) * d]
        return gf.permute_dims(gf.reshape(part, (2, t, count, d)), (0, 2, 1, 3))

    parts = [cut(0, heads), cut(heads, shared), cut(heads + shared, shared)]
    y = nn.attention(*parts, mask, causal=True)
    side_by_side = gf.reshape(gf.permute_dims(y, (0, 2, 1, 3)), (2, t, heads * d))
    apart = nn.attention(*(p + 0.0 for p in parts), mask, causal=True)
    ops = {node.op.name for node in gf.Graph([side_by_side]).nodes}
    assert "attention_packed" in ops
    assert not ops & {"attention", "permute_dims", "slice"}
    weights = rng.normal(size=y.shape)
    first, second = (gf.gradients(gf.sum(z * weights), [x])[0] for z in (y, apart))
    found = evaluate([y, apart, first, second], given)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found[2], found[3], rtol=1e-10, atol=1e-12)


def test_parts_of_several_tensors_are_not_taken_for_parts_of_one() -> None:
    x, z = (gf.placeholder("float32", (2, 5, 24)) for _ in range(2))

    def cut(x: gf.Tensor, start: int) -> gf.Tensor:
        part = x[:, :, start : start + 8]
        return gf.permute_dims(gf.reshape(part, (2, 5, 2, 4)), (0, 2, 1, 3))

    for q, k, v in (
        (cut(x, 0), cut(z, 8), cut(x, 16)),
        (cut(x, 8), cut(x, 0), cut(x, 16)),
        (cut(x, 0), cut(x, 0), cut(x, 16)),
    ):
        names = {node.op.name for node in gf.Graph([nn.attention(q, k, v)]).nodes}
        assert "attention" in names
        assert "attention_packed" not in names
