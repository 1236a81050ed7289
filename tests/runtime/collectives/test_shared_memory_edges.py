"""Passages carry the bits of messages, in the same order, and end as they do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import GraphflowError, StepTimeout, WorkerLost
from graphflow.ir.spec import TensorSpec, spec
from graphflow.runtime.collectives import shared_memory_edges as passages
from graphflow.runtime.collectives.program_collectives import ProgramCollectives
from graphflow.runtime.collectives.session_collectives import SessionCollectives
from graphflow.runtime.collectives.shared_memory_edges import (
    MAX_SLOT_BYTES,
    MAX_TENSOR_BYTES,
    edges_that_fit,
)
from graphflow.runtime.host.session_state import MAX_AGREED_FORMS
from graphflow.runtime.transport.shared_memory import SharedMemorySegment, has_shared_memory
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox
from graphflow.runtime.wire.step_values import TensorParcel
from tests.faults import hazards
from tests.runtime.collectives.test_transports import run_together
from tests.runtime.workers import segments_of

Array = np.ndarray[Any, Any]
needs_memory = pytest.mark.skipif(not has_shared_memory(), reason="no anonymous shared memory here")
DTYPES = ("bool", "int8", "uint16", "int64", "float32", "float64", "complex128", "bfloat16")
SOURCE, TARGET = "/worker:0/cpu:0", "/worker:1/cpu:0"


class Pair:
    """Two devices of two workers, which have these edges between them, in one direction."""

    def __init__(self, specs: dict[int, TensorSpec], seconds: float = 20.0) -> None:
        self.mails = TensorMailbox(0), TensorMailbox(1)
        self.words: list[str] = []
        self.ends = [
            SessionCollectives("s", i, mail, self._outbox) for i, mail in enumerate(self.mails)
        ]
        to, of = ({n: Awaited(f"edge {n}", worker) for n in specs} for worker in (1, 0))
        out = ProgramCollectives(self.ends[0], "p", SOURCE).edge_senders(TARGET, 1, to, specs)
        into = ProgramCollectives(self.ends[1], "p", TARGET).edge_receivers(SOURCE, 0, of, specs)
        self.out, self.into = out, into
        self.give(seconds)

    def _outbox(self, parcel: TensorParcel) -> None:
        self.words.append(str(parcel.edge).rpartition("/")[2])
        self.mails[parcel.target_worker].put(parcel.step, parcel.edge, parcel.array)

    def give(self, seconds: float) -> None:
        for mail in self.mails:
            mail.deadline = time.monotonic() + seconds

    def send(self, step: int, arrays: dict[int, Array]) -> list[bool]:
        """Which of them needed no message."""
        went = [self.out[edge].send(step, edge, array) for edge, array in arrays.items()]
        self.ends[0].finish_handshakes(step)
        return went

    def take(self, step: int) -> dict[int, Array | None]:
        return {edge: end.receive(step, edge) for edge, end in self.into.items()}

    def run_both(self, step: int, arrays: dict[int, Array]) -> tuple[list[bool], dict[int, Any]]:
        """A step of both devices."""
        went: list[bool] = []
        came: dict[int, Array | None] = {}
        run_together([
            lambda: went.extend(self.send(step, arrays)), lambda: came.update(self.take(step))
        ])  # fmt: skip
        return went, came

    def abort(self) -> None:
        for end in self.ends:
            end.abort()


@contextmanager
def pair(specs: dict[int, TensorSpec], seconds: float = 20.0) -> Iterator[Pair]:
    made = Pair(specs, seconds)
    try:
        yield made
    finally:
        for end in made.ends:
            end.close()


def test_after_a_first_step_of_messages_all_dtypes_and_shapes_come_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    shapes = [(), (1,), (3, 5), (17, 1, 33)]
    specs = {
        n: spec(dtype, shapes[n % len(shapes)]) for n, dtype in enumerate(DTYPES * len(shapes))
    }
    with pair(specs) as two:
        for step in range(2, 9):
            arrays = {
                n: rng.integers(0, 2, (*s.shape, s.dtype.itemsize), np.uint8).view(s.dtype)[..., 0]
                for n, s in specs.items()
            }
            went, came = two.run_both(step, arrays)
            assert went == [step > 2] * len(specs)
            for n, array in arrays.items():
                got = came[n]
                assert (got is None) == (step == 2)
                if got is not None:
                    assert (got.dtype, got.shape) == (specs[n].dtype, specs[n].shape)
                    assert got.tobytes() == array.tobytes()
        assert two.words == ["token", "found"]


def test_what_was_taken_stays_while_the_sender_is_a_step_ahead_and_no_further() -> None:
    with pair({0: spec("float32", (100,))}) as two:
        first = {0: np.zeros(100, "f4")}
        two.run_both(1, first)
        _, came = two.run_both(2, {0: np.full(100, 2, "f4")})
        held = came[0]
        assert two.send(3, {0: np.full(100, 3, "f4")}) == [True]  # nobody has taken it yet
        assert (held == 2).all()
        two.give(0.3)
        with pytest.raises(StepTimeout, match=r"step 4: edge 0 did not come before the deadline"):
            two.send(4, {0: np.full(100, 4, "f4")})
        assert (held == 2).all()
        assert two.mails[0].waits == {}


def test_who_waits_is_known_and_ends_with_the_step() -> None:
    with pair({7: spec("float32", (4,))}) as two:
        two.run_both(1, {7: np.zeros(4, "f4")})
        reason = StepTimeout("worker 0 is gone")

        def cancel() -> None:
            until = time.monotonic() + 10
            while not two.mails[1].waits and time.monotonic() < until:
                time.sleep(0.005)
            told.extend(each.awaited for each in two.mails[1].waits.values())
            two.mails[1].cancel(2, reason)

        told: list[Awaited] = []
        canceller = threading.Thread(target=cancel)
        canceller.start()
        with pytest.raises(StepTimeout, match="worker 0 is gone"):
            two.take(2)
        canceller.join()
        assert told == [Awaited("edge 7", 0)] and two.mails[1].waits == {}


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_step_that_fails_leaves_nothing_of_itself_for_the_next(failing: int) -> None:
    """Whether the way was just agreed, or used before; and though the sender had sent."""
    with pair({0: spec("float32", (2,)), 1: spec("float32", (3,))}) as two:
        for step in range(1, failing):
            two.run_both(step, {0: np.full(2, step, "f4"), 1: np.full(3, step, "f4")})
        two.mails[1].cancel(failing, StepTimeout("given up"))
        two.mails[0].cancel(failing, StepTimeout("given up"))
        try:
            two.send(failing, {0: np.full(2, -1, "f4"), 1: np.full(3, -1, "f4")})
        except GraphflowError:
            assert failing == 1
        try:
            two.take(failing)
        except GraphflowError:
            assert failing == 1  # later on both are there already
        two.abort()
        for step in range(failing + 1, failing + 4):
            arrays = {0: np.full(2, step, "f4"), 1: np.full(3, 10 * step, "f4")}
            went, came = two.run_both(step, arrays)
            assert went == [step > failing + 1] * 2
            assert all(x is None or x.tobytes() == arrays[n].tobytes() for n, x in came.items())


def _none(what: object) -> SharedMemorySegment:
    raise gf.errors.TransportError("no memory")


def _other(token: str) -> SharedMemorySegment:
    return SharedMemorySegment.create(64)


@pytest.mark.parametrize("where", ["not made", "not found", "of another size"])
def test_where_memory_is_not_shared_messages_stay_the_way(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "not made":
        monkeypatch.setattr(SharedMemorySegment, "create", staticmethod(_none))
    elif where == "not found":
        monkeypatch.setattr(SharedMemorySegment, "attach", staticmethod(_none))
    else:
        monkeypatch.setattr(passages.SharedMemorySegment, "attach", staticmethod(_other))
    with pair({0: spec("float32", (2,))}) as two:
        for step in range(3):
            went, came = two.run_both(step, {0: np.ones(2, "f4")})
            assert went == [False] and came == {0: None}
        assert two.words == ["token", "found"]  # asked once


def test_large_and_empty_tensors_and_those_without_room_go_as_messages() -> None:
    most = MAX_TENSOR_BYTES // 4
    specs = {n: spec("float32", (most,)) for n in range(MAX_SLOT_BYTES // MAX_TENSOR_BYTES)}
    beside = {100: (most + 1,), 101: (0, 3), 102: (1,)}
    specs |= {n: spec("float32", shape) for n, shape in beside.items()}
    kept = edges_that_fit(dict(reversed(specs.items())))
    assert list(kept) == list(range(MAX_SLOT_BYTES // MAX_TENSOR_BYTES // 2))  # two slots each
    assert list(edges_that_fit({n: specs[n] for n in beside})) == [102]
    assert list(edges_that_fit({n: specs[n] for n in beside}, ragged={100})) == [100, 102]


# Sessions ---------------------------------------------------------------------------------------


def build_braid(here: str, there: str) -> tuple[gf.Tensor, gf.Tensor]:
    """A graph that goes to and fro between two devices, with tensors of several dtypes."""
    x = gf.placeholder("float32", (None, 3), name="x")
    near = far = x
    for _ in range(4):
        with gf.device(here):
            near = gf.tanh(far + 1.0)
        with gf.device(there):
            bits = gf.astype(near * 8, "int8")
            far, above = gf.astype(bits, "float32") + x, near > 0.5
        with gf.device(here):
            far = gf.where(above, far, near * 2.0)
    return far * near, x


@needs_memory
def test_sessions_of_workers_have_the_bits_of_one_device_whatever_the_way_and_the_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    feeds = [rng.normal(size=(n, 3)).astype("f4") for n in (5, 5, 5, 8, 5, 8, 8, 1, 5)]
    with gf.Session(gf.Cluster.here(["cpu:0"])) as one:
        fetch, x = build_braid("cpu:0", "cpu:0")
        expected = [one.run(fetch, {x: each}).tobytes() for each in feeds]
    fetch, x = build_braid("/worker:0", "/worker:1")
    for shared in ("on", "off"):
        monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", shared)
        with gf.Session(gf.Cluster.local(2, threads=1), trial=False) as session:
            assert [session.run(fetch, {x: each}).tobytes() for each in feeds] == expected
            steps = session.run(fetch, ({x: each} for each in feeds), steps=len(feeds))
            assert [value.tobytes() for value in steps] == expected
            held = [segments_of(pid) for pid in session._life.hosts.pids]
            assert all(held) if shared == "on" else not any(held)


@needs_memory
def test_sizes_that_are_not_used_any_more_hold_no_memory() -> None:
    fetch, x = build_braid("/worker:0", "/worker:1")
    with gf.Session(gf.Cluster.local(2, threads=1), trial=False) as session:
        for n in range(1, 2 * MAX_AGREED_FORMS):
            for _ in range(2):
                session.run(fetch, {x: np.ones((n, 3), "f4")})
        held = [segments_of(pid) for pid in session._life.hosts.pids]
        assert max(held) <= 4 * MAX_AGREED_FORMS, held  # a segment, and its mapping, at both ends


@pytest.mark.parametrize("end", [0, 1])
def test_a_session_holds_only_so_many_at_either_end(
    end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passages, "MAX_OPEN_EDGES", 1)
    with pair({0: spec("float32", (2,))}) as two:
        (passage,) = {*two.out.values(), *two.into.values()} - {(two.out, two.into)[1 - end][0]}
        two.ends[end].open_edges.add(object())  # another one
        for step in range(3):
            assert two.run_both(step, {0: np.ones(2, "f4")}) == ([False], {0: None})
        assert passage not in two.ends[end].open_edges
        two.ends[end].open_edges.clear()
        two.abort()
        for step in range(3, 6):
            assert two.run_both(step, {0: np.ones(2, "f4")})[0] == [step > 3]
        assert two.ends[end].open_edges == {passage}


@needs_memory
def test_a_worker_that_ends_while_another_waits_for_its_tensor_is_told_and_leaves_nothing() -> None:
    with gf.device("/worker:0"):
        x = gf.placeholder("float32", (3,), name="x")
        small = gf.sum(hazards.sleep(x, seconds=0.5))
    with gf.device("/worker:1"):
        fetch = small * 2.0
    feed = {x: np.zeros(3, "f4")}
    cluster, ops = gf.Cluster.local(2, threads=1), ["tests.faults.hazards"]
    with gf.Session(cluster, trial=False, ops=ops) as session:
        for _ in range(2):
            assert session.run(fetch, feed) == 0
        pids = list(session._life.hosts.pids)
        future = session.run_async(fetch, feed)
        time.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerLost):
            future.result(30)
        assert time.monotonic() - started < 10
    assert not any(os.path.exists(f"/proc/{pid}/fd/0") for pid in pids)
