"""Native segments: consecutive generated kernels of a program run as one native call.

Threads share long kernels inside the call (`work_sharing.py`).

Pointers are fixed when the program is compiled, except those to feeds and received tensors, which
are filled in when the tensors come. The driver (`ops/kernels/jit/call_table_driver.py`) runs the
calls in order, so the bits are those of the kernels run one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.spec import TensorSpec
from graphflow.ops.kernels.fusion.region_kernels import GIL_RELEASE_NANOSECONDS
from graphflow.ops.kernels.jit.array_address import ALIGNMENT, address
from graphflow.ops.kernels.jit.call_table_driver import (
    WORDS,
    clock_nanoseconds,
    driver,
    timed_frame,
)
from graphflow.ops.kernels.jit.compiler import TaskShare, compiler
from graphflow.ops.kernels.jit.thread_team import ThreadTeam
from graphflow.runtime.native_calls.gemm_epilogues import (
    interleave_epilogues,
)
from graphflow.runtime.native_calls.integer_checks import IntegerCheck, raise_if_wrong
from graphflow.runtime.native_calls.pointer_table import KernelCall, PointerTable, RuntimeOperand
from graphflow.runtime.native_calls.work_sharing import CallPart, WorkSharing, scratch_bytes

CANCEL_CHECK_NANOSECONDS = 5e6
"""Nanoseconds of work after which a program checks whether its step was cancelled."""

WAKE_NANOSECONDS = 60_000.0
"""Nanoseconds of shared work to come from which threads that sleep are woken."""

_SPREAD_NANOSECONDS = 1e6
"""Nanoseconds of work from which threads are moved off the caller's processor before it."""


def _run_checked(
    run: Callable[[], None], alarm: ctypes.c_int64, checks: Sequence[IntegerCheck]
) -> None:
    run()
    if alarm.value:
        raise_if_wrong(checks)


def _run_spread(team: ThreadTeam, run: Callable[[], None]) -> None:
    team.leave_processor()
    run()


class NativeSegment:
    """Kernel calls that run in sequence, as one native call `run`.

    Args:
        sharing: the threads that share long calls; None: the caller's thread runs all.

    Attributes:
        runtime_pointers: run-time operand -> indices of its pointers.
        pointers: addresses of all arguments, which the native code reads.
        offsets: bytes that are added to each pointer of a run-time operand.
        entries: the driver's table, with each call as a whole.
    """

    def __init__(self, calls: Sequence[KernelCall], sharing: WorkSharing | None = None) -> None:
        self.calls = tuple(calls)
        self._sharing = sharing
        self.nanoseconds = sum(call.task.nanoseconds for call in calls)
        self.runtime_pointers: dict[RuntimeOperand, list[int]] = {}
        self._jobs = self._plan_jobs()
        self._kept: list[np.ndarray[Any, Any]] = []  # tables that entries point to
        self._recorded: dict[tuple[int, bool], tuple[int, ...]] = {}  # entries
        table = PointerTable(self.calls, self.runtime_pointers)
        wholes = [CallPart(i, TaskShare(0, c.task.rows)) for i, c in enumerate(self.calls)]
        for part in (*wholes, *(p for job in self._jobs for share in job for p in share)):
            table.add(part, 0 if self._scratch is None else address(self._scratch))
        self.pointers, self.offsets, self._sizes = table.arrays()
        self.entries = np.array([w for p in wholes for w in self._entry(table, p)], np.uint64)
        self._table = self._job_entries(table)
        self._table_address = address(self._table) if calls else 0
        function = driver().walk
        self._walk = (
            function.releasing_gil
            if self.nanoseconds > GIL_RELEASE_NANOSECONDS
            else function.holding_gil
        )
        self._checks = [call.check for call in calls if call.check is not None]
        self.run: Callable[[], None] = partial(
            self._walk, ctypes.c_void_p(self._table_address), None, ctypes.c_int64(0),
            ctypes.c_int64(len(self._table) // WORDS),
        )  # fmt: skip
        if sharing is not None and self.shares_work and self.nanoseconds > _SPREAD_NANOSECONDS:
            self.run = partial(_run_spread, sharing.team, self.run)
        if self._checks:
            self.run = partial(_run_checked, self.run, self._checks[0].alarm, self._checks)

    def look_at_checks(self) -> None:
        """Raise the error of the first node whose integers its op does not accept, if there is
        one."""
        raise_if_wrong(self._checks)

    def _plan_jobs(self) -> list[list[list[CallPart]]]:
        """Return the entries in order, each as its shares; an entry of one thread has one share.

        Epilogues run block by block.
        """
        sharing = self._sharing
        tasks = [call.task for call in self.calls]
        found = interleave_epilogues([call.access for call in self.calls])
        jobs: list[list[list[CallPart]]] = []
        while found:
            first = found[0].call
            turns = (first,) if found[0].stop == tasks[first].rows else (first, first + 1)
            blocks = list(takewhile(lambda block: block.call in turns, found))  # noqa: B023
            found = found[len(blocks) :]
            pairs = None
            if sharing is not None and len(blocks) > 1:
                pairs = sharing.shares_of_blocks(blocks)
            if pairs is not None:
                jobs.append(pairs)
            elif sharing is not None:
                for number in dict.fromkeys(block.call for block in blocks):
                    jobs.append(sharing.shares(number, tasks[number]))
            else:
                jobs += [[[CallPart(b.call, TaskShare(b.start, b.stop))]] for b in blocks]
        need = max((scratch_bytes(job, tasks) for job in jobs), default=0)
        self._scratch = None if sharing is None or not need else sharing.scratch(need)
        return jobs

    def _entry(self, table: PointerTable, part: CallPart, wake: bool = True) -> tuple[int, ...]:
        """Return the words of an entry that runs a part of a call."""
        if self.calls[part.call].recording is not None:
            return self._recorded_entry(table, part.call, wake)
        task = self.calls[part.call].task
        function = compiler().function(task.name, task.text).address
        pointers, sizes = table.places(part)
        where = address(self.pointers) + 8 * pointers
        meta = address(self._sizes) + 8 * sizes
        return function, where, meta, part.share.start, part.share.stop

    def _recorded_entry(self, table: PointerTable, number: int, wake: bool) -> tuple[int, ...]:
        """Return the words of an entry that runs the stages of a recorded kernel."""
        if (number, wake) in self._recorded:
            return self._recorded[number, wake]
        recording = self.calls[number].recording
        assert recording is not None
        walk, words = driver().walk.address, []
        at_pointers, at_sizes = address(self.pointers), address(self._sizes)
        places = iter(table.recorded[number])
        for stage in recording.stages:
            shares: list[int] = []
            for share in stage:
                inner: list[int] = []
                for call in share:
                    pointers, sizes = next(places)
                    where, meta = at_pointers + 8 * pointers, at_sizes + 8 * sizes
                    inner += (call.function, where, meta, call.start, call.stop)
                shares += (walk, address(self._keep(inner)), 0, 0, len(share))
            if len(stage) > 1 and self._sharing is not None:
                team = self._sharing.team
                frame = team.job_frame(address(self._keep(shares)), len(stage), wake)
                self._kept.append(frame)
                words += [team.share_function.address, address(frame), 0, 0, 1]
            else:
                words += shares
        entry = walk, address(self._keep(words)), 0, 0, len(words) // WORDS
        self._recorded[number, wake] = entry
        return entry

    def _job_entries(self, table: PointerTable) -> np.ndarray[Any, Any]:
        words: list[int] = []
        walk = driver().walk.address
        left = self._shared_nanoseconds
        for job in self._jobs:
            if len(job) == 1:
                for part in job[0]:
                    words += self._entry(table, part, left > WAKE_NANOSECONDS)
                left -= self._nanoseconds(job) if self._is_shared(job) else 0
                continue
            assert self._sharing is not None
            entries: list[int] = []
            for share in job:
                inner = [w for part in share for w in self._entry(table, part)]
                if len(share) > 1:
                    kept = self._keep(inner)
                    inner = [walk, address(kept), 0, 0, len(share)]
                entries += inner
            team = self._sharing.team
            frame = team.job_frame(
                address(self._keep(entries)), len(job), wake=left > WAKE_NANOSECONDS
            )
            self._kept.append(frame)
            words += (team.share_function.address, address(frame), 0, 0, 1)
            left -= self._nanoseconds(job)
        return np.array(words, np.uint64)

    def _nanoseconds(self, job: Sequence[Sequence[CallPart]]) -> float:
        """Return one thread's time for a job."""
        calls = {part.call for share in job for part in share}
        return sum(self.calls[call].task.nanoseconds for call in calls)

    def _keep(self, words: Sequence[int]) -> np.ndarray[Any, Any]:
        self._kept.append(np.array(words, np.uint64))
        return self._kept[-1]

    @property
    def shares_work(self) -> bool:
        """Whether it has so much work for several threads that those that sleep are woken."""
        return self._shared_nanoseconds > WAKE_NANOSECONDS

    @property
    def _shared_nanoseconds(self) -> float:
        return sum(self._nanoseconds(job) for job in self._jobs if self._is_shared(job))

    def _is_shared(self, job: Sequence[Sequence[CallPart]]) -> bool:
        recording = self.calls[job[0][0].call].recording
        return len(job) > 1 or (recording is not None and recording.is_shared)

    @property
    def entry(self) -> tuple[int, ...]:
        """The segment as an entry of a table of native calls."""
        return driver().walk.address, self._table_address, 0, 0, len(self._table) // WORDS

    def run_call(self, i: int) -> None:
        """Run call `i` by itself, for a step that is traced by a clock of Python."""
        self._walk(address(self.entries), None, i, i + 1)
        self.look_at_checks()

    def run_timed(self, clock: int) -> np.ndarray[Any, Any]:
        """Run as `run` does, and return the nanoseconds of each call, (calls,).

        Args:
            clock: the clock of the system that counts, `time.CLOCK_MONOTONIC` or another.
        """
        count = len(self._jobs)
        times = np.zeros(count + 1, np.int64)
        frame = timed_frame(self._table_address, clock, address(times))
        timed = driver().timed
        long = self.nanoseconds > GIL_RELEASE_NANOSECONDS
        (timed.releasing_gil if long else timed.holding_gil)(address(frame), None, 0, count)
        self.look_at_checks()
        took = np.maximum(np.diff(times) - clock_nanoseconds(clock), 0)
        spent = np.zeros(len(self.calls))
        for job, nanoseconds in zip(self._jobs, took.tolist(), strict=True):
            whole = max(self._nanoseconds(job), 1e-9)
            for call in {part.call for share in job for part in share}:
                spent[call] += nanoseconds * self.calls[call].task.nanoseconds / whole
        return spent

    def pointer_address(self, i: int) -> int:
        """Return the address at which pointer `i` is stored."""
        return address(self.pointers) + 8 * i


class FeedBinding:
    """Binds a feed or a received tensor to the pointers of the segments that read it.

    Args:
        spec: the spec that arrays must have: native code trusts its pointers.
        to_device: copies an array to a contiguous, aligned one.

    Attributes:
        is_read_by_python: whether a line of Python reads it, so that it must be aligned. Generated
            kernels give the same bits at any alignment.
    """

    def __init__(self, spec: TensorSpec, to_device: Callable[[Any], Any]) -> None:
        self.is_read_by_python = False
        self._shape = spec.shape
        self._dtype = spec.dtype
        self._to_device = to_device
        self._bound: list[tuple[Any, Any, Any]] = []

    def bind(self, segment: NativeSegment, slots: Sequence[int]) -> None:
        """Set these pointers of a segment whenever an array comes."""
        which = slots[0] if len(slots) == 1 else np.array(slots)
        ahead = segment.offsets[which] if segment.offsets[slots].any() else 0
        self._bound.append((segment.pointers, which, ahead))

    def __call__(self, given: Any) -> Any:
        if not self._bound and self.is_read_by_python:
            return self._to_device(given)
        array = given
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            array = self._to_device(given)
        place = address(array)
        if self.is_read_by_python and place % ALIGNMENT:
            array = self._to_device(given)
            place = address(array)
        if array.shape != self._shape or array.dtype != self._dtype:
            raise ShapeError(f"expected {self._dtype}{self._shape}, got {array.dtype}{array.shape}")
        for pointers, which, ahead in self._bound:
            pointers[which] = place + ahead
        return array
