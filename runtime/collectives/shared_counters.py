"""Progress counters in shared memory, by which processes wait for each other.

A counter is a cache line that one rank writes and all others read. It only grows. `publish` sets a
rank's counter. `wait_all` waits for the counters of all ranks: it spins for some microseconds, then
sleeps (a futex on Linux), so that it takes no time from processes that compute.

Both are native functions with the memory order that they need: everything written before `publish`
is visible to a process that has seen the counter. `wait_all` releases Python's global lock.
"""

from __future__ import annotations

import platform
import sys
import threading
from functools import cache
from typing import Any

import numpy as np

from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, name_module

COUNTER_BYTES = 64
"""Bytes of a counter's line: the counter, how often sleepers were woken, how many sleep now."""

DEFAULT_SPINS = 1000
"""Loads of the counter before a waiter sleeps: 10 to 60 microseconds, by the processor's pause."""

CANCEL_CHECK_SECONDS = 0.02
"""Seconds of a wait between two checks whether its step was cancelled."""

_COMPILING = threading.Lock()

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1


class SharedCounters:
    """The counters of `count` ranks, side by side in memory that all of them map.

    Args:
        memory: uint8, (count * COUNTER_BYTES,), zero at first, aligned to `COUNTER_BYTES`.

    Attributes:
        words: the counters as an int64 array, (count,).
    """

    def __init__(self, memory: np.ndarray[Any, Any], count: int) -> None:
        self.words = (
            memory[: count * COUNTER_BYTES].view(np.int64).reshape(count, COUNTER_BYTES // 8)[:, 0]
        )
        self._memory = memory
        self._base = address(memory)
        self._arguments = np.zeros(4, np.int64)
        self._arguments[0] = count
        self._arguments_address = address(self._arguments)
        self._publish, self._wait_all = counter_functions()

    def publish(self, rank: int, value: int) -> None:
        """Set the counter of a rank and wake the processes that wait for it."""
        line = self._base + rank * COUNTER_BYTES
        self._publish(line, line, value, 0)

    def publish_at(self, post: int, value: int) -> None:
        """Set the first counter and wake the processes that sleep at another line.

        Args:
            post: the line's address.
        """
        self._publish(self._base, post, value, 0)

    def wait_all(self, value: int, seconds: float, spins: int = DEFAULT_SPINS) -> int:
        """Wait until all counters have reached a value.

        Args:
            seconds: the longest sleep for a rank.
            spins: loads before it sleeps; few if another thread has work for this core.

        Returns:
            -1, or the first rank whose counter has not reached the value in time.
        """
        self._arguments[2] = spins
        self._wait_all(self._base, self._arguments_address, value, int(seconds * 1e9))
        return int(self._arguments[1])


def counter_functions() -> tuple[Any, Any]:
    """Return the native functions `publish` and `wait_all`.

    Programs call this when they are compiled, so that no step has to compile the functions.
    """
    with _COMPILING:  # threads share one compiler
        return _functions()


def any_counter_function() -> Any:
    """Return the native function (table, post, count, nanoseconds) that waits for any counter.

    The table is int64: the answer, the spins before a sleep, the index of the counter to look at
    first, then the address of each counter's line and the value that it has to reach. The answer is
    the index of a counter that has reached its value, or -1. `post` is the line at which the
    function sleeps, see `SharedCounters.publish_at`.
    """
    with _COMPILING:
        return _any_function()


@cache
def _any_function() -> Any:
    made = compiler().function(*name_module(_with_sleep(_WAIT_ANY), _declarations()))
    assert isinstance(made, NativeFunction)
    return made.releasing_gil


@cache
def _functions() -> tuple[Any, Any]:
    """Compile both. `publish` keeps Python's global lock: it is too short to release it."""
    texts = (
        name_module(_PUBLISH.replace("@WAKE", _wake()), _declarations()),
        name_module(_with_sleep(_WAIT_ALL), _declarations()),
    )
    tell, pending = (compiler().function(*text) for text in texts)
    assert isinstance(tell, NativeFunction)
    return tell.holding_gil, pending.releasing_gil


def _futex_number() -> int | None:
    """Return the number of the system call futex; None on systems without it."""
    return _FUTEX.get(_machine()) if sys.platform == "linux" else None


def _with_sleep(text: str) -> str:
    """Return the text of a function that waits, with this machine's sleep of `%time` ns."""
    return text.replace("@SPAN", _SPAN).replace("@SLEEP", _sleep()).replace("@PAUSE", _pause())


def _declarations() -> str:
    sleeping = "usleep(i32)" if _futex_number() is None else "syscall(i64, ...)"
    returned = "i32" if _futex_number() is None else "i64"
    pause = {
        "x86_64": "declare void @llvm.x86.sse2.pause()\n",
        "aarch64": "declare void @llvm.aarch64.hint(i32)\n",
    }.get(_machine(), "")
    return f"{pause}declare {returned} @{sleeping}"


def _wake() -> str:
    if _futex_number() is None:
        return ""
    return (
        f"  call i64 (i64, ...) @syscall(i64 {_futex_number()}, ptr %bell, i64 {_WAKE}, "
        f"i64 {_EVERYONE}, ptr null, ptr null, i64 0)"
    )


def _sleep() -> str:
    if _futex_number() is None:
        return "  call i32 @usleep(i32 50)"
    return (
        f"  call i64 (i64, ...) @syscall(i64 {_futex_number()}, ptr %bell, i64 {_WAIT}, i32 %rung, "
        "ptr %span, ptr null, i64 0)"
    )


def _pause() -> str:
    """Return the instruction that tells the processor that this is a spin loop."""
    return {
        "x86_64": "call void @llvm.x86.sse2.pause()",
        "aarch64": "call void @llvm.aarch64.hint(i32 1)",
    }.get(_machine(), "fence acquire")


def _machine() -> str:
    name = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(name, name)


# The longest sleep, as the system call takes it.
_SPAN = """  %span = alloca [2 x i64]
  %seconds = sdiv i64 %time, 1000000000
  %rest = srem i64 %time, 1000000000
  store i64 %seconds, ptr %span
  %second = getelementptr i64, ptr %span, i64 1
  store i64 %rest, ptr %second"""

# The writer looks for sleepers after it has set the counter. A waiter looks at the counter after it
# has counted itself as a sleeper. Both are sequentially consistent, so one of them sees the other,
# and no wake-up is lost.
_PUBLISH = """(ptr %line, ptr %post, i64 %value, i64 %zero) {
entry:
  store atomic i64 %value, ptr %line seq_cst, align 8
  fence seq_cst
  %sleepers = getelementptr i8, ptr %post, i64 16
  %some = load atomic i32, ptr %sleepers seq_cst, align 4
  %any = icmp ne i32 %some, 0
  br i1 %any, label %wake, label %done
wake:
  %bell = getelementptr i8, ptr %post, i64 8
  %old = atomicrmw add ptr %bell, i32 1 seq_cst
@WAKE
  br label %done
done:
  ret void
}"""

_WAIT_ALL = f"""(ptr %lines, ptr %order, i64 %value, i64 %time) {{
entry:
  %count = load i64, ptr %order
  %answer = getelementptr i64, ptr %order, i64 1
  %patience = getelementptr i64, ptr %order, i64 2
  %spins = load i64, ptr %patience
@SPAN
  br label %next
next:
  %rank = phi i64 [ 0, %entry ], [ %following, %reached ]
  %more = icmp slt i64 %rank, %count
  br i1 %more, label %begin, label %all
begin:
  %offset = mul i64 %rank, {COUNTER_BYTES}
  %line = getelementptr i8, ptr %lines, i64 %offset
  %bell = getelementptr i8, ptr %line, i64 8
  %sleepers = getelementptr i8, ptr %line, i64 16
  br label %look
look:
  %spin = phi i64 [ 0, %begin ], [ %again, %idle ]
  %word = load atomic i64, ptr %line acquire, align 8
  %there = icmp sge i64 %word, %value
  br i1 %there, label %reached, label %patient
patient:
  %again = add i64 %spin, 1
  %tired = icmp sgt i64 %again, %spins
  br i1 %tired, label %asleep, label %idle
idle:
  @PAUSE
  br label %look
asleep:
  %counted = atomicrmw add ptr %sleepers, i32 1 seq_cst
  %rung = load atomic i32, ptr %bell seq_cst, align 4
  %late = load atomic i64, ptr %line seq_cst, align 8
  %come = icmp sge i64 %late, %value
  br i1 %come, label %awake, label %sleep
sleep:
@SLEEP
  br label %awake
awake:
  %uncounted = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  %last = load atomic i64, ptr %line acquire, align 8
  %now = icmp sge i64 %last, %value
  br i1 %now, label %reached, label %lacking
lacking:
  store i64 %rank, ptr %answer
  ret void
reached:
  %following = add i64 %rank, 1
  br label %next
all:
  store i64 -1, ptr %answer
  ret void
}}"""

# It looks at all counters again and again (phase 0), once more after it has counted itself as a
# sleeper (1), and a last time after its sleep (2).
_WAIT_ANY = """(ptr %table, ptr %post, i64 %count, i64 %time) {
entry:
  %patience = getelementptr i64, ptr %table, i64 1
  %spins = load i64, ptr %patience
  %first = getelementptr i64, ptr %table, i64 2
  %begin = load i64, ptr %first
  %bell = getelementptr i8, ptr %post, i64 8
  %sleepers = getelementptr i8, ptr %post, i64 16
  %kept = alloca i32
@SPAN
  br label %look
look:
  %phase = phi i32 [ 0, %entry ], [ 0, %idle ], [ 1, %asleep ], [ 2, %awake ]
  %spin = phi i64 [ 0, %entry ], [ %again, %idle ], [ 0, %asleep ], [ 0, %awake ]
  br label %next
next:
  %k = phi i64 [ 0, %look ], [ %following, %missing ]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %probe, label %none
probe:
  %shifted = add i64 %k, %begin
  %i = srem i64 %shifted, %count
  %twice = mul i64 %i, 2
  %at = add i64 %twice, 3
  %cell = getelementptr i64, ptr %table, i64 %at
  %place = load i64, ptr %cell
  %line = inttoptr i64 %place to ptr
  %bound = getelementptr i64, ptr %cell, i64 1
  %value = load i64, ptr %bound
  %word = load atomic i64, ptr %line seq_cst, align 8
  %there = icmp sge i64 %word, %value
  br i1 %there, label %found, label %missing
missing:
  %following = add i64 %k, 1
  br label %next
none:
  switch i32 %phase, label %lacking [ i32 0, label %patient
                                      i32 1, label %sleep ]
patient:
  %again = add i64 %spin, 1
  %tired = icmp sgt i64 %again, %spins
  br i1 %tired, label %asleep, label %idle
idle:
  @PAUSE
  br label %look
asleep:
  %counted = atomicrmw add ptr %sleepers, i32 1 seq_cst
  %heard = load atomic i32, ptr %bell seq_cst, align 4
  store i32 %heard, ptr %kept
  br label %look
sleep:
  %rung = load i32, ptr %kept
@SLEEP
  br label %awake
awake:
  %uncounted = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  br label %look
lacking:
  store i64 -1, ptr %table
  ret void
found:
  store i64 %i, ptr %table
  %counts = icmp eq i32 %phase, 1
  br i1 %counts, label %leave, label %done
leave:
  %left = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  br label %done
done:
  ret void
}"""
