"""Arrays in shared memory: a slot is lent again only when it was returned, and bounds hold."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.errors import ProtocolError, TransportError
from graphflow.runtime.transport.lending import Borrower, Lender
from graphflow.runtime.transport.segment import Segment, is_possible

pytestmark = pytest.mark.skipif(not is_possible(), reason="no anonymous shared memory here")

MB = 1 << 20


def pair(most: int = 64 * MB) -> tuple[Lender, Borrower]:
    lender = Lender(most)
    return lender, Borrower(lender.offer())


def raw(value: int, nbytes: int) -> memoryview:
    return np.full(nbytes, value, np.uint8).data


def lend(lender: Lender, value: int, nbytes: int) -> tuple[int, int, int]:
    found = lender.lend(raw(value, nbytes))
    assert found is not None
    return (*found, nbytes)


def test_nothing_is_lent_before_somebody_has_attached() -> None:
    lender = Lender()
    assert lender.lend(raw(1, 100)) is None and not lender.accepted
    token = lender.offer()
    assert lender.lend(raw(1, 100)) is None
    Borrower(token)
    assert lender.accepted and lender.lend(raw(1, 100)) is not None


def test_what_is_lent_is_read_where_it_lies() -> None:
    lender, borrower = pair()
    start, turn, nbytes = lend(lender, 7, 100_000)
    array = borrower.borrow(start, turn, nbytes)
    assert array.nbytes == nbytes and (array == 7).all()
    assert array.ctypes.data % 64 == 0 and not array.flags.writeable


def test_a_slot_is_returned_when_the_last_view_of_it_is_gone() -> None:
    lender, borrower = pair()
    array = borrower.borrow(*lend(lender, 1, 40_000))
    view = array.view(np.float32).reshape(100, 100)[3:5]
    del array
    other = lend(lender, 2, 40_000)
    assert (view.view(np.uint8) == 1).all()
    del view
    again = lend(lender, 3, 40_000)
    assert again[0] != other[0] and again[1] > other[1]
    assert lender.lent < 2 * 41_000


def test_an_old_turn_does_not_return_a_slot_that_is_lent_again() -> None:
    lender, borrower = pair()
    first = lend(lender, 1, 40_000)
    borrower.borrow(*first)
    second = lend(lender, 2, 40_000)
    assert second[0] == first[0]
    borrower.borrow(*first)  # as a message that comes twice would
    assert lender.lent > 0
    assert lend(lender, 3, 40_000)[0] != second[0]


def test_without_room_nothing_is_lent_until_something_is_returned() -> None:
    lender, borrower = pair(4 * MB)
    kept = [borrower.borrow(*lend(lender, 1, MB)) for _ in range(3)]
    assert lender.lend(raw(1, MB)) is None
    kept.pop()
    assert lender.lend(raw(1, MB)) is not None


def test_memory_is_cut_up_anew_when_sizes_change() -> None:
    lender, borrower = pair(4 * MB)
    for _ in range(3):
        borrower.borrow(*lend(lender, 1, MB))
    assert (borrower.borrow(*lend(lender, 2, 3 * MB)) == 2).all()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(16_000, 400_000), st.integers(0, 3)), min_size=1, max_size=40)
)
def test_no_slot_is_written_over_while_it_is_borrowed(turns: list[tuple[int, int]]) -> None:
    lender, borrower = pair(2 * MB)
    held: list[tuple[int, np.ndarray]] = []
    for value, (nbytes, drop) in enumerate(turns):
        found = lender.lend(raw(value % 251, nbytes))
        if found is not None:
            held.append((value % 251, borrower.borrow(*found, nbytes)))
        for expected, array in held:
            assert (array == expected).all()
        del held[:drop]


@pytest.mark.parametrize(
    ("start", "turn", "nbytes"),
    [
        (0, 1, 10),
        (64, 1, 10),
        (129, 1, 10),
        (-128, 1, 10),
        (1 << 40, 1, 10),
        (128, 1, 1 << 50),
        (128, 1, 0),
        (128, 1, -5),
        (128, 0, 10),
        (128, 1 << 64, 10),
    ],
)
def test_a_slot_that_cannot_be_is_refused(start: int, turn: int, nbytes: int) -> None:
    _, borrower = pair(MB)
    with pytest.raises(ProtocolError, match="slot"):
        borrower.borrow(start, turn, nbytes)


def test_memory_without_a_board_is_refused() -> None:
    small = Segment.create(10)
    with pytest.raises(TransportError, match="room"):
        Borrower(small.token)


@pytest.mark.parametrize("nbytes", [100, MB, MB + 1, 3 * MB + 77])
def test_a_slot_is_announced_before_its_last_bytes_are_there(nbytes: int) -> None:
    lender, borrower = pair()
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    told: list[tuple[int, int, bool]] = []

    def announce(start: int, turn: int) -> None:
        told.append((start, turn, borrower.is_whole(start, turn, nbytes)))

    found = lender.lend(source.data, announce)
    assert found is not None
    assert told == [(*found, False)]
    offered = borrower.offered(*found, nbytes)
    array = offered.borrow()
    assert offered.is_whole() and (array == source).all()
    del array
    assert lender.lent == 0


def test_what_is_promised_is_there_once_it_is_written() -> None:
    lender, borrower = pair()
    source = np.random.default_rng(0).integers(0, 256, MB, np.uint8)
    assert lender.promise(np.zeros(MB + 1, np.uint8).data) is None  # too long to wait for
    promised = lender.promise(source.data)
    assert promised is not None
    start, turn, write = promised
    assert not borrower.is_whole(start, turn, source.nbytes)
    assert lender.lend(source.data) not in (None, (start, turn))
    write()
    array = borrower.borrow(start, turn, source.nbytes)
    assert borrower.is_whole(start, turn, source.nbytes) and (array == source).all()
    lender.close()
    write()  # nobody is left to see it


def test_who_borrows_waits_for_the_last_bytes() -> None:
    lender, borrower = pair()
    source, threads, found = np.full(4 * MB, 7, np.uint8), [], []

    def look(start: int, turn: int) -> None:
        if borrower.is_whole(start, turn, source.nbytes):
            found.append(borrower.borrow(start, turn, source.nbytes))

    def announce(start: int, turn: int) -> None:
        threads.append(threading.Thread(target=look, args=(start, turn)))
        threads[-1].start()

    for _ in range(20):
        assert lender.lend(source.data, announce) is not None
        threads.pop().join()
        assert not found or (found.pop() == 7).all()  # none: the machine was busy for too long


def test_an_announcement_that_fails_takes_the_slot_back() -> None:
    lender, _ = pair()

    def announce(start: int, turn: int) -> None:
        raise TransportError("no room")

    for nbytes in (100, 3 * MB):
        with pytest.raises(TransportError):
            lender.lend(raw(1, nbytes), announce)
    assert lender.lent == 0


@pytest.mark.parametrize("start", [0, 129, -128, 1 << 40])
def test_of_a_slot_that_cannot_be_nothing_is_waited_for(start: int) -> None:
    _, borrower = pair(MB)
    assert borrower.is_whole(start, 1, 10)
    with pytest.raises(ProtocolError, match="slot"):
        borrower.offered(start, 1, 10).borrow()


def test_a_closed_lender_leaves_what_is_borrowed() -> None:
    lender, borrower = pair()
    array = borrower.borrow(*lend(lender, 9, 50_000))
    lender.close()
    assert (array == 9).all() and lender.lend(raw(1, 10)) is None and not lender.accepted


def test_an_offer_takes_no_memory_until_something_is_lent() -> None:
    lender = Lender()
    lender.offer()
    assert lender._reserved == 64 and lender.lent == 0
