"""A host without graphs: its programs are a few words that say what to do in a step.

It stands in for `runtime.host.Host` in tests of the wire, the protocol and the processes. A word is
one of: `sum` (fetches the sum of feeds and constants), `send:WORKER:NAME` (sends that sum over an
edge), `receive:NAME` (adds what arrives), `count` (adds 1 to the variable `n` at commit),
`spoil` (its commit fails), `sleep:SECONDS`, `raise`, `crash`, `lose` (its device).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.errors import DeviceLost, GraphflowError, GraphLimitError, OpError, StepTimeout
from graphflow.runtime.wire.step_values import Computed, HostUsage, TensorParcel


class FakeHost:
    def __init__(
        self,
        worker: int,
        devices: Sequence[str],
        threads: int | None,
        outbox: Callable[[TensorParcel], None],
    ) -> None:
        self.worker, self.devices, self.outbox = worker, list(devices), outbox
        self.programs: dict[str, tuple[list[str], list[Any]]] = {}
        self.variables: dict[str, Any] = {"n": np.zeros((), np.int64)}
        self.arrived: dict[tuple[int, Any], Any] = {}
        self.cancelled: dict[int, GraphflowError] = {}
        self.prepared: list[tuple[str, dict[str, int]]] = []
        self.pending: dict[int, int] = {}
        self.spoilt: set[int] = set()
        self.change = threading.Condition()

    def open(self, session: str) -> None:
        self.session = session

    def close(self, session: str) -> None:
        self.programs.clear()

    def load(self, session: str, program: str, header: bytes, buffers: list[Any]) -> None:
        if header == b"too large":
            raise GraphLimitError("the graph has 10000000 nodes, at most 16384 may travel")
        self.programs[program] = (header.decode().split(), buffers)

    def prepare(self, session: str, program: str, bindings: dict[str, int]) -> None:
        self.prepared.append((program, bindings))
        if "raise" in self.programs[program][0]:
            raise OpError("matmul_1 at model.py:7 cannot be compiled")

    def compute(
        self,
        session: str,
        program: str,
        step: int,
        bindings: dict[str, int],
        feeds: dict[str, Any],
        trace: bool,
        deadline: float,
    ) -> Computed:
        until = time.monotonic() + deadline
        words, buffers = self.programs[program]
        total: Any = sum(feeds.values(), start=np.float32(0)) + sum(buffers, start=np.float32(0))
        total = np.asarray(total)
        fetches, spans = {}, []
        for word in words:
            verb, *rest = word.split(":")
            started = time.monotonic_ns()
            if verb == "sum":
                fetches[f"sum{self.worker}"] = total
            elif verb == "sleep":
                time.sleep(float(rest[0]))
            elif verb == "raise":
                raise OpError("matmul_1 at model.py:7 failed: singular")
            elif verb == "lose":
                raise DeviceLost("gpu:0 failed: an illegal address")
            elif verb == "crash":
                os._exit(11)
            elif verb == "send":
                parcel = TensorParcel(session, step, rest[1], int(rest[0]), total)
                self.outbox(parcel)
            elif verb == "receive":
                total = total + self._receive(step, rest[0], until)
            elif verb == "count":
                self.pending[step] = 1
            elif verb == "spoil":
                self.spoilt.add(step)
            if trace:
                spans.append((self.devices[0], verb, started, time.monotonic_ns()))
        return Computed(fetches, spans, {self.devices[0]: 64} if trace else {})

    def _receive(self, step: int, edge: Any, until: float) -> Any:
        with self.change:
            while (step, edge) not in self.arrived:
                if step in self.cancelled:
                    raise self.cancelled[step]
                if not self.change.wait(max(0.0, until - time.monotonic())):
                    raise StepTimeout(f"step {step}: edge {edge} did not arrive")
            return self.arrived.pop((step, edge))

    def commit(self, session: str, step: int) -> None:
        if step in self.spoilt:
            raise OSError("there is no memory for it")
        self.variables["n"] = self.variables["n"] + self.pending.pop(step, 0)

    def abort(self, session: str, step: int) -> None:
        self.pending.pop(step, None)

    def deliver(self, session: str, step: int, edge: Any, array: Any) -> None:
        with self.change:
            self.arrived[step, edge] = array
            self.change.notify_all()

    def connect_mail(self, session: str, attend: Any, wake: Any, carried: Any, keep: Any) -> None:
        """Its threads wait for others to receive."""

    def cancel(self, session: str, step: int, reason: GraphflowError) -> None:
        with self.change:
            self.cancelled[step] = reason
            self.change.notify_all()

    def read(self, session: str, variable: str) -> Any:
        if variable == "unsendable":
            return np.array([None])
        return self.variables[variable]

    def snapshot(self, session: str) -> dict[str, Any]:
        return {name: np.array(value) for name, value in self.variables.items()}

    def write(self, session: str, variable: str, value: Any) -> None:
        self.variables[variable] = value

    def forget(self, session: str, programs: Sequence[str], variables: Sequence[str]) -> None:
        for name in programs:
            self.programs.pop(name, None)
        for name in variables:
            self.variables.pop(name, None)

    def usage(self, session: str) -> HostUsage:
        return HostUsage({self.devices[0]: 64}, {self.devices[0]: 8}, {"edge 3 from it ('x')": 0.5})

    def measure(self) -> dict[str, Any]:
        return {"devices": list(self.devices), "flops": np.float64(1e9), "pid": os.getpid()}

    def probe_speed(self) -> dict[str, Any]:
        return {"rate": 5.0, "pid": os.getpid()}
