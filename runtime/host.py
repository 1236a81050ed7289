"""Host: runs the partitions of any number of sessions on the devices of one process; knows no
sockets.

The embedded session has one; each worker process has one. Devices of a host run beside each other,
one thread each, and hand tensors over by reference; a tensor for another worker goes to `outbox`,
one from there comes in through `deliver`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import Any

import numpy as np

from graphflow.device import DeviceName
from graphflow.errors import GraphflowError, OpError, SessionError, StepTimeout, VariableError
from graphflow.op import Node
from graphflow.placement.host import cores, everywhere
from graphflow.runtime.backend import Backend, backend_for, blas_limit
from graphflow.runtime.collectives.exchanges import Exchanges, Member, Part
from graphflow.runtime.collectives.pieces import Collective
from graphflow.runtime.executor import Program, Span
from graphflow.runtime.messages import EDGE_BITS, EXCHANGE, TAKEN, Computed, Key, Parcel, Usage
from graphflow.runtime.partition import Partition
from graphflow.runtime.security.limits import Limits
from graphflow.structure import symbols_of

Array = np.ndarray[Any, Any]

FAILED = "@failed"
"""Among a step's sizes: how many steps of the session have failed before it. Ways of exchanges that
were agreed before the last of them are forgotten, also by workers that took no part in it."""
DRAWS = "@draws"
"""Among a step's bindings: the number of steps committed before it, from which random ops draw. A
step that is tried again gets a new step number (its key on the wire) but draws the same."""

_ENDS = ("send", "recv", "collective_start")
"""Ops by which a program meets others."""

_SLICE = 0.002
"""Seconds between two looks of a thread at whether anybody receives what it waits for."""

_WORDS = (EXCHANGE, TAKEN)
"""What keys of what goes between devices begin with, beside edges, which are numbered."""

_WORD = np.zeros(0, np.uint8)

KEPT = 16
"""Combinations of sizes for which a device keeps a program compiled; each has an arena."""


class Host:
    """The devices of one process.

    Args:
        worker: this process's index in the cluster.
        devices: full names, "/worker:0/cpu:0".
        threads: per device; None: the cores shared out.
        outbox: takes a tensor for another worker; must not block.
        limits: what it takes on of programs from the wire.
        alone: nothing else in this process uses BLAS, which then stays as programs need it.
    """

    def __init__(
        self,
        worker: int,
        devices: Sequence[str],
        threads: int | None,
        outbox: Callable[[Parcel], None],
        limits: Limits | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self.worker = worker
        self._alone = alone
        self._limits = limits or Limits()
        self.devices = tuple(devices)
        self._count = threads or max(1, cores() // max(1, len(self.devices)))
        self._outbox = outbox
        self._sessions: dict[str, _Session] = {}

    def open(self, session: str) -> None:
        """Begin a session with no state, and threads of its own.

        Raises:
            DeviceError: a device is not to be had here.
        """
        backends = {d: backend_for(DeviceName.parse(d), self._count) for d in self.devices}
        self._sessions[session] = _Session(session, self.worker, backends, self._outbox)
        if self._alone:
            blas_limit().__enter__()

    def close(self, session: str) -> None:
        """Forget a session, its programs and its state; its threads end."""
        state = self._sessions.pop(session, None)
        if state is not None:
            state.close()
            if self._alone:
                blas_limit().__exit__(None, None, None)

    def load(self, session: str, program: str, header: bytes, buffers: list[Array]) -> None:
        """Take a program from the wire.

        Raises:
            ProtocolError, GraphLimitError: it does not verify.
        """
        from graphflow.runtime.codec import decode  # loads msgpack

        self.add(session, program, decode(header, buffers, self._limits))

    def add(self, session: str, program: str, partitions: Sequence[Partition]) -> None:
        """Take a program's partitions for devices of this host, and create its new variables."""
        self._of(session).add(program, partitions)

    def compute(
        self,
        session: str,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[str, Array],
        trace: bool,
        deadline: float,
    ) -> Computed:
        """Run the compute part of a step on all devices of this host; blocks.

        Args:
            deadline: seconds from now after which waits for tensors are given up.

        Raises:
            OpError: a kernel failed.
            StepTimeout: a tensor did not come in time.
        """
        return self._of(session).compute(program, step, bindings, feeds, trace, deadline)

    def ready(self, session: str, program: str, bindings: Mapping[str, int]) -> Program | None:
        """The one that computes a program's steps of these sizes, compiled; None where a step takes
        more than it: other devices, or edges between them."""
        return self._of(session).ready(program, dict(bindings))

    def prepare(self, session: str, program: str, bindings: Mapping[str, int]) -> None:
        """Compile a program for the sizes of coming steps, on all devices of this host."""
        self._of(session).prepare(program, dict(bindings))

    def set_deadline(self, session: str, seconds: float) -> None:
        """How long from now a step that is run by way of `ready` may take."""
        self._of(session).mail.deadline = monotonic() + seconds

    def commit(self, session: str, step: int) -> None:
        """Apply the assignments of the computed step."""
        self._of(session).commit(step)

    def changes(self, session: str) -> bool:
        """Whether committing the computed step would assign anything."""
        return self._of(session).changes()

    def abort(self, session: str, step: int) -> None:
        """Forget the step; nothing of it was applied."""
        self._of(session).abort(step)

    def deliver(self, session: str, step: int, edge: Key, array: Array) -> None:
        """Take a tensor from another worker; it may come before its step begins."""
        state = self._sessions.get(session)
        if state is not None and (isinstance(edge, int) or edge.startswith(_WORDS)):
            state.mail.put(step, edge, array)  # edges of programs are numbered

    def attend(
        self,
        session: str,
        attend: Callable[[Callable[[], bool], float], bool],
        wake: Callable[[], None],
    ) -> None:
        """How a thread that waits for a tensor may receive it itself, and how another one tells it
        to look again: see `Mail`."""
        mail = self._of(session).mail
        mail.attend, mail.wake = attend, wake

    def cancel(self, session: str, step: int, reason: GraphflowError) -> None:
        """Wake every wait of the step with an error."""
        state = self._sessions.get(session)
        if state is not None:
            state.mail.cancel(step, reason)

    def read(self, session: str, variable: str) -> Array:
        """A copy of a variable's value."""
        return self._of(session).read(variable)

    def snapshot(self, session: str) -> dict[str, Array]:
        """Copies of all variables, as the last commit left them."""
        return self._of(session).snapshot()

    def write(self, session: str, variable: str, value: Array) -> None:
        """Set a variable.

        Raises:
            VariableError: unknown here, or of another shape or dtype.
        """
        self._of(session).write(variable, value)

    def forget(self, session: str, programs: Sequence[str], variables: Sequence[str]) -> None:
        """Let go of programs, and of variables that live elsewhere from now on; unknown ones are
        none."""
        self._of(session).forget(programs, variables)

    def usage(self, session: str) -> Usage:
        """What a session takes of memory now, and what it waits for; from any thread."""
        state = self._sessions.get(session)
        return state.usage() if state is not None else Usage()

    def measure(self) -> dict[str, Any]:
        """Calibrate this machine: plain data for the cost model."""
        from graphflow.placement.calibrate import measure_machine

        with everywhere():
            return measure_machine(self.devices)

    def _of(self, session: str) -> _Session:
        state = self._sessions.get(session)
        if state is None:
            raise SessionError(f"session {session!r} is not open on worker {self.worker}")
        return state


class Mail:
    """Tensors that came and were not taken yet, by step and edge; waits end by arrival, cancel or
    deadline."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrays: dict[tuple[int, Key], tuple[Any, int]] = {}  # and when they came, in ns
        self._cancelled: tuple[int, GraphflowError] | None = None
        self._finished = -1
        self.deadline = 0.0
        self.attend: Callable[[Callable[[], bool], float], bool] | None = None
        """Receives, on the thread that calls it, until something has come or some seconds have
        passed; False: at once, for another thread does."""
        self.wake: Callable[[], None] = lambda: None
        """Has the thread that receives look at whether what it waits for has come otherwise."""
        self._receiving: set[int] = set()  # threads
        self._waiting = 0  # threads, for whom nobody receives but others
        self.arrivals: list[tuple[int, int]] | None = None
        self.waits: dict[tuple[int, Key], tuple[str, float]] = {}
        """What is being waited for, and since when."""

    def put(self, step: int, edge: Key, array: Any) -> None:
        if step <= self._finished:
            return  # late for a step that is over
        self._arrays[step, edge] = (array, monotonic_ns())
        if step <= self._finished:  # just now
            self._arrays.pop((step, edge), None)
        self._tell()

    def take(self, step: int, edge: Key, what: str) -> Any:
        """The tensor of an edge; `what` describes it in errors.

        Raises:
            StepTimeout: it did not come before the deadline.
            GraphflowError: what the step was cancelled with.
        """
        key = (step, edge)
        if key not in self._arrays:
            self._await(key, what)
        array, arrived = self._arrays.pop(key)
        # Noted here, for it may come before its step begins.
        if self.arrivals is not None and isinstance(edge, int):
            self.arrivals.append((edge, arrived))
        return array

    def _await(self, key: tuple[int, Key], what: str) -> None:
        def over() -> bool:
            return key in self._arrays or (
                self._cancelled is not None and self._cancelled[0] >= key[0]
            )

        self.waits[key] = (what, monotonic())
        try:
            while not over():
                left = self.deadline - monotonic()
                if left <= 0:
                    raise StepTimeout(
                        f"step {key[0]}: {what} did not come before the deadline; "
                        "is that worker slow or stuck? give Session a longer deadline"
                    )
                if self._receives(over, left):
                    if self._waiting:  # another device's thread may go on receiving
                        self._notify()
                    continue
                with self._changed:
                    self._waiting += 1
                    try:
                        if not over():  # and whoever drives may be about to stop
                            self._changed.wait(min(left, _SLICE))
                    finally:
                        self._waiting -= 1
        finally:
            del self.waits[key]
        if key not in self._arrays:
            assert self._cancelled is not None
            raise self._cancelled[1]

    def _tell(self) -> None:
        if self._waiting:
            self._notify()
        if self._receiving - {get_ident()}:  # this is another device's thread, and no socket's
            self.wake()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _receives(self, over: Callable[[], bool], seconds: float) -> bool:
        """Whether this thread was the one that receives, until something was over."""
        if self.attend is None:
            return False
        self._receiving.add(get_ident())
        try:
            return self.attend(over, seconds)
        finally:
            self._receiving.discard(get_ident())

    def given_up(self, step: int) -> GraphflowError | None:
        """What a step was cancelled with, if it was."""
        if self._cancelled is not None and self._cancelled[0] >= step:
            return self._cancelled[1]
        return None

    def check(self, step: int, loop: str, done: int, of: str) -> None:
        """Go on, unless the step is cancelled or its deadline has passed. Each iteration of a loop
        asks, so the message is made of its parts only when there is one.

        Raises:
            StepTimeout: the deadline has passed.
            GraphflowError: what the step was cancelled with.
        """
        if self._cancelled is not None and self._cancelled[0] >= step:
            raise self._cancelled[1]
        if monotonic() > self.deadline:
            raise StepTimeout(
                f"step {step}: {loop} was in iteration {done}{of} when the step's deadline passed; "
                "does the loop end? bound it (max_iterations), or give Session a longer deadline"
            )

    def cancel(self, step: int, reason: GraphflowError) -> None:
        """Every wait of this and earlier steps ends with the error, now or when it begins."""
        with self._changed:
            if self._cancelled is None or step > self._cancelled[0]:
                self._cancelled = (step, reason)
        self._tell()

    def finish(self, step: int) -> None:
        """Drop what is left of a step that is over."""
        if step > self._finished:
            self._finished = step
        for key in list(self._arrays) if self._arrays else ():
            if key[0] <= step:
                self._arrays.pop(key, None)


@dataclass
class _Loaded:
    """A program's partitions, and for each device their compiled forms by the sizes of symbols,
    the one used last at the end."""

    name: str
    partitions: dict[str, Partition]
    symbols: dict[str, frozenset[str]]
    compiled: dict[str, dict[tuple[tuple[str, int], ...], Program]] = field(default_factory=dict)


@cache
def _device(name: str) -> DeviceName:
    return DeviceName.parse(name)


@dataclass(frozen=True)
class _Channel:
    """Where the cut edges of one device lead."""

    session: _Session
    backend: Backend
    incoming: Mapping[int, str]  # what each edge brings, for errors
    sources: Mapping[int, DeviceName]  # where it comes from
    part: Part  # in exchanges

    def send(self, step: int, edge: int, target: str, array: Any) -> None:
        self.session.send(step, edge, _device(target), array, self.backend)

    def recv(self, step: int, edge: int) -> Any:
        what = self.incoming[edge & (2**EDGE_BITS - 1)]
        return self.session.mail.take(step, edge, what)

    def taken(self, step: int, edge: int, portion: int) -> None:
        self.session.tell(step, f"{TAKEN}{edge}/{portion}", self.sources[edge])

    def await_taken(self, step: int, edge: int, portion: int, target: str) -> None:
        what = f"room on edge {edge} in a loop, of which {target} has not received enough,"
        self.session.mail.take(step, f"{TAKEN}{edge}/{portion}", what)

    def member(self, what: Collective, name: str) -> Member:
        return self.part.member(what, name)

    def shared(self, nbytes: int) -> Array | None:
        return self.part.memory(nbytes)

    def close(self) -> None:
        self.part.close()

    def proceed(self, step: int, loop: str, done: int, of: str) -> None:
        self.session.mail.check(step, loop, done, of)


class _Session:
    """One session's programs and variables on this host."""

    def __init__(
        self,
        name: str,
        worker: int,
        backends: Mapping[str, Backend],
        outbox: Callable[[Parcel], None],
    ) -> None:
        self.mail = Mail()
        self.exchanges = Exchanges(name, worker, self.mail, outbox)
        self._name = name
        self._worker = worker
        self._backends = backends
        self._outbox = outbox
        self._programs: dict[str, _Loaded] = {}
        self._variables: dict[str, dict[str, Any]] = {device: {} for device in backends}
        self._computed: dict[int, list[Program]] = {}  # steps that are not settled
        self._failed = 0  # steps, when exchanges last agreed on their ways
        self._last: tuple[str, dict[str, int], list[Program]] | None = None  # of the last step
        self._departures: list[tuple[int, int]] | None = None
        self._traced = False
        self._committed: list[Span] = []  # of the last commit; told with the next step
        self._threads: ThreadPoolExecutor | None = None
        if len(backends) > 1:
            self._threads = ThreadPoolExecutor(len(backends) - 1, f"graphflow-{worker}")

    def close(self) -> None:
        self.mail.cancel(2**62, SessionError("the session was closed"))
        self.exchanges.close()
        if self._threads is not None:
            self._threads.shutdown()
        for backend in self._backends.values():
            backend.close()
        self._programs.clear()
        self._variables.clear()

    def add(self, program: str, partitions: Sequence[Partition]) -> None:
        fresh = {}
        for partition in partitions:
            if partition.device not in self._backends:
                raise SessionError(f"worker {self._worker} has no device {partition.device}")
            fresh[partition.device] = self._created(partition)
        for device, variables in fresh.items():
            self._variables[device].update(variables)
        self._last = None
        self._programs[program] = _Loaded(
            program,
            {p.device: p for p in partitions},
            {p.device: frozenset(symbols_of(p.graph.nodes)) for p in partitions},
        )

    def _created(self, partition: Partition) -> dict[str, Any]:
        """The variables that are new here, with their initial values."""
        mine = self._variables[partition.device]
        backend = self._backends[partition.device]
        fresh = {}
        for node in partition.graph.variables:
            if node.name in mine:
                _check(node.name, mine[node.name], node.specs[0].shape, node.specs[0].dtype)
            else:
                initial = node.attrs["initial"]
                fresh[node.name] = self._owned(backend, initial() if callable(initial) else initial)
        return fresh

    def _owned(self, backend: Backend, value: Array) -> Any:
        memory = backend.empty(value.nbytes).view(value.dtype).reshape(value.shape)
        backend.write(memory, value)
        return memory

    def compute(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[str, Array],
        trace: bool,
        deadline: float,
    ) -> Computed:
        sizes = dict(bindings)
        draws, failed = sizes.pop(DRAWS, step), sizes.pop(FAILED, 0)
        if failed != self._failed:
            self._failed = failed
            self.exchanges.abort()
        programs = self._programs_of(program, sizes, draws)
        self.mail.deadline = monotonic() + deadline
        if not trace:
            self._departures = self.mail.arrivals = None
            fetches = self._run(programs, step, draws, feeds, None)
            self._computed[step], self._committed, self._traced = programs, [], False
            return Computed(fetches)
        departures: list[tuple[int, int]] = []
        arrivals: list[tuple[int, int]] = []
        self._departures, self.mail.arrivals = departures, arrivals
        spans: list[Span] = []
        fetches = self._run(programs, step, draws, feeds, spans)
        spans += self._committed
        spans += [("departure", str(edge), at, at) for edge, at in departures]
        spans += [("arrival", str(edge), at, at) for edge, at in arrivals]
        self._computed[step], self._committed, self._traced = programs, [], True
        return Computed(fetches, spans, {p.partition.device: p.peak for p in programs})

    def _programs_of(self, name: str, bindings: dict[str, int], draws: int) -> list[Program]:
        """The programs of all devices for these sizes; mostly those of the step before."""
        if self._last is not None and self._last[0] == name and self._last[1] == bindings:
            return self._last[2]
        loaded = self._loaded(name)
        told = {**bindings, DRAWS: draws}
        found = [self._specialised(loaded, device, told) for device in loaded.partitions]
        self._last = (name, bindings, found)
        return found

    def ready(self, program: str, bindings: dict[str, int]) -> Program | None:
        loaded = self._loaded(program)
        if len(loaded.partitions) != 1:
            return None
        ((device, partition),) = loaded.partitions.items()
        if any(node.op.name in _ENDS for node in partition.graph.walk()):
            return None
        return self._specialised(loaded, device, bindings)

    def prepare(self, program: str, bindings: dict[str, int]) -> None:
        loaded = self._loaded(program)
        for device in loaded.partitions:
            self._specialised(loaded, device, bindings).rehearse()

    def _loaded(self, program: str) -> _Loaded:
        if program not in self._programs:
            raise SessionError(f"program {program!r} is not loaded on worker {self._worker}")
        return self._programs[program]

    def _specialised(self, loaded: _Loaded, device: str, bindings: dict[str, int]) -> Program:
        """The device's program for these sizes, compiled at their first use."""
        kept = loaded.compiled.setdefault(device, {})
        key = tuple(sorted((s, bindings[s]) for s in loaded.symbols[device]))
        if loaded.partitions[device].graph.of_op("collective_start"):
            # All devices keep and let go of the same ones, for they meet in them.
            key = tuple(sorted((s, n) for s, n in bindings.items() if not s.startswith("@")))
        program = kept.pop(key, None)
        if program is None:
            self._last = None
            while len(kept) >= KEPT:  # let go of the memory before taking more
                kept.pop(next(iter(kept))).free()
            partition = loaded.partitions[device]
            backend = self._backends[device]
            recvs = [n for n in partition.graph.walk() if n.op.name == "recv"]
            incoming = {n.attrs["edge"]: _incoming(n) for n in recvs}
            sources = {n.attrs["edge"]: DeviceName.parse(n.attrs["source"]) for n in recvs}
            program = Program(
                partition, bindings, self._variables[device], backend,
                _Channel(self, backend, incoming, sources, self._part(loaded.name, device, key)),
            )  # fmt: skip
        kept[key] = program
        return program

    def _part(self, program: str, device: str, sizes: Sequence[tuple[str, int]]) -> Part:
        """What a device does in the exchanges of a program, for some sizes."""
        told = ",".join(f"{symbol}={size}" for symbol, size in sizes)
        return self.exchanges.part(f"{program}({told})", device)

    def _run(
        self,
        programs: list[Program],
        step: int,
        draws: int,
        feeds: Mapping[str, Array],
        spans: list[Span] | None,
    ) -> dict[str, Array]:
        """All devices' compute parts; the first failure wakes the others and is the one raised."""
        if len(programs) == 1:
            return programs[0].compute(feeds, step, draws, spans)
        assert self._threads is not None
        errors: list[BaseException] = []

        def one(program: Program) -> dict[str, Array]:
            try:
                return program.compute(feeds, step, draws, spans)
            except BaseException as error:
                errors.append(error)
                self.mail.cancel(step, OpError(f"step {step} failed on another device: {error}"))
                return {}

        futures = [self._threads.submit(one, program) for program in programs[:-1]]
        try:
            fetches = one(programs[-1])  # on this thread: one hand-over less
            wait(futures)
        except BaseException:  # Ctrl-C: the next step uses the same buffers, so let go of them
            self.mail.cancel(step, OpError(f"step {step} was interrupted"))
            wait(futures)
            raise
        if errors:
            raise errors[0]
        for future in futures:
            fetches |= future.result()
        return fetches

    def send(self, step: int, edge: int, target: DeviceName, array: Any, backend: Backend) -> None:
        if self._departures is not None:
            self._departures.append((edge, monotonic_ns()))
        if target.worker == self._worker:
            self.mail.put(step, edge, backend.handed(array, target.kind or "cpu"))
        else:
            # The layout keeps a sent buffer until the step ends, and by then its receiver has it.
            host = array if isinstance(array, np.ndarray) else backend.to_host(array)
            self._outbox(Parcel(self._name, step, edge, target.worker or 0, host, True))

    def tell(self, step: int, what: str, device: DeviceName) -> None:
        """A word to a device, that no tensor goes with."""
        if device.worker == self._worker:
            self.mail.put(step, what, _WORD)
        else:
            self._outbox(Parcel(self._name, step, what, device.worker or 0, _WORD, owned=True))

    def commit(self, step: int) -> None:
        programs = self._computed.pop(step, None)
        if programs is None:
            raise SessionError(
                f"step {step} cannot commit: worker {self._worker} did not compute it"
            )
        for program in programs:
            if program.commits:
                program.commit(self._committed if self._traced else None)
        self.mail.finish(step)

    def changes(self) -> bool:
        return any(p.commits for programs in self._computed.values() for p in programs)

    def abort(self, step: int) -> None:
        for each in [each for each in self._computed if each <= step]:
            del self._computed[each]
        self.mail.cancel(step, StepTimeout(f"step {step} was given up"))
        self.exchanges.abort()
        self.mail.finish(step)

    def usage(self) -> Usage:
        arenas = dict.fromkeys(self._backends, 0)
        for loaded in list(self._programs.values()):
            for device, compiled in list(loaded.compiled.items()):
                arenas[device] += sum(program.memory.arena for program in list(compiled.values()))
        variables = {
            device: sum(value.nbytes for value in list(mine.values()))
            for device, mine in self._variables.items()
        }
        now = monotonic()
        waits = {what: now - since for what, since in list(self.mail.waits.values())}
        return Usage(arenas, variables, waits)

    def read(self, variable: str) -> Array:
        device, value = self._find(variable)
        return self._backends[device].to_host(value)

    def snapshot(self) -> dict[str, Array]:
        return {
            name: self._backends[device].to_host(value)
            for device, variables in self._variables.items()
            for name, value in variables.items()
        }

    def write(self, variable: str, value: Array) -> None:
        device, current = self._find(variable)
        _check(variable, current, value.shape, value.dtype)
        self._backends[device].write(current, value)

    def forget(self, programs: Sequence[str], variables: Sequence[str]) -> None:
        self._last = None
        for name in programs:
            loaded = self._programs.pop(name, None)
            for compiled in loaded.compiled.values() if loaded is not None else ():
                for program in compiled.values():
                    program.free()
        for mine in self._variables.values():
            for name in variables:
                mine.pop(name, None)

    def _find(self, variable: str) -> tuple[str, Any]:
        for device, variables in self._variables.items():
            if variable in variables:
                return device, variables[variable]
        raise VariableError(f"variable {variable!r} has no value on worker {self._worker} yet")


def _check(variable: str, current: Any, shape: Sequence[Any], dtype: Any) -> None:
    if current.shape != shape or current.dtype != dtype:
        raise VariableError(
            f"variable {variable!r} is {current.dtype}{current.shape}, not {dtype}{shape}"
        )


def _incoming(recv: Node) -> str:
    return (
        f"edge {recv.attrs['edge']} from {recv.attrs['source']} "
        f"({recv.name.removeprefix('recv/')!r}, made at {recv.location})"
    )
