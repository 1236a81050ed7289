"""Exchanges by NCCL, with a stand-in that carries bytes between threads: the bits of the plain
kernel."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphflow.errors import StepTimeout
from graphflow.runtime.collectives import nccl
from graphflow.runtime.collectives.exchanges import Exchanges
from graphflow.runtime.collectives.nccl import Nccl
from graphflow.runtime.collectives.pieces import Collective
from graphflow.runtime.mail import Mail
from graphflow.spec import TensorSpec
from tests.runtime.test_collectives import collective, plain, same_bits, together


class Device(np.ndarray[Any, Any]):
    """An array with an address, as CuPy's have."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class Stand:
    """NCCL between the threads of a test: sends and receives that meet when a group ends."""

    NCCL_UINT8 = 1

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.sent: dict[tuple[int, int], bytes] = {}
        self.aborted: list[int] = []
        self.own = threading.local()

    def NcclCommunicator(self, count: int, unique: Any, rank: int) -> Any:
        return SimpleNamespace(
            send=lambda at, size, kind, peer, stream: self.sent.__setitem__(
                (rank, peer), ctypes.string_at(at, size)
            ),
            recv=lambda at, size, kind, peer, stream: self.own.wanted.append(
                (at, size, peer, rank)
            ),
            abort=lambda: self.aborted.append(rank),
        )

    def get_unique_id(self) -> tuple[int, ...]:
        return (1, 2, 3)

    def groupStart(self) -> None:
        self.own.wanted = []

    def groupEnd(self) -> None:
        self.barrier.wait(10)
        for at, size, peer, rank in self.own.wanted:
            data = self.sent.pop((peer, rank))
            assert len(data) == size
            ctypes.memmove(at, data, size)
        self.barrier.wait(10)


class Stream:
    ptr = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *raised: object) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        assert event.recorded is not None


class Event:
    def __init__(self, done: bool) -> None:
        self.done = done
        self.recorded: Any = None

    def record(self, stream: Any) -> None:
        self.recorded = stream


class Backend:
    """As much of a GPU's backend as there is to ask for; numpy computes."""

    def __init__(self, done: bool = True) -> None:
        self.stream = Stream()
        cuda = SimpleNamespace(Stream=lambda **more: Stream(), Event=lambda **more: Event(done))
        self.xp = SimpleNamespace(
            cuda=cuda,
            empty=lambda *args: np.empty(*args).view(Device),
            empty_like=np.empty_like,
            ascontiguousarray=lambda a: np.ascontiguousarray(a).reshape(a.shape).view(Device),
            add=np.add, maximum=np.maximum, minimum=np.minimum, multiply=np.multiply,
        )  # fmt: skip

    @contextmanager
    def active(self) -> Iterator[None]:
        with np.errstate(all="ignore"):
            yield


@settings(max_examples=200, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(st.data())
def test_nccl_gives_the_bits_of_the_plain_kernel(
    monkeypatch: pytest.MonkeyPatch, data: Any
) -> None:
    what, xs = collective(data.draw)
    stand = Stand(what.count)
    monkeypatch.setattr(nccl, "library", lambda: stand)
    ys = [np.zeros(what.result(r).shape, what.dtype).view(Device) for r in range(what.count)]

    def carry(rank: int) -> None:
        way = Nccl(what, rank, Backend(), (1, 2, 3))
        for _ in range(2):
            way.made()
            x = xs[rank].view(Device) if rank < len(xs) else None
            way.run(x, ys[rank], lambda: None)

    together([partial(carry, rank) for rank in range(what.count)])
    assert same_bits(ys, plain(what, xs)) and stand.sent == {}


def test_an_exchange_that_is_given_up_frees_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [np.ones(4, "f4")] * 2
    specs = tuple(TensorSpec((4,), np.dtype("float32")) for _ in xs)
    attrs = {"reduction": "sum", "algorithm": "direct", "hosts": None}
    what = Collective("all_reduce", 0, ("/worker:0/gpu:0", "/worker:0/gpu:1"), specs, attrs)
    stand = Stand(2)
    monkeypatch.setattr(nccl, "library", lambda: stand)

    def carry(rank: int) -> None:
        def go_on() -> None:
            raise StepTimeout("step 1: all_reduce did not come")

        way = Nccl(what, rank, Backend(done=False), (1,))
        way.made()
        with pytest.raises(StepTimeout):
            way.run(xs[rank].view(Device), np.zeros(4, "f4").view(Device), go_on)

    together([partial(carry, rank) for rank in range(2)])
    assert sorted(stand.aborted) == [0, 1]


@pytest.mark.parametrize("size", [5, 300_000])
def test_gpus_meet_by_way_of_the_host_and_go_on_by_themselves(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(2)
    monkeypatch.setattr(nccl, "library", lambda: stand)
    specs = (TensorSpec((size,), np.dtype("float32")),) * 2
    attrs = {"reduction": "sum", "algorithm": "ring", "hosts": None}
    devices = ("/worker:0/gpu:0", "/worker:0/gpu:1")
    what = Collective("all_reduce", 0, devices, specs, attrs)
    mail = Mail()
    mail.deadline = time.monotonic() + 60
    exchanges = Exchanges("s", 0, mail, lambda parcel: None)
    direct: list[bool] = []

    def go(rank: int) -> None:
        member = exchanges.part("p", devices[rank]).member(what, "y")
        member.use(Backend())
        for step in range(1, 5):
            x, y = np.full(size, step + rank, "f4").view(Device), np.zeros(size, "f4").view(Device)
            if member.on_device:
                member.start_on_device(step, x, y)
            else:
                member.start(step, rank, x, y, fixed=False, meanwhile=True)
            member.finish(step)
            direct.append(member.direct)
            assert (y == 2 * step + 1).all()

    together([partial(go, rank) for rank in range(2)])
    exchanges.close()
    assert direct.count(False) == 2 and direct.count(True) == 6


@pytest.mark.parametrize("form", [tuple, bytes])
def test_ranks_meet_under_a_name_of_either_form_that_cupy_has(form: type) -> None:
    """Bytes from CuPy 14 on; before, a tuple of C's chars, which may be negative."""
    given = (-1, 0, 127, *range(125)) if form is tuple else bytes([255, 0, 127, *range(125)])
    met: list[Any] = []

    def communicator(count: int, unique: Any, rank: int) -> str:
        if type(unique) is not form:
            raise TypeError("Argument 'commId' has incorrect type")
        met.append(unique)
        return "made"

    stand = SimpleNamespace(NcclCommunicator=communicator)
    assert nccl._communicator(stand, 2, tuple(given), 0) == "made"
    assert met == [given]
