"""What each filter sends stands for what it was given, in the bytes that it says."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.ir.spec import spec
from graphflow.parallel.compression.exchange import Sites, exchange_sums
from graphflow.parallel.compression.filter import Filter
from graphflow.parallel.compression.traffic import first_state, traffic_of

FixedPoint, PowerSGD, TopK = gf.parallel.FixedPoint, gf.parallel.PowerSGD, gf.parallel.TopK


def exchange(
    rule: Filter,
    arrays: list[np.ndarray[Any, Any]],
    steps: int = 1,
    value: np.ndarray[Any, Any] | None = None,
) -> list[Any]:
    """The totals and the states of each replica, for each step, without devices."""
    fed = [gf.placeholder(a.dtype.name, a.shape) for a in arrays]
    kept = [tuple(gf.variable(first) for first in first_state(rule, fed[0].spec)) for _ in arrays]
    sites = Sites(
        lambda rank: nullcontext(), nullcontext, lambda kind, made: None, lambda every, to: None
    )
    read = None
    if rule.reads_value:
        read = [[gf.constant(np.ones_like(arrays[0]) if value is None else value)] * len(arrays)]
    (made,) = exchange_sums(rule, [fed], [kept], sites, (0, 0), values=read)
    pairs = [zip(old, one.state, strict=True) for old, one in zip(kept, made, strict=True)]
    updates = [gf.assign(old, new) for pair in pairs for old, new in pair]
    fetches = [(one.total, one.state) for one in made]
    with gf.Session() as s:
        return [
            s.run([fetches, *updates], dict(zip(fed, arrays, strict=True)))[0] for _ in range(steps)
        ]


def draw(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# FixedPoint ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_rounding_is_right_on_average(bits: int) -> None:
    x = draw(40, 5, dtype="float64")
    steps = 400
    totals = np.array([step[0][0] for step in exchange(FixedPoint(bits), [x], steps)])
    spacing = np.abs(x).max() / (2 ** (bits - 1) - 1)
    assert np.abs(totals - x).max() <= spacing * 1.001  # at most one step up or down
    up = np.mod(x / spacing, 1)
    allowed = 5 * np.sqrt(up * (1 - up) / steps) + 2 / steps
    assert np.all(np.abs(totals.mean(0) - x) <= spacing * allowed + 1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("value", [0.3, -0.3, 0.01])
def test_the_mean_of_many_equal_numbers_is_that_number(bits: int, value: float) -> None:
    x = np.full(2_000_000, value, "float32")
    x[0] = 1.0
    assert abs(exchange(FixedPoint(bits), [x])[0][0][0][1:].mean(dtype="float64") - value) < 1e-3


def test_rounding_is_drawn_anew_in_each_step_and_again_in_a_new_session() -> None:
    x = draw(64)
    first, second = exchange(FixedPoint(4), [x], 2)
    assert not np.array_equal(first[0][0], second[0][0])
    again = exchange(FixedPoint(4), [x], 2)
    assert np.array_equal(first[0][0], again[0][0][0])
    assert np.array_equal(second[0][0], again[1][0][0])


def test_replicas_round_by_different_numbers() -> None:
    """A common coin would round all replicas up together, and errors would add up."""
    x = draw(2000)
    (one,) = exchange(FixedPoint(4), [x, x])
    total = one[0][0]
    half = np.rint((total / 2 - x) / (np.abs(x).max() / 7) * 1e6)
    steps = total / (np.abs(x).max() / 7)
    odd = np.rint(steps).astype(int) % 2
    assert 0.2 < odd.mean() < 0.5 and half.any()  # one up, the other down: an odd number of steps


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
def test_zeros_and_constants_are_exact(bits: int, value: float) -> None:
    x = np.full((3, 7), value, "float32")
    assert np.allclose(exchange(FixedPoint(bits), [x, x])[0][0][0], 2 * value, rtol=1e-6)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    "rule",
    [
        *(FixedPoint(8), TopK(0.1), PowerSGD(1), gf.parallel.RandomSkip(1.0)),
        *(gf.parallel.Significant(100.0), gf.parallel.Kkt(100.0)),
    ],
    ids=repr,
)
def test_numbers_that_are_not_finite_stay_visible(rule: Filter, special: float) -> None:
    x = draw(6, 8)
    x[2, 3] = special
    with np.errstate(all="ignore"):
        total = exchange(rule, [x, draw(6, 8, seed=1)])[0][0][0]
    assert not np.isfinite(total).all()


@settings(max_examples=12)
@given(st.sampled_from([2, 4, 8, 16]), st.integers(1, 33), st.integers(1, 4))
def test_packed_integers_have_the_bytes_that_are_told(bits: int, size: int, count: int) -> None:
    rule, x = FixedPoint(bits), spec("float32", (size,))
    state = traffic_of(rule, x, 2)
    assert state.filtered == -(-size * bits // 8) + 4
    xs = [draw(size, seed=k) for k in range(count)]
    error = exchange(rule, xs)[0][0][0] - sum(xs)
    spacings = sum(np.abs(x).max() / (2 ** (bits - 1) - 1) for x in xs)
    assert np.abs(error).max() <= spacings * 1.001


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("bits", [4, 8])
def test_many_replicas_send_as_few_bytes_each_as_two(bits: int, count: int) -> None:
    size = 8 * 150 + 1
    found = traffic_of(FixedPoint(bits), spec("float32", (size,)), count)
    piece = -(-size // count)
    each = (-(-piece * bits // 8) + 4) * (count - 1)  # sent as a piece, and as a part of the sums
    assert found.filtered == 2 * each and found.filtered < found.plain * (bits / 32 + 0.03)
    xs = [draw(size, seed=k) for k in range(count)]
    made = exchange(FixedPoint(bits), xs)[0]
    assert all(np.array_equal(made[0][0], total) for total, _ in made)
    largest = 2 ** (bits - 1) - 1
    spacings = sum(np.abs(x).max() for x in xs) / largest + np.abs(made[0][0]).max() / largest
    assert np.abs(made[0][0] - sum(xs)).max() <= spacings * 1.001


# TopK ------------------------------------------------------------------------------------------


def test_the_largest_numbers_travel_and_the_others_stay() -> None:
    x, y = draw(8, 25), draw(8, 25, seed=1)
    ((first, second),) = exchange(TopK(0.1), [x, y])
    sent = np.zeros_like(x)
    for array, (_, (residual,)) in zip((x, y), (first, second), strict=True):
        largest = np.argsort(-np.abs(array).ravel())[:20]
        own = np.zeros(array.size, array.dtype)
        own[largest] = array.ravel()[largest]
        assert np.array_equal(residual, array - own.reshape(array.shape))
        sent += own.reshape(array.shape)
    assert np.array_equal(first[0], sent) and np.array_equal(second[0], sent)


def test_at_least_one_number_travels() -> None:
    assert traffic_of(TopK(1e-9), spec("float32", (10, 10)), 2).filtered == 4 + 2


@pytest.mark.parametrize("rule", [TopK(0.02), TopK(0.3), PowerSGD(2)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_was_sent_and_what_is_kept_is_what_was_given(rule: Filter, replicas: int) -> None:
    xs = [draw(16, 10, dtype="float64", seed=k) for k in range(replicas)]
    steps = exchange(rule, xs, 30)
    sent = sum(step[0][0] for step in steps)
    kept = sum(state[0] for _, state in steps[-1])
    assert np.allclose(sent + kept, 30 * sum(xs), rtol=0, atol=1e-12)
    assert all(np.array_equal(step[0][0], total) for step in steps for total, _ in step)


# PowerSGD ---------------------------------------------------------------------------------------


def test_a_matrix_of_low_rank_is_exact() -> None:
    """M Q has the columns of M, so P Pᵀ M is M (Vogels et al. 2019, section 3)."""
    matrices = [
        draw(512, 4, dtype="float64", seed=k) @ draw(4, 256, dtype="float64", seed=9)
        for k in range(2)
    ]
    wanted = sum(matrices)
    (one,) = exchange(PowerSGD(4), matrices)
    assert np.linalg.norm(one[0][0] - wanted) < 1e-14 * np.linalg.norm(wanted)
    sent = traffic_of(PowerSGD(4), spec("float64", (512, 256)), 2)
    assert sent.filtered / sent.plain == 4 * (512 + 256) / (512 * 256)  # 2.3 %


def test_repeated_exchanges_find_the_largest_directions() -> None:
    """Each exchange is a step of power iteration, from the Q of the one before."""
    u, _ = np.linalg.qr(draw(40, 12, dtype="float64"))
    v, _ = np.linalg.qr(draw(30, 12, dtype="float64", seed=1))
    matrix = u @ np.diag(2.0 ** -np.arange(12)) @ v.T
    steps = exchange(PowerSGD(2), [matrix], 20)
    kept = [np.linalg.norm(step[0][1][0]) / np.linalg.norm(matrix) for step in steps]
    best = np.sqrt(sum(4.0**-k for k in range(2, 12)) / sum(4.0**-k for k in range(12)))
    assert kept[0] < 1 and best <= max(kept) < 3  # feedback neither vanishes nor explodes


@pytest.mark.parametrize("shape", [(7,), (), (2, 9), (9, 2)])
def test_vectors_and_thin_matrices_are_left_alone(shape: tuple[int, ...]) -> None:
    assert not PowerSGD(2).applies(spec("float32", shape))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FixedPoint(3), "bits must be one of 2, 4, 8, 16, not 3"),
        (lambda: FixedPoint(True), "not True"),
        (lambda: TopK(0), r"share must be above 0 and at most 1, not 0"),
        (lambda: TopK(1.5), "not 1.5"),
        (lambda: TopK(float("nan")), "not nan"),
        (lambda: TopK(0.1, feedback=2), "feedback must be True or False, not 2"),
        (lambda: PowerSGD(0), "rank must be an int of at least 1, not 0"),
        (lambda: PowerSGD(2.0), "not 2.0"),
    ],
)
def test_a_wrong_number_is_refused_at_the_users_line(make: Any, text: str) -> None:
    with pytest.raises(gf.errors.ArgumentError, match=text) as caught:
        make()
    assert "test_filters.py:" in str(caught.value)
