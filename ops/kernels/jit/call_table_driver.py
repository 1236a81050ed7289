"""The driver: native functions that run tables of native calls.

A run of small kernels, or a loop over one, does not return to Python in between. An entry of a
table is five words, the arguments of a kernel: (function, pointers, sizes, start, stop). The
driver's functions follow the same calling convention, so tables nest. They are the same for all
programs, so a program compiles nothing of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.jit.compiler import KernelTask, NativeFunction, compiler, name_module

WORDS = 5
"""Words of an entry."""

# walk(entries, none, start, stop) calls the entries from start to stop in order.
_WALK = """(ptr %entries, ptr %none, i64 %start, i64 %stop) {
entry:
  %some = icmp slt i64 %start, %stop
  br i1 %some, label %next, label %done
next:
  %i = phi i64 [%start, %entry], [%i.next, %next]
  %e = getelementptr [5 x i64], ptr %entries, i64 %i
  %f = load ptr, ptr %e, align 8
  %p1 = getelementptr i64, ptr %e, i64 1
  %p2 = getelementptr i64, ptr %e, i64 2
  %p3 = getelementptr i64, ptr %e, i64 3
  %p4 = getelementptr i64, ptr %e, i64 4
  %ptrs = load ptr, ptr %p1, align 8
  %sizes = load ptr, ptr %p2, align 8
  %from = load i64, ptr %p3, align 8
  %to = load i64, ptr %p4, align 8
  call void %f(ptr %ptrs, ptr %sizes, i64 %from, i64 %to)
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %stop
  br i1 %more, label %next, label %done
done:
  ret void
}"""

# timed(frame, none, start, stop) calls the entries as walk does, and reads a clock before the first
# and after each. The frame is four words: entries, address of clock_gettime, the clock's number,
# and the address of the times in nanoseconds, one more than there are entries.
_TIMED = """(ptr %frame, ptr %none, i64 %start, i64 %stop) {
entry:
  %spec = alloca [2 x i64], align 8
  %low = getelementptr i64, ptr %spec, i64 1
  %entries = load ptr, ptr %frame, align 8
  %fp1 = getelementptr i64, ptr %frame, i64 1
  %fp2 = getelementptr i64, ptr %frame, i64 2
  %fp3 = getelementptr i64, ptr %frame, i64 3
  %read = load ptr, ptr %fp1, align 8
  %wide = load i64, ptr %fp2, align 8
  %clock = trunc i64 %wide to i32
  %times = load ptr, ptr %fp3, align 8
  br label %now
now:
  %i = phi i64 [%start, %entry], [%i.next, %next]
  %code = call i32 %read(i32 %clock, ptr %spec)
  %seconds = load i64, ptr %spec, align 8
  %rest = load i64, ptr %low, align 8
  %whole = mul i64 %seconds, 1000000000
  %ns = add i64 %whole, %rest
  %at = getelementptr i64, ptr %times, i64 %i
  store i64 %ns, ptr %at, align 8
  %more = icmp slt i64 %i, %stop
  br i1 %more, label %next, label %done
next:
  %i.next = add i64 %i, 1
  call void @WALK@(ptr %entries, ptr null, i64 %i, i64 %i.next)
  br label %now
done:
  ret void
}"""

# loop(frame, none, start, stop) runs iterations start to stop. The frame is seven words: entries,
# how many of them make the test, how many there are, moves, how many, address of the test's result
# (0: no test), and the next iteration, which the loop writes. A move is three words: the address of
# a pointer, its value in iteration 0, and the bytes by which it advances.
_LOOP = """(ptr %frame, ptr %none, i64 %start, i64 %stop) {
entry:
  %entries = load ptr, ptr %frame, align 8
  %fp1 = getelementptr i64, ptr %frame, i64 1
  %fp2 = getelementptr i64, ptr %frame, i64 2
  %fp3 = getelementptr i64, ptr %frame, i64 3
  %fp4 = getelementptr i64, ptr %frame, i64 4
  %fp5 = getelementptr i64, ptr %frame, i64 5
  %fp6 = getelementptr i64, ptr %frame, i64 6
  %tests = load i64, ptr %fp1, align 8
  %count = load i64, ptr %fp2, align 8
  %moves = load ptr, ptr %fp3, align 8
  %movers = load i64, ptr %fp4, align 8
  %pred = load ptr, ptr %fp5, align 8
  %tested = icmp ne ptr %pred, null
  %some = icmp slt i64 %start, %stop
  br i1 %some, label %head, label %done
head:
  %it = phi i64 [%start, %entry], [%it.next, %tail]
  %any = icmp sgt i64 %movers, 0
  br i1 %any, label %move, label %moved
move:
  %k = phi i64 [0, %head], [%k.next, %move]
  %m = getelementptr [3 x i64], ptr %moves, i64 %k
  %mp1 = getelementptr i64, ptr %m, i64 1
  %mp2 = getelementptr i64, ptr %m, i64 2
  %slot = load ptr, ptr %m, align 8
  %base = load i64, ptr %mp1, align 8
  %stride = load i64, ptr %mp2, align 8
  %way = mul i64 %it, %stride
  %place = add i64 %base, %way
  store i64 %place, ptr %slot, align 8
  %k.next = add i64 %k, 1
  %k.more = icmp slt i64 %k.next, %movers
  br i1 %k.more, label %move, label %moved
moved:
  br i1 %tested, label %test, label %body
test:
  call void @WALK@(ptr %entries, ptr null, i64 0, i64 %tests)
  %holds = load i8, ptr %pred, align 1
  %on = icmp ne i8 %holds, 0
  br i1 %on, label %body, label %end
body:
  call void @WALK@(ptr %entries, ptr null, i64 %tests, i64 %count)
  br label %tail
tail:
  %it.next = add i64 %it, 1
  %more = icmp slt i64 %it.next, %stop
  br i1 %more, label %head, label %end
end:
  %reached = phi i64 [%it, %test], [%it.next, %tail]
  br label %done
done:
  %final = phi i64 [%start, %entry], [%reached, %end]
  store i64 %final, ptr %fp6, align 8
  ret void
}"""

# copy([from, to], none, 0, bytes) copies bytes.
_COPY = """(ptr %ptrs, ptr %none, i64 %start, i64 %stop) {
entry:
  %from = load ptr, ptr %ptrs, align 8
  %p1 = getelementptr ptr, ptr %ptrs, i64 1
  %to = load ptr, ptr %p1, align 8
  %whole = and i64 %stop, -32
  %some = icmp sgt i64 %whole, 0
  br i1 %some, label %wide, label %rest
wide:
  %i = phi i64 [0, %entry], [%i.next, %wide]
  %a = getelementptr i8, ptr %from, i64 %i
  %b = getelementptr i8, ptr %to, i64 %i
  %v = load <32 x i8>, ptr %a, align 1
  store <32 x i8> %v, ptr %b, align 1
  %i.next = add i64 %i, 32
  %more = icmp slt i64 %i.next, %whole
  br i1 %more, label %wide, label %rest
rest:
  %left = icmp slt i64 %whole, %stop
  br i1 %left, label %narrow, label %done
narrow:
  %j = phi i64 [%whole, %rest], [%j.next, %narrow]
  %c = getelementptr i8, ptr %from, i64 %j
  %d = getelementptr i8, ptr %to, i64 %j
  %w = load i8, ptr %c, align 1
  store i8 %w, ptr %d, align 1
  %j.next = add i64 %j, 1
  %last = icmp slt i64 %j.next, %stop
  br i1 %last, label %narrow, label %done
done:
  ret void
}"""


@dataclass(frozen=True)
class Driver:
    """The driver's functions.

    Attributes:
        walk: (entries, none, start, stop).
        timed: (frame, none, start, stop).
        loop: (frame, none, start, stop).
    """

    walk: NativeFunction
    timed: NativeFunction
    loop: NativeFunction


@cache
def driver() -> Driver:
    """Return the driver of this process."""
    functions = compiler().functions(driver_sources())
    return Driver(*(functions[name] for name in driver_sources()))


@cache
def driver_sources() -> dict[str, str]:
    """Return what `driver` compiles, for callers that compile other kernels at the same time."""
    inner = f"define internal void @walked{_WALK}"
    nested = [name_module(text.replace("@WALK@", "@walked"), inner) for text in (_TIMED, _LOOP)]
    return dict([name_module(_WALK, ""), *nested])


def copy_source() -> tuple[str, str]:
    """Return the name and text of copy(source and target, none, 0, bytes)."""
    return name_module(_COPY, "")


@cache
def copy_task(nbytes: int) -> KernelTask:
    """Return a task that copies `nbytes` bytes; its pointers are source and target."""
    name, text = copy_source()
    return KernelTask(name, text, (), nbytes, 2.0 + 0.05 * nbytes)


def loop_frame(
    entries: int, tests: int, count: int, moves: int, movers: int, pred: int
) -> np.ndarray[Any, Any]:
    """Return the frame of a loop, by addresses and counts; the loop writes its last word."""
    words: Sequence[int] = (entries, tests, count, moves, movers, pred, 0)
    return np.array(words, np.int64)


def timed_frame(entries: int, clock: int, times: int) -> np.ndarray[Any, Any]:
    """Return the frame of a timed walk.

    Args:
        entries, times: addresses of the table and of the times.
        clock: a clock of the system, `time.CLOCK_MONOTONIC` or another.
    """
    return np.array([entries, _clock_function(), clock, times], np.int64)


@cache
def _clock_function() -> int:
    """Return the address of clock_gettime."""
    function = ctypes.CDLL(None).clock_gettime
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def clock_nanoseconds(clock: int) -> float:
    """Return how long a timed walk takes to read a clock, in nanoseconds."""
    walk = driver().walk.address
    entries = np.array([walk, 0, 0, 0, 0] * _EMPTY_ENTRIES, np.int64)  # they do nothing
    times = np.zeros(_EMPTY_ENTRIES + 1, np.int64)
    frame = timed_frame(entries.ctypes.data, clock, times.ctypes.data)
    driver().timed.holding_gil(frame.ctypes.data, None, 0, _EMPTY_ENTRIES)
    return float(np.median(np.diff(times)))


_EMPTY_ENTRIES = 200
