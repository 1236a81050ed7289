"""Gates: how processes that share memory tell each other how far they are.

A gate is a line of memory that one rank writes and all others look at: a counter that only grows.
`tell` sets it; `pending` waits for those of all ranks, first by looking again and again for some
microseconds, then asleep (a futex on Linux), so that it costs no processor that computes. Both are
native functions, which release the interpreter's lock and order memory as they must: what was
written before `tell` is there for who saw the counter.
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
"""Bytes of a gate: the counter, how often sleepers were woken, how many there are."""

DEFAULT_SPINS = 1000
"""Looks before a waiter sleeps: 10 to 60 microseconds, as processors pause."""

CANCEL_CHECK_SECONDS = 0.02
"""Seconds of a wait, between two looks at whether its step was given up."""

_COMPILING = threading.Lock()

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1


class SharedCounters:
    """The gates of `count` ranks, side by side in memory that all of them see.

    Args:
        memory: uint8, (count * LINE,), zero at first, and aligned to `LINE` bytes.
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
        """Set the counter of a rank, and wake who waits for it."""
        self._publish(self._base + rank * COUNTER_BYTES, None, value, 0)

    def wait_all(self, value: int, seconds: float, spins: int = DEFAULT_SPINS) -> int:
        """Wait for all counters to reach a value: the first rank whose has not, or -1.

        Args:
            spins: looks before it sleeps; few where something else has work for this core.
        """
        self._arguments[2] = spins
        self._wait_all(self._base, self._arguments_address, value, int(seconds * 1e9))
        return int(self._arguments[1])


def counter_functions() -> tuple[Any, Any]:
    """What gates are told and looked at by. Asked for when a program is made, so that no step
    compiles them."""
    with _COMPILING:  # one compiler for all threads, which has to stay
        return _functions()


@cache
def _functions() -> tuple[Any, Any]:
    """`tell` and `pending`; the first is too short to release the interpreter's lock for."""
    waiting = _WAIT_ALL.replace("@SLEEP", _sleep()).replace("@PAUSE", _pause())
    texts = (
        name_module(_PUBLISH.replace("@WAKE", _wake()), _declarations()),
        name_module(waiting, _declarations()),
    )
    tell, pending = (compiler().function(*text) for text in texts)
    assert isinstance(tell, NativeFunction)
    return tell.holding_gil, pending.releasing_gil


def _futex_number() -> int | None:
    """Of the system call futex."""
    return _FUTEX.get(_machine()) if sys.platform == "linux" else None


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
    """What tells the processor that this is a loop that waits."""
    return {
        "x86_64": "call void @llvm.x86.sse2.pause()",
        "aarch64": "call void @llvm.aarch64.hint(i32 1)",
    }.get(_machine(), "fence acquire")


def _machine() -> str:
    name = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(name, name)


# Whoever tells looks for sleepers after it has written, and whoever goes to sleep looks at the
# counter after it has said so (both in one total order): one of the two sees the other.
_PUBLISH = """(ptr %line, ptr %none, i64 %value, i64 %zero) {
entry:
  store atomic i64 %value, ptr %line seq_cst, align 8
  fence seq_cst
  %sleepers = getelementptr i8, ptr %line, i64 16
  %some = load atomic i32, ptr %sleepers seq_cst, align 4
  %any = icmp ne i32 %some, 0
  br i1 %any, label %wake, label %done
wake:
  %bell = getelementptr i8, ptr %line, i64 8
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
  %span = alloca [2 x i64]
  %seconds = sdiv i64 %time, 1000000000
  %rest = srem i64 %time, 1000000000
  store i64 %seconds, ptr %span
  %second = getelementptr i64, ptr %span, i64 1
  store i64 %rest, ptr %second
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
