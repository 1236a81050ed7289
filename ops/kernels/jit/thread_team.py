"""The native side of a pool of threads: shares of work without Python between them.

A caller publishes a job, a table of up to 63 entries as the driver's (`call_table_driver.py`).
Threads claim entries one by one, the caller too. So a job ends without helpers if these are late,
and no thread waits for one that the system has not started yet. A thread prefers its own entries,
so that the rows of one kernel stay in the cache of the thread that computes the next kernel.

Threads poll for a job only for some hundred microseconds after the last one, which is longer than
a step's lines of Python take, and offer their core to other threads meanwhile (`sched_yield`). Then
they sleep.

Memory of a team, in words of 8 bytes:

    0   mask of the entries that nobody has claimed
    8   entries that are not finished
    16  address of the entries, entries of a thread, whether a caller is at work, and the caller's
        MXCSR register, which tells whether denormal numbers count as zero
    24  addresses of pthread_mutex_lock, pthread_mutex_unlock, pthread_cond_wait,
        pthread_cond_signal and sched_yield, polls before a thread sleeps, threads
    32  seats of 32 words: the caller's, those of the helpers, and one for callers that wait for
        parts in Python. A seat: whether its thread sleeps, requests, answered requests; from word 8
        a mutex, from word 16 a condition variable.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.jit.array_address import address, empty_aligned
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, name_module
from graphflow.ops.kernels.jit.denormals import is_x86
from graphflow.ops.kernels.jit.processor_spread import ProcessorSpread

MOST_SHARES = 63
"""Entries of a job at most."""
_POLLS = 600
"""Polls before a thread sleeps, of about half a microsecond each."""
_FIRST_SEAT, _SEAT = 32, 32
_ENTRIES, _EACH, _BUSY, _MODE, _CALLS, _SPINS, _THREADS = 16, 17, 18, 19, 24, 29, 30
_REQUESTED, _ANSWERED, _MUTEX, _CONDITION = 1, 2, 8, 16

_COMMON = f"""
declare i64 @llvm.cttz.i64(i64, i1)
declare i64 @llvm.ctlz.i64(i64, i1)

define internal ptr @team_seat(ptr %team, i64 %number) {{
  %words = mul i64 %number, {_SEAT}
  %at = add i64 %words, {_FIRST_SEAT}
  %seat = getelementptr i64, ptr %team, i64 %at
  ret ptr %seat
}}

define internal void @team_call(ptr %team, i64 %which, ptr %seat, i64 %at) {{
  %p = getelementptr i64, ptr %team, i64 %which
  %f = load ptr, ptr %p, align 8
  %given = getelementptr i64, ptr %seat, i64 %at
  %code = call i32 %f(ptr %given)
  ret void
}}

define internal void @team_rouse(ptr %team, ptr %seat) {{
  %asleep = load atomic i64, ptr %seat seq_cst, align 8
  %some = icmp ne i64 %asleep, 0
  br i1 %some, label %wake, label %done
wake:
  call void @team_call(ptr %team, i64 {_CALLS}, ptr %seat, i64 {_MUTEX})
  store atomic i64 0, ptr %seat seq_cst, align 8
  call void @team_call(ptr %team, i64 {_CALLS + 3}, ptr %seat, i64 {_CONDITION})
  call void @team_call(ptr %team, i64 {_CALLS + 1}, ptr %seat, i64 {_MUTEX})
  br label %done
done:
  ret void
}}

; sleeps until another thread clears the seat's first word
define internal void @team_sleep(ptr %team, ptr %seat) {{
  call void @team_call(ptr %team, i64 {_CALLS}, ptr %seat, i64 {_MUTEX})
  br label %look
look:
  %asleep = load atomic i64, ptr %seat seq_cst, align 8
  %still = icmp ne i64 %asleep, 0
  br i1 %still, label %wait, label %done
wait:
  %p = getelementptr i64, ptr %team, i64 {_CALLS + 2}
  %f = load ptr, ptr %p, align 8
  %c = getelementptr i64, ptr %seat, i64 {_CONDITION}
  %m = getelementptr i64, ptr %seat, i64 {_MUTEX}
  %code = call i32 %f(ptr %c, ptr %m)
  br label %look
done:
  call void @team_call(ptr %team, i64 {_CALLS + 1}, ptr %seat, i64 {_MUTEX})
  ret void
}}

; pauses; returns whether to poll on
define internal i1 @team_poll(ptr %team, i64 %turn) {{
  br label %next
next:
  %i = phi i64 [0, %0], [%j, %next]
  PAUSE
  %j = add i64 %i, 1
  %more = icmp slt i64 %j, 4
  br i1 %more, label %next, label %yield
yield:
  call void @team_call(ptr %team, i64 {_CALLS + 4}, ptr %team, i64 0)
  %p = getelementptr i64, ptr %team, i64 {_SPINS}
  %spins = load i64, ptr %p, align 8
  %on = icmp slt i64 %turn, %spins
  ret i1 %on
}}

; claims an entry, of those in `own` the first, else the last; -1 if none is left
define internal i64 @team_claim(ptr %team, i64 %own) {{
  br label %next
next:
  %mask = load atomic i64, ptr %team seq_cst, align 8
  %none = icmp eq i64 %mask, 0
  br i1 %none, label %nothing, label %some
some:
  %mine = and i64 %mask, %own
  %has = icmp ne i64 %mine, 0
  %low = call i64 @llvm.cttz.i64(i64 %mine, i1 false)
  %zeros = call i64 @llvm.ctlz.i64(i64 %mask, i1 false)
  %high = sub i64 63, %zeros
  %bit = select i1 %has, i64 %low, i64 %high
  %one = shl i64 1, %bit
  %rest = xor i64 %mask, %one
  %found = cmpxchg ptr %team, i64 %mask, i64 %rest seq_cst seq_cst, align 8
  %won = extractvalue {{i64, i1}} %found, 1
  br i1 %won, label %claimed, label %next
claimed:
  ret i64 %bit
nothing:
  ret i64 -1
}}

define internal void @team_run(ptr %entries, i64 %i) {{
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
  ret void
}}

; stores this thread's floating-point mode, or takes over the stored one
define internal void @team_mode(ptr %team, i1 %take) {{
  %p = getelementptr i64, ptr %team, i64 {_MODE}
  br i1 %take, label %load, label %store
load:
  LOAD_MODE
  ret void
store:
  STORE_MODE
  ret void
}}

; runs a claimed entry; the last one ends the job
define internal void @team_share(ptr %team, i64 %bit) {{
  %p = getelementptr i64, ptr %team, i64 {_ENTRIES}
  %entries = load ptr, ptr %p, align 8
  call void @team_mode(ptr %team, i1 true)
  call void @team_run(ptr %entries, i64 %bit)
  %pending = getelementptr i64, ptr %team, i64 8
  %old = atomicrmw sub ptr %pending, i64 1 seq_cst
  %last = icmp eq i64 %old, 1
  br i1 %last, label %end, label %done
end:
  %seat = call ptr @team_seat(ptr %team, i64 0)
  call void @team_rouse(ptr %team, ptr %seat)
  br label %done
done:
  ret void
}}

define internal i64 @team_own(ptr %team, i64 %thread) {{
  %p = getelementptr i64, ptr %team, i64 {_EACH}
  %each = load atomic i64, ptr %p monotonic, align 8
  %bits = shl i64 1, %each
  %some = sub i64 %bits, 1
  %wide = mul i64 %each, %thread
  %by = and i64 %wide, 63
  %own = shl i64 %some, %by
  ret i64 %own
}}

; waits on a seat until two words are equal
define internal void @team_await(ptr %team, ptr %seat, ptr %one, ptr %other) {{
  br label %look
look:
  %turn = phi i64 [0, %0], [%after, %poll], [0, %sleep]
  %a = load atomic i64, ptr %one seq_cst, align 8
  %b = load atomic i64, ptr %other seq_cst, align 8
  %same = icmp eq i64 %a, %b
  br i1 %same, label %done, label %poll
poll:
  %after = add i64 %turn, 1
  %on = call i1 @team_poll(ptr %team, i64 %turn)
  br i1 %on, label %look, label %tired
tired:
  store atomic i64 1, ptr %seat seq_cst, align 8
  %c = load atomic i64, ptr %one seq_cst, align 8
  %d = load atomic i64, ptr %other seq_cst, align 8
  %equal = icmp eq i64 %c, %d
  br i1 %equal, label %awake, label %sleep
sleep:
  call void @team_sleep(ptr %team, ptr %seat)
  br label %look
awake:
  store atomic i64 0, ptr %seat seq_cst, align 8
  br label %done
done:
  ret void
}}
"""

# serve(team, seat, thread, answered) runs shares of jobs until there is a new request.
_SERVE = f"""(ptr %team, ptr %seat, i64 %thread, i64 %answered) {{
entry:
  %asked = getelementptr i64, ptr %seat, i64 {_REQUESTED}
  %told = getelementptr i64, ptr %seat, i64 {_ANSWERED}
  store atomic i64 %answered, ptr %told seq_cst, align 8
  %tp = getelementptr i64, ptr %team, i64 {_THREADS}
  %threads = load i64, ptr %tp, align 8
  %waiting = call ptr @team_seat(ptr %team, i64 %threads)
  call void @team_rouse(ptr %team, ptr %waiting)
  br label %look
look:
  %turn = phi i64 [0, %entry], [0, %share], [%after, %poll], [0, %awake]
  %requests = load atomic i64, ptr %asked seq_cst, align 8
  %new = icmp ne i64 %requests, %answered
  br i1 %new, label %done, label %try
try:
  %own = call i64 @team_own(ptr %team, i64 %thread)
  %bit = call i64 @team_claim(ptr %team, i64 %own)
  %some = icmp sge i64 %bit, 0
  br i1 %some, label %share, label %poll
share:
  call void @team_share(ptr %team, i64 %bit)
  br label %look
poll:
  %after = add i64 %turn, 1
  %on = call i1 @team_poll(ptr %team, i64 %turn)
  br i1 %on, label %look, label %tired
tired:
  store atomic i64 1, ptr %seat seq_cst, align 8
  %mask = load atomic i64, ptr %team seq_cst, align 8
  %now = load atomic i64, ptr %asked seq_cst, align 8
  %idle = icmp eq i64 %mask, 0
  %same = icmp eq i64 %now, %answered
  %both = and i1 %idle, %same
  br i1 %both, label %sleep, label %awake
sleep:
  call void @team_sleep(ptr %team, ptr %seat)
  br label %awake
awake:
  store atomic i64 0, ptr %seat seq_cst, align 8
  br label %look
done:
  call void @team_mode(ptr %team, i1 true)
  ret void
}}"""

# share(frame, none, 0, 1) runs a job. The frame is five words: team, entries, how many there are,
# how many of them are one thread's, and the helpers to wake if they sleep.
_SHARE = f"""(ptr %frame, ptr %none, i64 %start, i64 %stop) {{
entry:
  %fp1 = getelementptr i64, ptr %frame, i64 1
  %fp2 = getelementptr i64, ptr %frame, i64 2
  %fp3 = getelementptr i64, ptr %frame, i64 3
  %fp4 = getelementptr i64, ptr %frame, i64 4
  %team = load ptr, ptr %frame, align 8
  %entries = load ptr, ptr %fp1, align 8
  %count = load i64, ptr %fp2, align 8
  %each = load i64, ptr %fp3, align 8
  %helpers = load i64, ptr %fp4, align 8
  %busy = getelementptr i64, ptr %team, i64 {_BUSY}
  %found = cmpxchg ptr %busy, i64 0, i64 1 seq_cst seq_cst, align 8
  %free = extractvalue {{i64, i1}} %found, 1
  br i1 %free, label %publish, label %alone
alone:
  %a = phi i64 [0, %entry], [%a.next, %alone]
  call void @team_run(ptr %entries, i64 %a)
  %a.next = add i64 %a, 1
  %a.more = icmp slt i64 %a.next, %count
  br i1 %a.more, label %alone, label %done
publish:
  call void @team_mode(ptr %team, i1 false)
  %ep = getelementptr i64, ptr %team, i64 {_ENTRIES}
  store ptr %entries, ptr %ep, align 8
  %op = getelementptr i64, ptr %team, i64 {_EACH}
  store atomic i64 %each, ptr %op monotonic, align 8
  %pending = getelementptr i64, ptr %team, i64 8
  store atomic i64 %count, ptr %pending seq_cst, align 8
  %bits = shl i64 1, %count
  %mask = sub i64 %bits, 1
  store atomic i64 %mask, ptr %team seq_cst, align 8
  br label %wake
wake:
  %h = phi i64 [1, %publish], [%h.next, %rouse]
  %h.some = icmp sle i64 %h, %helpers
  br i1 %h.some, label %rouse, label %next
rouse:
  %helper = call ptr @team_seat(ptr %team, i64 %h)
  call void @team_rouse(ptr %team, ptr %helper)
  %h.next = add i64 %h, 1
  br label %wake
next:
  %own = call i64 @team_own(ptr %team, i64 0)
  %bit = call i64 @team_claim(ptr %team, i64 %own)
  %some = icmp sge i64 %bit, 0
  br i1 %some, label %run, label %wait
run:
  call void @team_share(ptr %team, i64 %bit)
  br label %next
wait:
  %seat = call ptr @team_seat(ptr %team, i64 0)
  call void @team_await(ptr %team, ptr %seat, ptr %pending, ptr %team)
  store atomic i64 0, ptr %busy seq_cst, align 8
  br label %done
done:
  ret void
}}"""

# rouse(team, none, 1, threads) wakes helpers that sleep, since a job is about to come.
_ROUSE = """(ptr %team, ptr %none, i64 %start, i64 %stop) {
entry:
  br label %look
look:
  %i = phi i64 [%start, %entry], [%next, %rouse]
  %some = icmp slt i64 %i, %stop
  br i1 %some, label %rouse, label %done
rouse:
  %seat = call ptr @team_seat(ptr %team, i64 %i)
  call void @team_rouse(ptr %team, ptr %seat)
  %next = add i64 %i, 1
  br label %look
done:
  ret void
}"""

# request(team, seat, 0, 0) asks a helper to return to Python.
_REQUEST = f"""(ptr %team, ptr %seat, i64 %start, i64 %stop) {{
  call void @team_mode(ptr %team, i1 false)
  %asked = getelementptr i64, ptr %seat, i64 {_REQUESTED}
  %old = atomicrmw add ptr %asked, i64 1 seq_cst
  call void @team_rouse(ptr %team, ptr %seat)
  ret void
}}"""

# wait(team, seat, 0, 0) waits until a helper has answered all requests.
_WAIT = f"""(ptr %team, ptr %seat, i64 %start, i64 %stop) {{
  %asked = getelementptr i64, ptr %seat, i64 {_REQUESTED}
  %told = getelementptr i64, ptr %seat, i64 {_ANSWERED}
  %tp = getelementptr i64, ptr %team, i64 {_THREADS}
  %threads = load i64, ptr %tp, align 8
  %own = call ptr @team_seat(ptr %team, i64 %threads)
  call void @team_await(ptr %team, ptr %own, ptr %asked, ptr %told)
  ret void
}}"""


@dataclass(frozen=True)
class _TeamFunctions:
    """The native functions of teams, as the texts above describe them."""

    serve: NativeFunction
    share: NativeFunction
    request: NativeFunction
    wait: NativeFunction
    rouse: NativeFunction


@cache
def _functions() -> _TeamFunctions:
    sources = team_sources()
    compiled = compiler().functions(sources)
    return _TeamFunctions(*(compiled[name] for name in sources))


@cache
def team_sources() -> dict[str, str]:
    """Return what teams compile, for callers that compile other kernels at the same time."""
    if is_x86():
        declared = ["@llvm.x86.sse2.pause()", "@llvm.x86.sse.stmxcsr(ptr)"]
        declared.append("@llvm.x86.sse.ldmxcsr(ptr)")
        names = {"PAUSE": "@llvm.x86.sse2.pause()", "STORE_MODE": "@llvm.x86.sse.stmxcsr(ptr %p)",
                 "LOAD_MODE": "@llvm.x86.sse.ldmxcsr(ptr %p)"}  # fmt: skip
    else:
        declared = ["@llvm.donothing()"]
        names = dict.fromkeys(("PAUSE", "STORE_MODE", "LOAD_MODE"), "@llvm.donothing()")
    common = "\n".join([*(f"declare void {name}" for name in declared), _COMMON])
    for name, called in names.items():
        common = common.replace(f"  {name}\n", f"  call void {called}\n")
    return dict(name_module(text, common) for text in (_SERVE, _SHARE, _REQUEST, _WAIT, _ROUSE))


class ThreadTeam:
    """The memory that the threads of a pool share, and the functions over it.

    Args:
        threads: how many there are, the caller included.

    Attributes:
        address: of the memory.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._spread = ProcessorSpread()
        functions = _functions()
        self._serve = functions.serve.releasing_gil
        self._share = functions.share
        self._request = functions.request.holding_gil
        self._rouse = functions.rouse.holding_gil
        self._wait = functions.wait.releasing_gil
        words = _FIRST_SEAT + _SEAT * (threads + 1)
        self._memory: np.ndarray[Any, Any] = empty_aligned(8 * words).view(np.int64)
        self._memory[:] = 0
        self.address = address(self._memory)
        self._memory[_CALLS : _CALLS + 5] = _system_functions()
        self._memory[_SPINS], self._memory[_THREADS] = _POLLS, threads
        process = ctypes.CDLL(None)
        for seat in range(threads + 1):
            at = self._seat(seat)
            process.pthread_mutex_init(ctypes.c_void_p(at + 8 * _MUTEX), None)
            process.pthread_cond_init(ctypes.c_void_p(at + 8 * _CONDITION), None)

    def _seat(self, number: int) -> int:
        return self.address + 8 * (_FIRST_SEAT + _SEAT * number)

    @property
    def share_function(self) -> NativeFunction:
        """The function of an entry that is a job; its pointers are a frame (`job_frame`)."""
        return self._share

    def job_frame(self, entries: int, count: int, wake: bool = True) -> np.ndarray[Any, Any]:
        """Return the frame of a job.

        Args:
            entries: address of its entries, which the caller keeps alive.
            count: how many there are.
            wake: whether helpers that sleep are woken.
        """
        each = -(-count // self.threads)
        helpers = min(self.threads - 1, count - 1) if wake else 0
        return np.array([self.address, entries, count, each, helpers], np.int64)

    def run(self, entries: np.ndarray[Any, Any], count: int) -> None:
        """Run the entries of a table as a job."""
        frame = self.job_frame(address(entries), count)
        self._share.releasing_gil(ctypes.c_void_p(address(frame)), None, 0, 1)

    def rouse(self) -> None:
        """Wake the helpers that sleep, since a job is about to come; move them off the caller's
        processor."""
        self.leave_processor()
        self._rouse(self.address, None, 1, self.threads)

    def leave_processor(self) -> None:
        """Move the helpers off the caller's processor, if it has moved."""
        self._spread.leave_processor()

    def serve(self, thread: int, answered: int) -> int:
        """Run shares on the calling thread, until there is a request beyond `answered`; returns
        the number of requests."""
        if not answered:
            self._spread.add_thread()
        seat = self._seat(thread)
        self._serve(ctypes.c_void_p(self.address), ctypes.c_void_p(seat), thread, answered)
        return int(self._memory[_FIRST_SEAT + _SEAT * thread + _REQUESTED])

    def request(self, thread: int) -> None:
        """Ask a thread to return from `serve`."""
        self._request(ctypes.c_void_p(self.address), ctypes.c_void_p(self._seat(thread)), 0, 0)

    def wait(self, thread: int) -> None:
        """Wait until a thread has answered all requests: it is in `serve` again."""
        self._wait(ctypes.c_void_p(self.address), ctypes.c_void_p(self._seat(thread)), 0, 0)


@cache
def _system_functions() -> list[int]:
    process = ctypes.CDLL(None)
    names = ("pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait",
             "pthread_cond_signal", "sched_yield")  # fmt: skip
    return [ctypes.cast(getattr(process, n), ctypes.c_void_p).value or 0 for n in names]
