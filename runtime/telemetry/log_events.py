"""The log events: each with its level, its meaning and its fields, for programs that read logs."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from graphflow.base.lazy_dataclass import dataclass


@dataclass(frozen=True)
class LogEvent:
    """The declaration of a log event.

    Attributes:
        level: a level of `logging`.
        meaning: what has happened, for the documentation.
        fields: names that it may carry, in the order in which they are written.
        limit: lines in ten seconds for one value of the first field, and ten times as many for all
            values; 0 for no limit. Events that a stranger can cause at will have a limit.
    """

    level: int
    meaning: str
    fields: tuple[str, ...]
    limit: int = 0


def _event(level: int, meaning: str, fields: str, limit: int = 0) -> LogEvent:
    return LogEvent(level, meaning, tuple(fields.split()), limit)


_D, _I, _W, _E = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

EVENTS: Mapping[str, LogEvent] = {
    # Workers
    "worker.listening": _event(
        _I, "a worker listens for sessions", "address devices version pid key"
    ),
    "worker.stopped": _event(_I, "a worker has stopped", "address seconds"),
    "session.opened": _event(
        _I, "a worker opened a session", "session epoch worker workers address", limit=20
    ),
    "session.closed": _event(_I, "a worker closed a session", "session seconds steps", limit=20),
    "session.broken": _event(_W, "a worker abandoned a session", "session reason", limit=5),
    "step.computed": _event(_D, "a worker computed its part of a step", "session step seconds"),
    "step.failed": _event(
        _W, "a worker's part of a step failed", "session step seconds error reason"
    ),
    "step.cancelled": _event(
        _D,
        "a worker cancelled a step on the coordinator's order",
        "session step seconds error reason",
    ),
    "answer.unsent": _event(_W, "a worker cannot send an answer", "session reason", limit=5),
    # Coordinators
    "cluster.waiting": _event(
        _I, "the session waits for workers that have not answered", "session seconds workers"
    ),
    "cluster.ready": _event(_I, "all workers are ready", "session workers seconds"),
    "program.loaded": _event(
        _D, "workers have loaded a program", "session program workers bytes seconds"
    ),
    "step.committed": _event(_D, "a step was committed", "session step seconds"),
    "step.aborted": _event(
        _W, "a step was aborted and changed nothing", "session step seconds error reason"
    ),
    "worker.unfit": _event(
        _W,
        "a worker came back, but the session cannot use it",
        "session address reason",
    ),
    "worker.lost": _event(_W, "a worker was lost", "session worker address reason"),
    "session.ended": _event(_I, "a coordinator closed its session", "session seconds steps"),
    "session.unconfirmed": _event(
        _I, "not every worker confirmed that it closed the session", "session reason"
    ),
    "loop.failed": _event(_E, "an I/O thread ended by an error in graphflow", "session reason"),
    "placement.changed": _event(_I, "a session changed to a better placement", "text"),
    "placement.kept": _event(_D, "a session found no better placement", "text"),
    "placement.confirmed": _event(
        _I, "steps confirmed a new placement", "promised measured before text"
    ),
    "placement.reverted": _event(
        _I, "a new placement was slower: the session went back", "promised measured before text"
    ),
    "servers.changed": _event(_I, "a server joined or left, and what moved", "text"),
    "servers.kept": _event(
        _W, "a worker was asked to end, and its server could not hand over", "worker reason"
    ),
    "tables.balanced": _event(_I, "ranges of tables' rows moved to other owners", "text"),
    "trial.ended": _event(_D, "a trial before a first plan ended early", "reason"),
    # Checkpoints and recovery
    "checkpoint.written": _event(_I, "a checkpoint was written", "step folder seconds"),
    "checkpoint.failed": _event(_W, "a checkpoint could not be written", "step reason"),
    "checkpoint.skipped": _event(
        _W,
        "a checkpoint was due while another was still being written",
        "folder step writing seconds",
        limit=5,
    ),
    "checkpoint.ignored": _event(_W, "a checkpoint is unusable; an older one is used", "reason"),
    "checkpoint.partial": _event(
        _W, "a checkpoint lacks variables; they keep their initial values", "folder missing"
    ),
    "checkpoint.unnamed": _event(
        _W,
        "variables without names took values by their order of use; others wait in the checkpoint",
        "folder variables",
    ),
    "checkpoint.cleaned": _event(_I, "leftovers of a crash were cleaned up", "folder what"),
    "session.resumed": _event(_I, "a session resumed from a checkpoint", "folder step"),
    "session.recovering": _event(_W, "a session lost a worker and recovers", "step reason"),
    "session.recovered": _event(
        _W, "a session has recovered", "step epoch workers replayed seconds"
    ),
    "session.taken_over": _event(
        _W, "other workers took the part of a lost one, by its mirrors", "step reason seconds"
    ),
    "mirrors.lost": _event(
        _W, "both copies of variables are lost; a checkpoint is needed", "step reason"
    ),
    "worker.restarted": _event(_W, "a launcher replaces a worker", "worker where"),
    "worker.joined": _event(_I, "a worker joined in place of a lost one", "worker replaces"),
    "worker.unreplaced": _event(_W, "no worker joined in place of a lost one", "worker reason"),
    "mirrors.complete": _event(_I, "each variable has a mirror again", "step"),
    "session.drained": _event(_W, "a session ended on request", "step folder"),
    "recovery.lost": _event(
        _W, "steps since the last checkpoint could not be replayed", "step reason"
    ),
    # Peers
    "message.refused": _event(_W, "an invalid message was refused", "peer reason", limit=5),
    "key.refused": _event(
        _W, "a connection without a trusted key was refused", "address key", limit=5
    ),
    "connection.dropped": _event(
        _W,
        "a connection was closed: too many, silent, or invalid messages",
        "address reason",
        limit=5,
    ),
    "key.forbidden": _event(
        _W, "a request was refused: the key's role does not allow it", "key reason", limit=5
    ),
    "keys.unreadable": _event(
        _W, "the key files are unreadable: no new connection is accepted", "reason", limit=5
    ),
    # Metrics endpoint
    "metrics.listening": _event(_I, "the metrics endpoint listens", "address"),
    "metrics.refused": _event(_W, "a request for metrics was refused", "peer reason", limit=5),
    # GPUs
    "devices.chosen": _event(
        _I, "a session chose between the CPU and GPUs for some fetches", "devices numbers"
    ),
    "gpu.unusable": _event(
        _W, "a GPU was found but cannot be used; the session goes on without", "device error reason"
    ),
    "gpu.fallback": _event(
        _W, "a GPU library failed; our own kernel is used", "device op shapes error reason"
    ),
    "gpu.uncaptured": _event(
        _I, "work cannot be captured and runs outside of CUDA graphs", "program what error reason"
    ),
    "nccl.met": _event(_D, "a GPU connected to its group in NCCL", "device rank of seconds"),
    "nccl.refused": _event(
        _W,
        "GPUs cannot connect in NCCL; collectives go through the host",
        "device rank error reason",
    ),
}
