"""Exchanges by NCCL, with a stand-in that carries bytes between threads: the bits of the plain
kernel."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphflow.base.environment import check_environment
from graphflow.errors import ArgumentError, StepTimeout
from graphflow.ir.spec import TensorSpec
from graphflow.runtime.collectives import nccl
from graphflow.runtime.collectives.nccl import Communicator, NcclCollective
from graphflow.runtime.collectives.program_collectives import ProgramCollectives
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.collectives.session_collectives import SessionCollectives
from graphflow.runtime.transport.tensor_mailbox import TensorMailbox
from tests.house.sources import ROOT
from tests.runtime.collectives.test_transports import (
    collective,
    compute_reference,
    have_same_bits,
    run_together,
)


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
        self.made: list[int] = []
        self.aborted: list[int] = []
        self.own = threading.local()

    def NcclCommunicator(self, count: int, unique: Any, rank: int) -> Any:
        self.made.append(rank)
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

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.synchronize = wait

    def __enter__(self) -> None:
        return None

    def __exit__(self, *raised: object) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        assert event.recorded is not None


class Event:
    recorded: Any = None

    def record(self, stream: Any) -> None:
        self.recorded = stream


class Backend:
    """As much of a GPU's backend as there is to ask for; numpy computes."""

    def __init__(self) -> None:
        self.stream = Stream()
        cuda = SimpleNamespace(Stream=lambda **more: Stream(), Event=lambda **more: Event())
        self.xp = SimpleNamespace(
            cuda=cuda,
            empty=lambda *args: np.empty(*args).view(Device),
            empty_like=np.empty_like,
            ascontiguousarray=lambda a: np.ascontiguousarray(a).reshape(a.shape).view(Device),
            add=np.add, maximum=np.maximum, minimum=np.minimum, multiply=np.multiply,
        )  # fmt: skip

    index = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        with np.errstate(all="ignore"):
            yield

    @contextmanager
    def side_stream(self, stream: Any) -> Iterator[None]:
        with self.active():
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
    ys = [np.zeros(what.result_spec(r).shape, what.dtype).view(Device) for r in range(what.count)]

    def carry(rank: int) -> None:
        group = Communicator(Backend())
        assert group.connect(what.count, (1, 2, 3), rank, lambda: None)
        way = NcclCollective(what, rank, group)
        for _ in range(2):
            way.record_ready()
            x = xs[rank].view(Device) if rank < len(xs) else None
            way.run(x, ys[rank], lambda: None)
        group.close()

    run_together([partial(carry, rank) for rank in range(what.count)])
    assert have_same_bits(ys, compute_reference(what, xs)) and stand.sent == {}


@pytest.mark.parametrize("where", ["in the call", "on the GPU"])
def test_an_exchange_that_is_given_up_frees_the_gpu(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for other ranks in a call, when they first exchange something, and in a kernel;
    what ends it comes from another thread."""
    stand, free = Stand(1), threading.Event()
    monkeypatch.setattr(nccl, "library", lambda: stand)
    backend = Backend()
    if where == "in the call":
        monkeypatch.setattr(stand, "groupEnd", lambda: free.wait(30))
    else:
        backend.xp.cuda.Stream = lambda **more: Stream(wait=lambda: free.wait(30))
    make = stand.NcclCommunicator

    def ends(*given: Any) -> Any:
        end = make(*given)
        return SimpleNamespace(**{**vars(end), "abort": lambda: (free.set(), end.abort())})

    monkeypatch.setattr(stand, "NcclCommunicator", ends)
    attrs = {"reduction": "sum", "algorithm": "direct", "hosts": None}
    specs = (TensorSpec((4,), np.dtype("float32")),)
    what = Collective("all_reduce", 0, ("/worker:0/gpu:0",), specs, attrs)
    end = time.monotonic() + 0.3

    def go_on() -> None:
        if time.monotonic() > end:
            raise StepTimeout("step 1: all_reduce did not come")

    group = Communicator(backend)
    assert group.connect(1, (1,), 0, go_on)
    way = NcclCollective(what, 0, group)
    way.record_ready()
    with pytest.raises(StepTimeout):
        way.run(np.ones(4, "f4").view(Device), np.zeros(4, "f4").view(Device), go_on)
    assert stand.aborted == [0] and time.monotonic() < end + 5


def test_a_group_that_meets_when_nobody_waits_any_more_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand, free = Stand(1), threading.Event()
    monkeypatch.setattr(nccl, "library", lambda: stand)
    make = stand.NcclCommunicator
    monkeypatch.setattr(
        stand, "NcclCommunicator", lambda *given: make(*given) if free.wait(30) else None
    )

    def go_on() -> None:
        raise StepTimeout("the step was given up")

    group = Communicator(Backend())
    with pytest.raises(StepTimeout):
        group.connect(1, (1,), 0, go_on)
    group.close()
    free.set()
    until = time.monotonic() + 5
    while not stand.aborted and time.monotonic() < until:
        time.sleep(0.01)
    assert stand.aborted == [0]


def _gpus(monkeypatch: pytest.MonkeyPatch, stand: Stand, *names: str) -> None:
    """Let a worker have these GPUs."""
    monkeypatch.setattr(nccl, "library", lambda: stand)
    monkeypatch.setattr(nccl, "_gpu_address", lambda index: names[index])


class Steps:
    """Steps of all-reduces between two GPUs of this process."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.devices = ("/worker:0/gpu:0", "/worker:0/gpu:1")
        attrs = {"reduction": "sum", "algorithm": "ring", "hosts": None}
        self.groups = [
            Collective("all_reduce", i, self.devices, (TensorSpec((n,), np.dtype("float32")),) * 2,
                       attrs)
            for i, n in enumerate(sizes)
        ]  # fmt: skip
        mail = TensorMailbox()
        mail.deadline = time.monotonic() + 60
        self.exchanges = SessionCollectives("s", 0, mail, lambda parcel: None)
        self.direct: list[bool] = []

    def run(self, steps: Sequence[int]) -> None:
        """Each rank has new parts, as after a program was compiled."""
        run_together([partial(self._go, rank, steps) for rank in range(2)])

    def _go(self, rank: int, steps: Sequence[int]) -> None:
        part = ProgramCollectives(self.exchanges, "p", self.devices[rank])
        members = [part.join(what, "y") for what in self.groups]
        ys = [np.zeros(what.specs[0].shape, "f4").view(Device) for what in self.groups]
        for member in members:
            member.use_gpu(Backend())
        for step in steps:
            for member, y in zip(members, ys, strict=True):
                x = np.full(y.shape, step + rank, "f4").view(Device)
                if member.can_run_on_device:
                    member.start_on_device(step, x, y)
                else:
                    member.start(step, rank, x, y, fixed=False, meanwhile=True)
                member.finish(step)
                self.direct.append(member.is_on_device)
                assert (y == 2 * step + 1).all()


@pytest.mark.parametrize("size", [5, 300_000])
def test_gpus_meet_by_way_of_the_host_and_go_on_by_themselves(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _gpus(monkeypatch, Stand(2), "host/0", "host/1")
    steps = Steps([size])
    steps.run(range(1, 5))
    steps.exchanges.close()
    assert steps.direct.count(False) == 2 and steps.direct.count(True) == 6


def test_all_collectives_among_the_same_gpus_go_by_one_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = Stand(2)
    _gpus(monkeypatch, stand, "host/0", "host/1")
    steps = Steps([5, 300_000, 7])
    steps.run(range(1, 4))
    assert sorted(stand.made) == [0, 1] and steps.direct.count(True) == 2 * 2 * 3
    steps.exchanges.abort()  # after a step that failed they meet anew, and the old ends are free
    assert sorted(stand.aborted) == [0, 1]
    steps.run(range(4, 6))
    assert sorted(stand.made) == [0, 0, 1, 1]
    steps.exchanges.close()
    assert sorted(stand.aborted) == [0, 0, 1, 1]


@pytest.mark.parametrize("names", [("host/0", "host/0"), ("host/0", "other/1")])
def test_gpus_that_may_not_meet_in_nccl_exchange_by_the_host(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes no GPU twice; to other hosts it speaks in the clear."""
    stand = Stand(2)
    _gpus(monkeypatch, stand, *names)
    steps = Steps([5, 300_000])
    steps.run(range(1, 4))
    steps.exchanges.close()
    assert not any(steps.direct) and stand.made == []


def test_nccl_is_for_one_host_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    what, told = Steps([5]).groups[0], {}
    for setting in (None, "off", "host", "on"):
        if setting is not None:
            monkeypatch.setenv("GRAPHFLOW_NCCL", setting)
        _gpus(monkeypatch, Stand(2), "host/0", "other/0")
        told[setting] = nccl.local_gpus(what, 0)
    assert told["off"] is None and told[None] == told["host"]
    assert nccl.can_use_nccl([told["on"]], 2) and not nccl.can_use_nccl([told["host"]], 2)
    one, other = {"at": ["a/0"], "far": True}, {"at": ["b/0"], "far": True}
    assert nccl.can_use_nccl([one, other], 2)
    assert not nccl.can_use_nccl([one, {**other, "far": False}], 2), "one of them does not allow it"
    assert not nccl.can_use_nccl([one, other], 3)
    for wrong in (None, {}, {"at": "a"}, [], "x"):
        assert not nccl.can_use_nccl([one, wrong], 2)
    monkeypatch.setenv("GRAPHFLOW_NCCL", "yes")
    with pytest.raises(ArgumentError, match=r"GRAPHFLOW_NCCL .* one of off, host, on, not 'yes'"):
        check_environment()


@pytest.mark.parametrize("fault", ["refuses", "waits"])
def test_ranks_that_do_not_meet_in_nccl_exchange_by_the_host(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand, free = Stand(2), threading.Event()
    make = stand.NcclCommunicator

    def faulty(count: int, unique: Any, rank: int) -> Any:
        if rank == 1 and fault == "refuses":
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: no network")
        if rank == 1:
            free.wait(30)
        return make(count, unique, rank)

    monkeypatch.setattr(stand, "NcclCommunicator", faulty)
    monkeypatch.setattr(nccl, "CONNECT_SECONDS", 0.3)
    _gpus(monkeypatch, stand, "host/0", "host/1")
    steps = Steps([5])
    steps.run(range(1, 4))
    free.set()
    steps.exchanges.close()
    assert not any(steps.direct)
    reason = "no network" if fault == "refuses" else "not all 2 ranks connected in 0.3 s"
    assert "nccl.refused device=gpu:0 rank=1" in caplog.text and reason in caplog.text


def test_a_step_that_is_given_up_while_ranks_meet_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stand, free = Stand(2), threading.Event()
    monkeypatch.setattr(stand, "NcclCommunicator", lambda *given: free.wait(30))
    _gpus(monkeypatch, stand, "host/0", "host/1")
    steps = Steps([5])
    steps.exchanges.mail.deadline = time.monotonic() + 0.5
    began = time.monotonic()
    with pytest.raises(StepTimeout):
        steps.run([1])
    free.set()
    steps.exchanges.close()
    assert time.monotonic() - began < 10


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
    assert nccl._create_communicator(stand, 2, tuple(given), 0) == "made"
    assert met == [given]


def test_nobody_is_warned_that_nccl_is_not_there(tmp_path: Path) -> None:
    """CuPy warns as its NCCL is imported: a stand-in does so here."""
    (tmp_path / "cupy" / "cuda").mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").write_text("")
    (tmp_path / "cupy" / "cuda" / "__init__.py").write_text("")
    (tmp_path / "cupy" / "cuda" / "nccl.py").write_text(
        "import warnings\navailable = False\nwarnings.warn('nccl library could not be loaded')\n"
    )
    asks = "from graphflow.runtime.collectives import nccl; print(nccl.library())"
    told = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", asks], env=told, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("None\n", "")
