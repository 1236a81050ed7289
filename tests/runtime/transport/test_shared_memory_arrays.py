"""Arrays in shared memory: a slot is lent again only when it was returned, and bounds hold."""

from __future__ import annotations

import threading
from time import monotonic

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.errors import ProtocolError, StepTimeout, TransportError
from graphflow.runtime.transport.shared_memory import SharedMemorySegment, has_shared_memory
from graphflow.runtime.transport.shared_memory_arrays import (
    SharedArrayPool,
    SharedArrayReader,
    is_whole,
)
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox

pytestmark = pytest.mark.skipif(not has_shared_memory(), reason="no anonymous shared memory here")

MB = 1 << 20


def pair(most: int = 64 * MB) -> tuple[SharedArrayPool, SharedArrayReader]:
    lender = SharedArrayPool(most)
    return lender, SharedArrayReader(lender.offer())


def make_raw(value: int, nbytes: int) -> memoryview:
    return np.full(nbytes, value, np.uint8).data


def lend(lender: SharedArrayPool, value: int, nbytes: int) -> tuple[int, int, int]:
    found = lender.lend(make_raw(value, nbytes))
    assert found is not None
    return (*found, nbytes)


def test_nothing_is_lent_before_somebody_has_attached() -> None:
    lender = SharedArrayPool()
    assert lender.lend(make_raw(1, 100)) is None and not lender.is_attached
    token = lender.offer()
    assert lender.lend(make_raw(1, 100)) is None
    SharedArrayReader(token)
    assert lender.is_attached and lender.lend(make_raw(1, 100)) is not None


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
    assert lender.lent_bytes < 2 * 41_000


def test_an_old_turn_does_not_return_a_slot_that_is_lent_again() -> None:
    lender, borrower = pair()
    first = lend(lender, 1, 40_000)
    borrower.borrow(*first)
    second = lend(lender, 2, 40_000)
    assert second[0] == first[0]
    borrower.borrow(*first)  # as a message that comes twice would
    assert lender.lent_bytes > 0
    assert lend(lender, 3, 40_000)[0] != second[0]


def test_without_room_nothing_is_lent_until_something_is_returned() -> None:
    lender, borrower = pair(4 * MB)
    kept = [borrower.borrow(*lend(lender, 1, MB)) for _ in range(3)]
    assert lender.lend(make_raw(1, MB)) is None
    kept.pop()
    assert lender.lend(make_raw(1, MB)) is not None


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
        found = lender.lend(make_raw(value % 251, nbytes))
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
    small = SharedMemorySegment.create(10)
    with pytest.raises(TransportError, match="too small to hold an array"):
        SharedArrayReader(small.token)


@pytest.mark.parametrize("nbytes", [100, MB, 4 * MB, 4 * MB + 1, 5 * MB + 77])
def test_a_slot_is_announced_before_its_last_bytes_are_there(nbytes: int) -> None:
    lender, borrower = pair()
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    told: list[np.ndarray] = []

    def announce(start: int, turn: int) -> None:
        told.append(borrower.defer_borrow(start, turn, nbytes).borrow())
        assert not is_whole(told[0])

    assert lender.lend(source.data, announce) is not None
    array = told.pop()
    assert is_whole(array[1:].view(np.int8), 0.0) and (array == source).all()
    del array
    assert lender.lent_bytes == 0


def test_what_is_given_back_before_it_is_whole_is_not_lent_again_meanwhile() -> None:
    lender, borrower = pair()
    seen = []

    def announce(start: int, turn: int) -> None:
        borrower.borrow(start, turn, 3 * MB)  # and let go of
        seen.extend((start, lender.lend(make_raw(2, 3 * MB))))

    first = lender.lend(make_raw(1, 3 * MB), announce)
    assert first is not None and seen[0] == first[0] != seen[1][0]
    again = lender.lend(make_raw(3, 3 * MB))
    assert again is not None and again[0] == first[0]


def test_what_is_sent_on_is_copied_when_it_is_whole() -> None:
    lender, borrower = pair()
    further, reader = pair()
    source, threads, found = np.full(4 * MB, 7, np.uint8), [], []

    def announce(start: int, turn: int) -> None:
        array = borrower.borrow(start, turn, source.nbytes)
        threads.append(threading.Thread(target=lambda: found.append(further.lend(array.data))))
        threads[-1].start()

    for _ in range(5):
        assert lender.lend(source.data, announce) is not None
        threads.pop().join()
        assert (reader.borrow(*found.pop(), source.nbytes) == 7).all()


def test_a_step_waits_for_the_end_of_a_tensor_until_its_deadline() -> None:
    lender, borrower = pair()
    source, mail, taken = np.full(3 * MB, 7, np.uint8), TensorMailbox(), []
    mail.deadline = monotonic() + 30.0
    mail.arrivals = []

    def take() -> None:
        taken.append(mail.take(1, 5, Awaited("edge 5")))

    def announce(start: int, turn: int) -> None:
        mail.put(1, 5, borrower.borrow(start, turn, source.nbytes))
        mail.put(1, 6, borrower.borrow(start, turn + 1, source.nbytes))  # is never written
        taken.append(
            threading.Thread(target=lambda: taken.append(mail.take(1, 5, Awaited("edge 5"))))
        )
        taken[0].start()

    assert lender.lend(source.data, announce) is not None
    taken[0].join()
    assert (taken[1] == 7).all() and len(mail.arrivals) == 1
    mail.deadline = monotonic()
    with pytest.raises(StepTimeout, match="edge 6 did not come"):
        mail.take(1, 6, Awaited("edge 6"))


def test_what_is_promised_is_there_once_it_is_written() -> None:
    lender, borrower = pair()
    source = np.random.default_rng(0).integers(0, 256, 4 * MB, np.uint8)
    assert lender.reserve(np.zeros(4 * MB + 1, np.uint8).data) is None  # too long to wait for
    promised = lender.reserve(source.data)
    assert promised is not None
    start, turn, write = promised
    array = borrower.borrow(start, turn, source.nbytes)
    assert not is_whole(array)
    assert lender.lend(source.data) not in (None, (start, turn))
    write()
    assert is_whole(array) and (array == source).all()
    lender.close()
    write()  # nobody is left to see it


def test_who_borrows_waits_for_the_last_bytes() -> None:
    lender, borrower = pair()
    source, threads, found = np.full(4 * MB, 7, np.uint8), [], []

    def look(start: int, turn: int) -> None:
        array = borrower.borrow(start, turn, source.nbytes)
        if is_whole(array):
            found.append(array)

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
            lender.lend(make_raw(1, nbytes), announce)
    assert lender.lent_bytes == 0


def test_a_closed_lender_leaves_what_is_borrowed() -> None:
    lender, borrower = pair()
    array = borrower.borrow(*lend(lender, 9, 50_000))
    lender.close()
    assert (array == 9).all() and lender.lend(make_raw(1, 10)) is None and not lender.is_attached


def test_an_offer_takes_no_memory_until_something_is_lent() -> None:
    lender = SharedArrayPool()
    lender.offer()
    assert lender._reserved == 64 and lender.lent_bytes == 0


def test_what_is_kept_is_lent_as_it_is() -> None:
    lender, borrower = pair()
    kept = lender.keep(np.arange(30_000.0).reshape(100, 300))
    assert kept is not None and not kept.flags.writeable
    found = lender.lend(kept.reshape(-1).view(np.uint8).data)
    assert found is not None
    array = borrower.borrow(*found, kept.nbytes)
    del kept  # the borrower returns it now
    assert lender.lent_bytes > 0 and np.array_equal(array.view(float), np.arange(30_000.0))
    del array
    assert lender.lent_bytes == 0


def test_what_is_kept_and_not_lent_is_free_again() -> None:
    lender, _ = pair()
    kept = lender.keep(np.ones(40_000))
    assert kept is not None and lender.lent_bytes > 0
    part = kept[3:5]
    del kept
    assert lender.lent_bytes > 0 and part[0] == 1.0
    del part
    assert lender.lent_bytes == 0


def test_only_all_of_what_is_kept_and_only_once_is_lent_without_a_copy() -> None:
    lender, other = pair()[0], pair()[0]
    kept = lender.keep(np.ones(40_000))
    assert kept is not None
    flat = kept.view(np.uint8)
    copies = [lender.lend(flat[64:].data), other.lend(flat.data)]
    first, again = lender.lend(flat.data), lender.lend(flat.data)
    assert None not in (*copies, first, again)
    assert len({copies[0], first, again}) == 3
    assert lender.keep(np.ones((200, 200)).T[1:]) is None  # it has to be put in order elsewhere


def test_what_is_not_attached_keeps_nothing() -> None:
    lender = SharedArrayPool()
    assert lender.keep(np.ones(40_000)) is None
    lender.offer()
    assert lender.keep(np.ones(40_000)) is None
