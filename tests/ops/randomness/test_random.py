"""Random ops: Philox against known answers, streams, seeds, steps and distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphflow.errors import ArgumentError, DTypeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY, as_tensor, name_scope
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.ops.randomness import philox, random
from graphflow.ops.reductions.reduce import sum
from graphflow.transforms.reverse_mode import gradients
from graphflow.transforms.vmap import vmap

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: Any, key: Any, words: tuple[int, ...]
) -> None:
    assert tuple(int(w) for w in philox.philox(np, counter, key)) == words
    twice = philox.philox(np, tuple(np.full(2, c, "uint64") for c in counter), key)
    assert [w.tolist() for w in twice] == [[w, w] for w in words]


def test_words_are_a_function_of_their_index_alone() -> None:
    whole = philox.words(np, 70_001, (5, 1), 2)
    assert (philox.words(np, 13, (5, 1), 2) == whole[:13]).all()
    seed, number, step, block = 5, 1, 2, 69_999 // 4
    one = philox.philox(np, (block, 0, step, number), (seed, 0))
    assert int(one[69_999 % 4]) == whole[69_999]


def test_seeds_streams_and_steps_all_change_the_words() -> None:
    cases = [((0, 0), 0), ((1, 0), 0), ((2**32, 0), 0), ((0, 1), 0), ((0, 0), 1), ((0, 0), 2**32)]
    drawn = {philox.words(np, 4, stream, step).tobytes() for stream, step in cases}
    assert len(drawn) == len(cases)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_uniform_numbers_fill_their_interval_evenly(dtype: str) -> None:
    with random.seed(1):
        x = random.uniform((20_001,), -1, 3, dtype)
    have = evaluate([x])[0]
    assert have.dtype == np.dtype(dtype)
    assert have.min() >= -1 and have.max() < 3
    counts = np.histogram(have.astype(float), bins=8, range=(-1, 3))[0]
    assert np.abs(counts - 2500).max() < 250


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_normal_numbers_have_the_moments_of_a_normal(dtype: str) -> None:
    with random.seed(2):
        x = random.normal((201, 101), 1.0, 2.0, dtype)
    have = evaluate([x])[0].astype(float)
    assert have.shape == (201, 101)
    unit = (have - 1) / 2
    moments = [np.mean(unit**k) for k in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.15)
    assert np.corrcoef(unit.ravel()[::2][:-1], unit.ravel()[1::2])[0, 1] == pytest.approx(
        0, abs=0.03
    )


def test_bernoulli_takes_a_number_or_probabilities() -> None:
    with random.seed(4):
        coin, certain, never = (random.bernoulli(p, (10_000,)) for p in (0.3, 1, 0))
        each = random.bernoulli(as_tensor(np.array([0.0, 0.5, 1.0])), shape=(2000, 3))
    drawn = evaluate([coin, certain, never, each])
    assert [d.dtype for d in drawn] == [np.bool_] * 4
    assert drawn[0].mean() == pytest.approx(0.3, abs=0.02)
    assert (drawn[1].all(), drawn[2].any()) == (True, False)
    assert drawn[3].mean(0) == pytest.approx([0, 0.5, 1], abs=0.04)


@pytest.mark.parametrize("below", [1, 6, 2**32 - 1, 2**32, 10**12 + 7, 2**63 + 9, 2**64])
def test_integers_are_the_upper_half_of_a_product_of_64_bits(below: int) -> None:
    words = philox.words(np, 600, (3, 1), 0).reshape(-1, 2).tolist()
    wanted = [(a + (b << 32)) * below >> 64 for a, b in words]
    assert philox.integers(np, 300, below, (3, 1), 0).tolist() == wanted
    assert philox.integers(np, 7, below, (3, 1), 0, first=5).tolist() == wanted[5:12]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_integers_fill_their_interval_evenly(dtype: str) -> None:
    held = np.iinfo(dtype)
    with random.seed(5):
        die = random.randint(6, shape=(60_000,), dtype=dtype)
        most = random.randint(held.max - 2, int(held.max) + 1, (3000,), dtype)
        every = random.randint(int(held.min), int(held.max) + 1, (200, 100), dtype)
    drawn, high, wide = evaluate([die, most, every])
    assert {v.dtype for v in (drawn, high, wide)} == {np.dtype(dtype)}
    assert np.abs(np.bincount(drawn) - 10_000).max() < 500
    assert set(high.tolist()) == {int(held.max) - k for k in range(3)}
    assert np.histogram(wide.astype(float), bins=4)[0] == pytest.approx([5000] * 4, rel=0.06)


def test_categories_come_as_often_as_their_softmax_says() -> None:
    shares = np.array([0.1, 0.2, 0.0, 0.7])
    with np.errstate(divide="ignore"):
        logits = as_tensor(np.tile(np.log(shares).astype("float32")[:, None], (1, 20_000)))
    with random.seed(5):
        drawn = random.categorical(logits, axis=0)
    (found,) = evaluate([drawn])
    assert (found.dtype, found.shape) == (np.int64, (20_000,))
    often = np.bincount(found, minlength=4) / 20_000
    assert often[2] == 0
    np.testing.assert_allclose(often, shares, atol=0.015)


def test_a_permutation_has_every_order_as_often() -> None:
    with random.seed(6):
        orders = vmap(lambda x: random.permutation(3) + x)(as_tensor(np.zeros(6000, "int64")))
    counts = np.unique(evaluate([orders])[0], axis=0, return_counts=True)[1]
    assert counts == pytest.approx([1000] * 6, abs=120)


def test_slices_of_a_tensor_are_permuted_as_whole_rows_and_gradients_go_back() -> None:
    x = placeholder("float64", (None, 3))
    rows, columns = random.permutation(x), random.permutation(x, axis=1)
    count, none = random.permutation(x.shape[0]), random.permutation(0)
    (back,) = gradients(sum(rows * rows), [x])
    value = np.arange(15.0).reshape(5, 3)
    shuffled, turned, order, empty, grad = evaluate([rows, columns, count, none, back], {x: value})
    assert sorted(shuffled[:, 0].tolist()) == value[:, 0].tolist()
    assert (shuffled[:, 1:] - shuffled[:, :1] == [1, 2]).all()
    assert sorted(turned[0].tolist()) == value[0].tolist()
    assert (turned - turned[:1] == value - value[:1]).all()
    assert sorted(order.tolist()) == list(range(5)) and empty.shape == (0,)
    assert (grad == 2 * value).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: random.randint(3, 3), "low 3 is not below high 3"),
        (lambda: random.randint(1.5), "high must be an int, got 1.5"),
        (lambda: random.randint(0, 257, dtype="uint8"), "uint8 holds 0 to 255, not 0 to 256"),
        (lambda: random.randint(as_tensor(3)), "scale gf.random.uniform"),
        (lambda: random.permutation(as_tensor(3)), "a scalar has no slices"),
    ],
)
def test_what_is_no_interval_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"random\.\w+ at .*test_random\.py.*{message}"):
        make()


def test_names_of_other_libraries_are_told_what_stands_for_them() -> None:
    with pytest.raises(AttributeError, match=r"gf\.random has no attribute 'randperm'; it is gf"):
        _ = random.randperm


def test_a_seed_is_a_statement_or_a_block() -> None:
    with random.seed(7):
        a, b = random.uniform((4,)), random.uniform((4,))
    with random.seed(7):
        c = random.uniform((4,))
        with random.seed(8):
            inner = random.uniform((4,))
        d = random.uniform((4,))
    outside = random.seed(7)
    e = random.uniform((4,))
    outside.__exit__(None, None, None)
    values = [v.tolist() for v in evaluate([a, b, c, d, e, inner])]
    assert values[0] == values[2] == values[4]
    assert values[1] == values[3]
    assert len({str(v) for v in values}) == 3


def test_streams_go_on_counting_inside_name_scopes() -> None:
    with random.seed(7):
        a = random.uniform(())
        with name_scope("inside"):
            b = random.uniform(())
    assert [t.node.attrs["stream"] for t in (a, b)] == [(7, 0), (7, 1)]


def test_numbers_are_drawn_anew_in_each_step_and_the_same_in_the_same() -> None:
    x = random.normal((8,))
    steps = [evaluate([x], step=s)[0].tolist() for s in (0, 1, 0)]
    assert steps[0] == steps[2] != steps[1]


def test_shapes_may_be_those_of_fed_tensors() -> None:
    x = placeholder("float32", (None, 3))
    noisy = x + random.normal(x.shape)
    assert evaluate([noisy], {x: np.zeros((5, 3), "f")})[0].shape == (5, 3)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "0"])
def test_a_seed_is_a_whole_number_of_64_bits(seed: Any) -> None:
    with pytest.raises(ArgumentError, match=r"random\.seed at .*test_random\.py"):
        random.seed(seed)


def test_wrong_parameters_are_refused_with_the_line() -> None:
    for wrong in (
        lambda: random.uniform((2,), 1, 0),
        lambda: random.normal((2,), std=-1),
        lambda: random.normal((2,), mean=float("nan")),
        lambda: random.bernoulli(1.5, (2,)),
    ):
        with pytest.raises(ArgumentError, match=r"random\.\w+ at .*test_random\.py:\d+"):
            wrong()
    with pytest.raises(DTypeError, match=r"random\.uniform at .*int32"):
        random.uniform((2,), dtype="int32")


def test_random_ops_are_never_merged_or_folded() -> None:
    for name in ("random_uniform", "random_normal", "random_bernoulli", "random_integers"):
        assert (REGISTRY[name].pure, REGISTRY[name].random) == (False, True)


@pytest.mark.parametrize("count", [255, 256, 1000, 70_001])
def test_a_generated_loop_draws_the_same_words(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [((5, 1), 2), ((2**40 + 7, 3), 2**33 + 1), ((2**63 + 11, 2**33 + 5), 0)]
    bound = 2**31 + 5
    have = [philox.words(np, count, *given) for given in streams]
    masks = [philox.draw_below(np, count, bound, *given) for given in streams]
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    for given, words, mask in zip(streams, have, masks, strict=True):
        assert words.dtype == np.uint32 and mask.dtype == bool
        assert (philox.words(np, count, *given) == words).all()
        assert (philox.draw_below(np, count, bound, *given) == mask).all()


def test_any_number_of_threads_draws_the_same_words() -> None:
    alone = philox.words(np, 1_000_003, (3, 4), 5)
    for threads in (2, 3):
        pool = Pool(threads)
        with use_pool(pool):
            shared = philox.words(np, 1_000_003, (3, 4), 5)
        pool.close()
        assert (alone == shared).all()
