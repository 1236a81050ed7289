"""Ask the workers of a session for their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from graphflow.errors import GraphflowError
from graphflow.runtime.host.worker_state import LOST, SILENT, UP, WorkerState
from graphflow.runtime.security.keys import KeyPair

if TYPE_CHECKING:
    from graphflow.runtime.worker.worker_status import Report

_ANSWER_SECONDS = 2.0


def ask_workers(
    addresses: Sequence[str],
    devices: Mapping[int, Sequence[str]],
    *,
    lost: Mapping[int, str],
    keys: Sequence[str],
    pair: KeyPair | None,
    insecure: bool,
    ask: bool,
) -> tuple[WorkerState, ...]:
    """Ask all workers that are not lost for their status, at once, and return all states.

    Args:
        devices: by worker.
        lost: why each lost worker was lost.
        keys: the workers' public keys; "" for none.
        pair: this process's own key, if workers have keys.
        ask: False for states without processes and memory, which wait for nobody.
    """
    from graphflow.runtime.worker.worker_status import WorkerAddress, request_reports

    present = [worker for worker in range(len(addresses)) if worker not in lost]
    states = {}
    if ask:
        asked = [WorkerAddress(addresses[worker], keys[worker]) for worker in present]
        answers = request_reports(asked, seconds=_ANSWER_SECONDS, insecure=insecure, pair=pair)
        for worker, answer in zip(present, answers, strict=True):
            states[worker] = _state_from(worker, addresses[worker], devices, answer)
    else:
        for worker in present:
            names = tuple(devices.get(worker, ()))
            states[worker] = WorkerState(worker, addresses[worker], "", None, names, UP)
    for worker, reason in lost.items():
        states[worker] = WorkerState(
            worker, addresses[worker], "", None, tuple(devices.get(worker, ())), LOST, reason
        )
    return tuple(states[worker] for worker in sorted(states))


def _state_from(
    worker: int,
    address: str,
    devices: Mapping[int, Sequence[str]],
    answer: Report | GraphflowError,
) -> WorkerState:
    names = tuple(devices.get(worker, ()))
    if isinstance(answer, GraphflowError):
        return WorkerState(worker, address, "", None, names, SILENT, str(answer))
    host, pid, memory = answer["host"], answer["pid"], answer["resident"]
    return WorkerState(worker, address, host, pid, names, UP, memory=memory)
