"""The state of one session on a host: its variables, and its programs compiled for the sizes met.

A host has one state for each session. The devices run in parallel, one thread each, and meet in
`mail` and in `exchanges`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import field
from functools import partial
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.interrupts import defer_signals
from graphflow.errors import OpError, SessionError, StepTimeout
from graphflow.frontend.pytree import symbols_of
from graphflow.ir.device_name import DeviceName
from graphflow.ops.communication.send_recv import RECEIVING_OPS, SENDING_OPS
from graphflow.runtime.collectives.program_collectives import ProgramCollectives
from graphflow.runtime.collectives.ring_ends import RingReceiver, RingSender
from graphflow.runtime.collectives.session_collectives import SessionCollectives
from graphflow.runtime.collectives.shared_memory_edges import ShmEdgeReceiver, ShmEdgeSender
from graphflow.runtime.collectives.shared_memory_rings import agree_on_rings
from graphflow.runtime.host.device_backends import DeviceBackends
from graphflow.runtime.host.edge_channel import CrossDeviceEdges, exchanges_with_other_workers
from graphflow.runtime.host.host_variables import HostVariables
from graphflow.runtime.memory.arenas import Arena, Arenas
from graphflow.runtime.memory.backend import DeviceBackend, ResultExporter
from graphflow.runtime.partitioning.partition import SPECIALISATION_LIMITS, Partition
from graphflow.runtime.program.program import Program
from graphflow.runtime.program.span_recorder import Span
from graphflow.runtime.transport.tensor_mailbox import TensorMailbox
from graphflow.runtime.wire.step_values import EDGE_BITS, Computed, HostUsage, TensorParcel, step_of

Array = np.ndarray[Any, Any]

FAILED = "@failed"
"""Key among a step's sizes: how many steps of the session have failed before it.

When it changes, all workers drop the agreements of their exchanges, also those that took no part in
the failed step."""
DRAWS = "@draws"
"""Key among a step's bindings: the number of steps committed before it, which seeds random ops.

A step that is tried again gets a new step number, its key on the wire, but draws the same."""

_COMMUNICATION_OPS = (*SENDING_OPS, *RECEIVING_OPS, "collective_start")
"""Ops that communicate with other devices."""

_EDGE_MASK = (1 << EDGE_BITS) - 1
_SIGNAL = np.zeros(0, np.uint8)

MAX_AGREED_FORMS = SPECIALISATION_LIMITS[0]
"""Combinations of sizes of a program for which a device keeps its agreements with other workers.

Each agreement takes file descriptors. The number is the least number of compiled forms kept."""


_Sizes = tuple[tuple[str, int], ...]


@dataclass
class _LoadedProgram:
    """A program's partitions, and each device's compiled forms by sizes.

    The form used last is at the end.

    Attributes:
        agreeing_devices: devices that agree with devices of other workers on how tensors travel.
        agreed: for each of these, the forms with such agreements. All these devices have used the
            same forms since the last failed step, so they drop the same ones.
    """

    name: str
    partitions: dict[str, Partition]
    symbols: dict[str, frozenset[str]]
    agreeing_devices: frozenset[str]
    compiled: dict[str, dict[_Sizes, Program]] = field(default_factory=dict)
    agreed: dict[str, dict[_Sizes, Program]] = field(default_factory=dict)


class SessionState:
    """One session's programs and variables on this host."""

    def __init__(
        self,
        name: str,
        worker: int,
        backends: DeviceBackends,
        outbox: Callable[[TensorParcel], None],
    ) -> None:
        self.mail = TensorMailbox(worker)
        self.exchanges = SessionCollectives(name, worker, self.mail, outbox)
        self._name = name
        self._worker = worker
        self._backends = backends
        self._arenas: dict[str, Arenas] = {}
        self._outbox = outbox
        self._programs: dict[str, _LoadedProgram] = {}
        self._variables = HostVariables(worker, backends)
        self._undecided: dict[int, list[Program]] = {}  # by undecided step
        self._failed_steps = 0  # when exchanges last agreed anew
        self._has_failed = False  # a step failed here, and the coordinator has not aborted it yet
        self._last_used: tuple[str, dict[str, int], list[Program]] | None = None  # by the last step
        self._departures: list[tuple[int, int]] | None = None
        self._is_traced = False
        self._commit_spans: list[Span] = []  # of the last commit; reported with the next step
        self.computing_threads: set[int] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._start_threads()

    def _start_threads(self) -> None:
        """Provide a thread for each device but one, which the calling thread has."""
        if self._threads is not None:
            self._threads.shutdown()
        if len(self._backends) > 1:
            self._threads = ThreadPoolExecutor(
                len(self._backends) - 1, f"graphflow-{self._worker}",
                initializer=partial(register_thread, self.computing_threads),
            )  # fmt: skip

    def open_gpu(self, device: str) -> int:
        free = self._backends.open_gpu(device)
        self._variables.add_device(device)
        self._start_threads()
        return free

    def set_result_memory(self, keep: ResultExporter | None) -> None:
        """Set the memory for results of steps and of `read`."""
        self._backends.set_result_memory(keep)

    def close(self) -> None:
        self.mail.cancel(2**62, SessionError("the session was closed"))
        self.exchanges.close()
        if self._threads is not None:
            self._threads.shutdown()
        self.forget(list(self._programs), [])
        self._backends.close()
        self._variables.close()
        self._undecided.clear()

    def add(self, program: str, partitions: Sequence[Partition]) -> None:
        self._variables.create(partitions)
        self._last_used = None
        self._programs[program] = _LoadedProgram(
            program,
            {p.device: p for p in partitions},
            {p.device: frozenset(symbols_of(p.graph.nodes)) for p in partitions},
            frozenset(p.device for p in partitions if exchanges_with_other_workers(p)),
        )

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
        if failed != self._failed_steps:
            self._failed_steps, self._has_failed = failed, False
            self.exchanges.abort()
            for met in [met for each in self._programs.values() for met in each.agreed.values()]:
                while met:
                    met.popitem()[1].forget_agreements()
        # A device that still waits for the failed step would consume this step's tensors.
        if self._has_failed:
            raise SessionError(
                f"step {step_of(step)} was not run, because the one before it failed"
            )
        try:
            programs = self._programs_of(program, sizes, draws)
            self.mail.deadline = monotonic() + deadline
            return self._compute_with(programs, step, draws, feeds, trace)
        except BaseException:
            self._has_failed = True
            raise

    def _compute_with(
        self,
        programs: list[Program],
        step: int,
        draws: int,
        feeds: Mapping[str, Array],
        trace: bool,
    ) -> Computed:
        if not trace:
            self._departures = self.mail.arrivals = None
            fetches = self._run(programs, step, draws, feeds, None)
            self._finish_exchanges(programs, step)
            self._undecided[step], self._commit_spans, self._is_traced = programs, [], False
            return Computed(fetches)
        departures: list[tuple[int, int]] = []
        arrivals: list[tuple[int, int, int]] = []
        self._departures, self.mail.arrivals = departures, arrivals
        spans: list[Span] = []
        fetches = self._run(programs, step, draws, feeds, spans)
        self._finish_exchanges(programs, step)
        spans += self._commit_spans
        spans += [("departure", str(edge), at, at) for edge, at in departures]
        spans += [("arrival", f"{edge}/{size}", at, at) for edge, at, size in arrivals]
        self._undecided[step], self._commit_spans, self._is_traced = programs, [], True
        return Computed(fetches, spans, {p.partition.device: p.peak for p in programs})

    def _finish_exchanges(self, programs: Sequence[Program], step: int) -> None:
        """End a step's exchanges with other workers, after all other work of the step."""
        self.exchanges.finish_handshakes(step)
        agree_on_rings([program.rings for program in programs], step)

    def _programs_of(self, name: str, bindings: dict[str, int], draws: int) -> list[Program]:
        """Return the programs of all devices for these sizes; mostly those of the step before."""
        if (
            self._last_used is not None
            and self._last_used[0] == name
            and self._last_used[1] == bindings
        ):
            return self._last_used[2]
        loaded = self._require_program(name)
        sizes = {**bindings, DRAWS: draws}
        found = [self._specialise(loaded, device, sizes) for device in loaded.partitions]
        self._last_used = (name, bindings, found)
        return found

    def direct_program(self, program: str, bindings: dict[str, int]) -> Program | None:
        loaded = self._require_program(program)
        if len(loaded.partitions) != 1:
            return None
        ((device, partition),) = loaded.partitions.items()
        if any(node.op.name in _COMMUNICATION_OPS for node in partition.graph.walk()):
            return None
        return self._specialise(loaded, device, bindings)

    def prepare(self, program: str, bindings: dict[str, int]) -> None:
        loaded = self._require_program(program)
        self._last_used = (
            None  # the next step notes again which form was used last, alike on all workers
        )
        for device in loaded.partitions:
            self._specialise(loaded, device, bindings).warm_up()

    def _require_program(self, program: str) -> _LoadedProgram:
        if program not in self._programs:
            raise SessionError(f"program {program!r} is not loaded on worker {self._worker}")
        return self._programs[program]

    def _specialise(self, loaded: _LoadedProgram, device: str, bindings: dict[str, int]) -> Program:
        """Return the device's program for these sizes, compiled at their first use."""
        kept = loaded.compiled.setdefault(device, {})
        key = tuple(sorted((s, bindings[s]) for s in loaded.symbols[device]))
        if device in loaded.agreeing_devices:
            # All devices must keep and drop the same forms, because they meet in them.
            key = tuple(sorted((s, n) for s, n in bindings.items() if not s.startswith("@")))
        program = kept.pop(key, None)
        if program is None:
            self._last_used = None
            partition = loaded.partitions[device]
            while len(kept) >= partition.max_specialisations:  # free memory before allocating more
                kept.pop(next(iter(kept))).free()
            backend = self._backends[device]
            if device not in self._arenas:
                self._arenas[device] = Arenas(backend)
            part = self._exchange_part(loaded.name, device, key)
            channel = CrossDeviceEdges.for_program(partition, bindings, self, backend, part)
            program = Program(
                partition, bindings, self._variables.of_device(device), backend, channel,
                self._arenas[device], self._variables.layouts[device],
            )  # fmt: skip
        kept[key] = program
        if device in loaded.agreeing_devices:
            met = loaded.agreed.setdefault(device, {})
            met.pop(key, None)
            met[key] = program
            if len(met) > MAX_AGREED_FORMS:
                met.pop(next(iter(met))).forget_agreements()
        return program

    def _exchange_part(
        self, program: str, device: str, sizes: Sequence[tuple[str, int]]
    ) -> ProgramCollectives:
        """Return a device's part in the exchanges of a program, for some sizes.

        The key has the sizes only: symbols have names of the user's.
        """
        key = ",".join(str(size) for _, size in sizes)
        return ProgramCollectives(self.exchanges, f"{program}({key})", device)

    def _run(
        self,
        programs: list[Program],
        step: int,
        draws: int,
        feeds: Mapping[str, Array],
        spans: list[Span] | None,
    ) -> dict[str, Array]:
        """Run all devices' compute parts.

        The first failure ends the waits of the other devices, and is raised.
        """
        if len(programs) == 1:
            return programs[0].compute(feeds, step, draws, spans)
        assert self._threads is not None
        errors: list[BaseException] = []

        def one(program: Program) -> dict[str, Array]:
            try:
                return program.compute(feeds, step, draws, spans)
            except BaseException as error:
                errors.append(error)
                self.mail.cancel(
                    step, OpError(f"step {step_of(step)} failed on another device: {error}")
                )
                return {}

        futures: list[Future[dict[str, Array]]] = []
        try:
            with defer_signals():  # an interrupt would leave the executor's locks held
                futures += [self._threads.submit(one, program) for program in programs[:-1]]
            fetches = one(programs[-1])  # on this thread, which saves a switch
            wait(futures)
        except BaseException:  # Ctrl-C: the next step uses the same buffers
            self.mail.cancel(step, OpError(f"step {step_of(step)} was interrupted"))
            wait(futures)
            raise
        if errors:
            raise errors[0]
        for future in futures:
            fetches |= future.result()
        return fetches

    def send(
        self, step: int, edge: int, target: DeviceName, array: Any, backend: DeviceBackend
    ) -> None:
        """Send a tensor to another device: by reference, or as a message."""
        if self._departures is not None:
            self._departures.append((edge, monotonic_ns()))
        if target.worker == self._worker:
            self.mail.put(step, edge, backend.hand_over(array, target.kind or "cpu"))
        else:
            # The memory layout keeps a sent buffer until the step ends; by then it was received.
            host = array if isinstance(array, np.ndarray) else backend.to_host(array)
            self._outbox(TensorParcel(self._name, step, edge, target.worker or 0, host, True))

    def send_shared(
        self, step: int, edge: int, passage: ShmEdgeSender | RingSender, array: Array
    ) -> bool:
        """Send a tensor through shared memory; return False if the edge cannot use it."""
        started = monotonic_ns() if self._departures is not None else 0
        if not passage.send(step, edge, array):
            return False
        if self._departures is not None:
            self._departures.append((edge, started))
        if self.mail.on_transfer is not None:
            self.mail.on_transfer("sent", passage.peer, edge & _EDGE_MASK, array.nbytes)
        return True

    def receive_shared(
        self, step: int, edge: int, passage: ShmEdgeReceiver | RingReceiver
    ) -> Array | None:
        """Return a tensor from shared memory; None if the edge does not use it."""
        array = passage.receive(step, edge)
        if array is None:
            return None
        if self.mail.arrivals is not None:
            self.mail.arrivals.append((edge, passage.arrival_time(edge), array.nbytes))
        if self.mail.on_transfer is not None:
            self.mail.on_transfer("received", passage.peer, edge & _EDGE_MASK, array.nbytes)
        return array

    def send_signal(self, step: int, what: str, device: DeviceName) -> None:
        """Send a device a key that carries no tensor."""
        if device.worker == self._worker:
            self.mail.put(step, what, _SIGNAL)
        else:
            self._outbox(
                TensorParcel(self._name, step, what, device.worker or 0, _SIGNAL, owned=True)
            )

    def commit(self, step: int) -> None:
        programs = self._undecided.pop(step, None)
        if programs is None:
            raise SessionError(
                f"step {step_of(step)} cannot commit: worker {self._worker} did not compute it"
            )
        for program in programs:
            if program.commits:
                program.commit(self._commit_spans if self._is_traced else None)
        self.mail.finish(step)

    def has_changes(self) -> bool:
        return any(p.commits for programs in self._undecided.values() for p in programs)

    def abort(self, step: int) -> None:
        for each in [each for each in self._undecided if each <= step]:
            del self._undecided[each]
        self.mail.cancel(step, StepTimeout(f"step {step_of(step)} was given up"))
        self.exchanges.abort()
        self._has_failed = False
        self.mail.finish(step)

    def usage(self) -> HostUsage:
        used: dict[str, set[Arena]] = {device: set() for device in self._backends}
        for loaded in list(self._programs.values()):
            for device, compiled in list(loaded.compiled.items()):
                used[device].update(p.arena for p in list(compiled.values()) if p.arena is not None)
        arenas = {
            device: sum(arena.used_bytes for arena in mine) + self._variables.layouts[device].nbytes
            for device, mine in used.items()
        }
        now = monotonic()
        waits = {each.awaited.what: now - each.since for each in list(self.mail.waits.values())}
        return HostUsage(arenas, self._variables.sizes(), waits)

    def read(self, variable: str) -> Array:
        return self._variables.read(variable)

    def snapshot(self) -> dict[str, Array]:
        return self._variables.snapshot()

    def write(self, variable: str, value: Array) -> None:
        self._variables.write(variable, value)

    def forget(self, programs: Sequence[str], variables: Sequence[str]) -> None:
        self._last_used = None
        for name in programs:
            loaded = self._programs.pop(name, None)
            for compiled in loaded.compiled.values() if loaded is not None else ():
                for program in compiled.values():
                    program.free()
        self._variables.forget(variables)

    def adopt(self, moved: Mapping[str, str], copied: Mapping[str, str]) -> None:
        self._variables.adopt(moved, copied)


def register_thread(threads: set[int]) -> None:
    """Record the calling thread; the initializer of thread pools."""
    threads.add(get_ident())
