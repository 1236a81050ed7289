"""A user's module of ops that do what no op should: end their process, hold the interpreter, take
all memory, raise, sleep, give what they do not say, or look at the clock."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from graphflow.errors import OpError, StaleEpoch, WorkerLost
from graphflow.ir.op import Op, register
from graphflow.ir.spec import spec


def _crash(xp: Any, x: Any) -> Any:
    ctypes.string_at(0)
    return x


def _hold(xp: Any, x: Any, seconds: float) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ctypes.PyDLL(None).usleep(int(1e5))  # unlike CDLL, it keeps the interpreter's lock
    return x


def _sleep(xp: Any, x: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return x


def _take(xp: Any, x: Any, nbytes: int) -> Any:
    taken = [bytearray(b"x" * (1 << 24)) for _ in range(nbytes >> 24)]
    return x + 0 * len(taken)


def _spread(xp: Any, x: Any, elements: int) -> Any:
    return x + 0 * xp.ones(elements, "float64")[:1].astype(x.dtype)


class Base(BaseException):
    """What `except Exception` lets through."""


class Untold(Exception):
    """What cannot say what it is."""

    def __str__(self) -> str:
        raise LookupError("no message")


RAISED: dict[str, type[BaseException]] = {
    each.__name__: each
    for each in (ZeroDivisionError, Base, SystemExit, Untold, WorkerLost, StaleEpoch, OpError)
}


def _raise(xp: Any, x: Any, what: str = "ZeroDivisionError") -> Any:
    raise RAISED[what]("as it was told to\ud800")


def _cut(xp: Any, x: Any) -> Any:
    return x[:1]


def _stamp(xp: Any, x: Any) -> Any:
    return xp.asarray([time.clock_gettime_ns(time.CLOCK_MONOTONIC)], "int64")


crash = register(Op("hazards.crash", infer=lambda x: x, kernel=_crash))
hold = register(Op("hazards.hold", infer=lambda x, seconds: x, kernel=_hold))
sleep = register(Op("hazards.sleep", infer=lambda x, seconds: x, kernel=_sleep))
take = register(Op("hazards.take", infer=lambda x, nbytes: x, kernel=_take))
spread = register(Op("hazards.spread", infer=lambda x, elements: x, kernel=_spread))
fail = register(Op("hazards.fail", infer=lambda x, **what: x, kernel=_raise))
cut = register(Op("hazards.cut", infer=lambda x: x, kernel=_cut))
stamp = register(Op("hazards.stamp", infer=lambda x: spec("int64", (1,)), kernel=_stamp))
