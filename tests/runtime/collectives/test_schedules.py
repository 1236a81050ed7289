"""Rounds as data, counters in shared memory, and lanes that give up."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from graphflow.errors import StepTimeout
from graphflow.ir.spec import TensorSpec
from graphflow.runtime.collectives.program_collectives import ProgramCollectives
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.collectives.schedules import Round, all_reduce, broadcast
from graphflow.runtime.collectives.session_collectives import SessionCollectives
from graphflow.runtime.collectives.shared_counters import COUNTER_BYTES, SharedCounters
from graphflow.runtime.collectives.shared_memory_transport import private_memory
from graphflow.runtime.transport.shared_memory import SharedMemorySegment, has_shared_memory
from graphflow.runtime.transport.tensor_mailbox import TensorMailbox
from tests.runtime.collectives.test_transports import run_together


def draw(rounds: list[Round]) -> str:
    sign = {"send": ">", "fold": "<", "give": "»", "keep": "«"}
    return " ".join(f"{r.start}:{r.stop}{sign[r.action]}{r.peer}" for r in rounds)


def test_halving_of_four_ranks_exchanges_halves_then_quarters_and_back() -> None:
    rounds = all_reduce("halving", 4, None)
    assert [draw(own) for own in rounds] == [
        "2:4>1 0:2<1 1:2>2 0:1<2 0:1»2 1:2«2 0:2»1 2:4«1",
        "0:2>0 2:4<0 3:4>3 2:3<3 2:3»3 3:4«3 2:4»0 0:2«0",
        "2:4>3 0:2<3 0:1>0 1:2<0 1:2»0 0:1«0 0:2»3 2:4«3",
        "0:2>2 2:4<2 2:3>1 3:4<1 3:4»1 2:3«1 2:4»2 0:2«2",
    ]


def test_a_ring_of_three_ranks_passes_shares_on() -> None:
    assert draw(all_reduce("ring", 3, None)[0]) == "2:3>1 1:2<2 1:2>1 0:1<2 0:1»2 1:2«1 1:2»2 2:3«1"


def test_two_levels_meet_by_their_leaders_only() -> None:
    rounds = all_reduce("two_level", 4, (0, 0, 1, 1))
    assert [draw(own) for own in rounds] == [
        "0:4<1 2:4>2 0:2<2 0:2»2 2:4«2 0:4»1", "0:4>0 0:4«0",
        "0:4<3 0:2>0 2:4<0 2:4»0 0:2«0 0:4»3", "0:4>2 0:4«2",
    ]  # fmt: skip


def test_a_tensor_spreads_from_rank_0_along_a_tree() -> None:
    assert [draw(own) for own in broadcast(4)] == ["0:1»2 0:1»1", "0:1«0", "0:1«0 0:1»3", "0:1«2"]


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving", "two_level"])
def test_what_is_sent_is_what_is_taken_and_the_bytes_are_least(algorithm: str, count: int) -> None:
    hosts = tuple(rank // 3 for rank in range(count))
    rounds = all_reduce(algorithm, count, hosts)
    sent, taken = Counter[Any](), Counter[Any]()
    for rank, own in enumerate(rounds):
        for r in own:
            ends = (rank, r.peer) if r.action in ("send", "give") else (r.peer, rank)
            kind = r.action in ("send", "fold")
            (sent if r.action in ("send", "give") else taken)[(kind, *ends, r.start, r.stop)] += 1
    assert sent == taken and all(n == 1 for n in sent.values())
    if algorithm == "ring" or (algorithm == "halving" and count & (count - 1) == 0):
        for own in rounds:
            shares = sum(r.stop - r.start for r in own if r.action in ("send", "give"))
            assert shares == 2 * (count - 1)  # of `count`: 2 (n - 1) / n of the bytes


# Gates ----------------------------------------------------------------------------------------


def test_a_gate_waits_no_longer_than_it_is_told_and_says_who_is_missing() -> None:
    gates = SharedCounters(private_memory(3 * COUNTER_BYTES), 3)
    gates.publish(0, 1)
    started = time.monotonic()
    assert gates.wait_all(1, 0.05) == 1
    assert 0.04 < time.monotonic() - started < 5
    for rank in (1, 2):
        gates.publish(rank, 5)
    assert gates.wait_all(1, 0.05) == -1 and gates.wait_all(2, 0.0) == 0


def test_who_sleeps_at_a_gate_is_woken() -> None:
    memory = private_memory(COUNTER_BYTES)
    mine, others = SharedCounters(memory, 1), SharedCounters(memory, 1)
    threading.Timer(0.1, others.publish, (0, 7)).start()
    started = time.monotonic()
    assert mine.wait_all(7, 20.0) == -1
    assert time.monotonic() - started < 10


@pytest.mark.skipif(not has_shared_memory(), reason="no memory can be shared here")
def test_gates_order_memory_between_processes() -> None:
    segment = SharedMemorySegment.create(4096)
    numbers = segment.memory[1024:].view(np.int64)
    child = os.fork()
    gates = SharedCounters(segment.memory, 2)
    me = int(child != 0)
    wrong = 0
    for turn in range(1, 2000):
        numbers[me * 8] = turn
        gates.publish(me, 2 * turn)
        while gates.wait_all(2 * turn, 5.0) >= 0:
            pass
        wrong += int(numbers[(1 - me) * 8] != turn)
        gates.publish(me, 2 * turn + 1)
        while gates.wait_all(2 * turn + 1, 5.0) >= 0:
            pass
    if not child:
        os._exit(min(wrong, 100))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and wrong == 0


# Lanes ----------------------------------------------------------------------------------------


def pair(size: int) -> Collective:
    specs = (TensorSpec((size,), np.dtype("float32")),) * 2
    attrs = {"reduction": "sum", "algorithm": "direct", "hosts": None}
    return Collective("all_reduce", 0, ("/worker:0/cpu:0", "/worker:0/cpu:1"), specs, attrs)


@pytest.mark.parametrize("size", [3, 300_000])
@pytest.mark.parametrize("cancelled", [True, False])
def test_a_part_that_waits_in_vain_names_the_rank_and_the_next_step_is_right(
    size: int, cancelled: bool
) -> None:
    mail = TensorMailbox()
    mail.deadline = time.monotonic() + (30.0 if cancelled else 0.3)
    exchanges = SessionCollectives("s", 0, mail, lambda parcel: None)
    what = pair(size)
    programs = [ProgramCollectives(exchanges, "p", device) for device in what.devices]
    parts = [program.join(what, "'y'") for program in programs]
    x, ys = np.ones(size, "f4"), [np.zeros(size, "f4") for _ in parts]

    def go(rank: int, step: int) -> None:
        y = ys[rank]
        y.fill(0)
        parts[rank].start(step, rank, x, y, fixed=False, meanwhile=True)
        parts[rank].finish(step)
        assert (y == 2).all()

    if cancelled:
        threading.Timer(0.2, mail.cancel, (1, StepTimeout("rank 1 is gone"))).start()
    with pytest.raises(StepTimeout, match=r"rank 1|all_reduce 'y'"):
        go(0, 1)  # the other never comes
    exchanges.abort()
    assert mail.waits == {}
    mail.deadline = time.monotonic() + 20
    for step in (2, 3, 4):
        run_together([partial(go, rank, step) for rank in range(2)])
    exchanges.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("collectives-")]
