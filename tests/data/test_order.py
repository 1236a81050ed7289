"""The order of rows: a permutation, random, found at once, and the same after any pause."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.data.permutation import permute
from graphflow.errors import ArgumentError

Array = np.ndarray[Any, Any]


def table(rows: int, **more: Any) -> gf.data.Dataset:
    return gf.data.arrays(row=np.arange(rows), **more)


class Blocked:
    """A source that reads in blocks of given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self._rows = sum(sizes)
        self.starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, indices: Array) -> dict[str, Array]:
        return {"row": indices}


@given(st.integers(1, 5000), st.integers(0, 2**40), st.integers(0, 99))
def test_every_row_comes_once(size: int, seed: int, epoch: int) -> None:
    found = permute(np.arange(size), size, (seed, epoch))
    assert np.array_equal(np.sort(found), np.arange(size))
    some = np.arange(size)[:: max(1, size // 7)]
    assert np.array_equal(permute(some, size, (seed, epoch)), found[some])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 9))
def test_blocks_mix_and_every_row_comes_once(sizes: list[int], blocks: int) -> None:
    data = gf.data.Dataset(Blocked(sizes)).shuffle(3, blocks).batch(7)
    rows = np.concatenate([data.row_numbers((2, b)) for b in range(data.batches_per_epoch)])
    assert np.array_equal(np.sort(rows), np.arange(sum(sizes)))


def test_a_window_of_blocks_is_read_before_the_next() -> None:
    data = gf.data.Dataset(Blocked([100] * 40)).shuffle(0, blocks=4).batch(400)
    for number in range(10):
        rows = data.row_numbers((0, number))
        assert len(np.unique(rows // 100)) == 4 and not np.array_equal(rows, np.sort(rows))


def test_orders_look_random() -> None:
    """Places of rows are spread evenly, and neighbours are no longer neighbours."""
    size, orders = 1000, 300
    places = np.array([permute(np.arange(size), size, (seed, 0)) for seed in range(orders)])
    # of a row: the mean of 300 uniform places scatters by 1000/√12/√300 = 16.7
    assert abs(places.mean(0) - 499.5).max() < 5 * 16.7
    steps = np.abs(np.diff(places, axis=1))
    assert np.mean(steps == 1) == pytest.approx(2 / size, rel=0.2)
    assert np.corrcoef(places[:, 0], places[:, 1])[0, 1] == pytest.approx(0, abs=0.25)
    table = np.histogram2d(places[0], np.arange(size), bins=10)[0]
    assert ((table - 10) ** 2 / 10).sum() < 150  # χ² of 81 degrees of freedom, near 81


def test_epochs_and_seeds_have_orders_of_their_own_and_stay_the_same() -> None:
    data = table(100).shuffle(7).batch(10)
    first = data.row_numbers((0, 0))
    assert not np.array_equal(first, data.row_numbers((1, 0)))
    assert not np.array_equal(first, table(100).shuffle(8).batch(10).row_numbers((0, 0)))
    assert first.tolist() == EXPECTED  # in every version, or checkpoints would lose their place


EXPECTED = [66, 2, 62, 60, 92, 73, 24, 42, 83, 57]


def test_a_place_in_ten_million_rows_is_found_without_memory() -> None:
    class Huge:
        def __len__(self) -> int:
            return 10_000_000

        def __getitem__(self, indices: Array) -> dict[str, Array]:
            return {"row": indices}

    data = gf.data.Dataset(Huge()).shuffle(1).batch(128).epochs(None)
    next(data.start(3))
    tracemalloc.start()
    try:
        batch = next(data.start(50_000_000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(batch["row"]) == 128 and peak < 1_000_000


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_training_goes_on_at_any_step_as_if_it_had_not_stopped(ahead: int) -> None:
    data = table(107).shuffle(5).batch(16).map(
        lambda batch, random: {**batch, "noise": random.random(len(batch["row"]))}, seed=2
    ).epochs(3).prefetch(ahead)  # fmt: skip
    whole = list(data)
    assert len(whole) == len(data) == 21 and len(whole[6]["row"]) == 107 - 6 * 16
    for step in (0, 1, 6, 7, 13, 20, 21):
        rest = list(data.start(step))
        assert len(rest) == 21 - step
        for a, b in zip(rest, whole[step:], strict=True):
            assert np.array_equal(a["row"], b["row"]) and np.array_equal(a["noise"], b["noise"])
    assert data.position(20) == (2, 6)


def test_without_shuffle_rows_come_as_they_are_and_short_batches_may_be_left_out() -> None:
    data = table(10).batch(4, drop_last=True)
    assert [batch["row"].tolist() for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [len(batch["row"]) for batch in table(10).batch(4)] == [4, 4, 2]


def test_the_halves_of_a_split_share_no_row() -> None:
    first, rest = table(50).shuffle(1).batch(8).split(0.8)
    rows = [np.concatenate([b["row"] for b in half]) for half in (first, rest)]
    assert [len(r) for r in rows] == [40, 10]
    assert sorted(np.concatenate(rows).tolist()) == list(range(50))


# Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: list(table(5)), r"say how many rows a batch has: data.batch\(64\)"),
        (lambda: table(5).batch(0), "size must be an int from 1, not 0"),
        (
            lambda: table(5).batch(8, drop_last=True),
            "there are 5 rows, fewer than the 8 of a batch",
        ),
        (lambda: table(5).shuffle(-1), "seed must be an int from 0, not -1"),
        (lambda: table(5).epochs(1.5), "count must be an int from 0, not 1.5"),
        (lambda: table(5).map(3), "give a function of batches, not 3"),
        (lambda: table(5).split(1.5), "share must be between 0 and 1, not 1.5"),
        (lambda: table(5).batch(2).read((0, 3)), "there is no batch 3 in an epoch of 3"),
        (lambda: list(table(5).batch(2).map(lambda b: 1)), "must return a dict of arrays, not int"),
        (lambda: list(table(5).batch(2).columns("row", "raw")), "no column 'raw'; there are row"),
        (lambda: gf.data.arrays(a=[1, 2], b=[1]), "differ in their number of rows: a 2, b 1"),
        (lambda: gf.data.arrays(a=3), "column 'a' has no rows, it is 3"),
        (gf.data.arrays, "give at least one column"),
        (lambda: gf.data.arrays([1, 2]), "give arrays by name"),
    ],
)
def test_wrong_arguments_are_told(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_in_a_map_names_the_batch(ahead: int) -> None:
    def fail(batch: dict[str, Array]) -> dict[str, Array]:
        if 4 in batch["row"]:
            raise ValueError("four")
        return batch

    data = table(9).batch(2).map(fail).prefetch(ahead)
    seen = []
    with pytest.raises(ValueError, match="four") as caught:
        for batch in data:
            seen.append(len(batch["row"]))
    assert seen == [2, 2] and "batch 2 of epoch 0" in caught.value.__notes__[0]


def test_a_dataset_without_end_has_no_length() -> None:
    data = table(4).batch(2).epochs(None)
    with pytest.raises(ArgumentError, match="without end"):
        len(data)
    assert next(data.start(1001))["row"].tolist() == [2, 3]
