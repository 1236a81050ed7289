"""Structured logs: one event is one line, with a stable name and key=value fields.

    Log.tell("worker.lost", worker=1, …) → a record of `logging` → a line of text or JSON

`EVENTS` declares every event with its level and its fields, so that programs that read logs can
rely on them. Records go through the standard library's loggers ("graphflow.worker" and so on).
Only `configure` installs a handler. The command line calls it, and sessions do if `GRAPHFLOW_LOG`
is set.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TextIO

from graphflow.base.environment import choice_setting
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, escape_unprintable

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
TEXT_CAP = 4000
"""Characters of a field; longer text is cut."""

_WINDOW_SECONDS = 10.0  # of rate limits
_MAX_PEERS = 1000  # peers whose counts are kept for rate limits
_SHOWN_DIGITS = 16  # digits of keys, tokens and names of sessions
_DIGITS = re.compile(r"[0-9a-fA-F]{32,}")
_BARE = re.compile(r"[^\s\"=\\]+")


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


class Log:
    """Logs the events of one part of the runtime to the standard logger `name`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def is_enabled(self, event: str) -> bool:
        """Return True if an event is logged. Callers ask before they compute expensive fields."""
        return self._logger.isEnabledFor(EVENTS[event].level)

    def tell(self, event: str, /, *, raised: BaseException | None = None, **fields: Any) -> None:
        """Log one event. Fields that are None or "" are left out.

        Args:
            event: its name in `EVENTS`.
            raised: an exception whose traceback is logged.

        Raises:
            ArgumentError: the event or one of the fields is not declared.
        """
        told = EVENTS.get(event)
        if told is None or not fields.keys() <= set(told.fields):
            raise ArgumentError(
                f"event {event!r} with fields {sorted(fields)} is not declared in EVENTS"
            )
        if not self._logger.isEnabledFor(told.level):
            return
        if told.limit:
            mine = _RATE_LIMITER.count_suppressed(
                event, str(fields.get(told.fields[0])), told.limit
            )
            silenced = (
                _RATE_LIMITER.count_suppressed(event, "", 10 * told.limit)
                if mine is not None
                else None
            )
            if mine is None or silenced is None:
                return
            fields["silenced"] = mine + silenced or None
        order = (*told.fields, "silenced")
        kept = {
            name: _to_json_value(fields[name])
            for name in order
            if fields.get(name) not in (None, "")
        }
        self._logger.log(
            told.level, "%s", EmittedEvent(event, kept), exc_info=raised, extra={"event": event},
            stacklevel=2,
        )  # fmt: skip


@dataclass(frozen=True)
class EmittedEvent:
    """A logged event, as the argument of a log record. Its text is one line."""

    event: str
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        return " ".join([self.event, *(f"{k}={quote_value(v)}" for k, v in self.fields.items())])


class _RateLimiter:
    """Counts logged events with a limit, by event and peer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], tuple[float, int, int]] = OrderedDict()

    def count_suppressed(self, event: str, peer: str, limit: int) -> int | None:
        """Count an event; return the number suppressed since the last logged one.

        Returns None if this event is to be suppressed, too.
        """
        now = time.monotonic()
        with self._lock:
            since, told, silent = self._seen.pop((event, peer), (now, 0, 0))
            if now - since >= _WINDOW_SECONDS:
                since, told = now, 0
            tells = told < limit
            self._seen[event, peer] = (since, told + tells, 0 if tells else silent + 1)
            while len(self._seen) > _MAX_PEERS:
                self._seen.popitem(last=False)
        return silent if tells else None


_RATE_LIMITER = _RateLimiter()


def _to_json_value(value: Any) -> Any:
    """Convert a value for JSON, and remove secrets.

    Long runs of hexadecimal digits are keys, tokens or names of sessions; only the first digits are
    kept.
    """
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    text = _DIGITS.sub(lambda found: found[0][:_SHOWN_DIGITS] + "…", str(value))
    return text if len(text) <= TEXT_CAP else text[:TEXT_CAP] + "…"


def quote_value(value: Any) -> str:
    """Format a field's value for a line of text: bare if possible, else quoted.

    Characters that could end the line, move the cursor or change the writing direction are escaped.
    """
    if isinstance(value, list):
        value = ",".join(str(item) for item in value)
    text = str(value)
    if text.isprintable() and _BARE.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escape_unprintable(escaped) + '"'


class TextFormat(logging.Formatter):
    """Formats a record as one line of text.

    `2026-01-31T12:00:00.123Z warning graphflow.worker session.broken session=… reason="…"`
    """

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_when(record)} {record.levelname.lower()} {record.name} "
        told = _emitted_event(record)
        # A record of other code under our logger is no event: its message is one field.
        line += (
            str(told) if told is not None else f"message text={quote_value(record.getMessage())}"
        )
        trace = _traceback(record)
        return f"{line} traceback={quote_value(trace)}" if trace else line


class JsonFormat(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, event, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        told = _emitted_event(record) or EmittedEvent(
            "message", {"text": _to_json_value(record.getMessage())}
        )
        line = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": told.event,
            **told.fields,
        }
        if trace := _traceback(record):
            line["traceback"] = trace
        return json.dumps(line, ensure_ascii=True, allow_nan=True)


def _emitted_event(record: logging.LogRecord) -> EmittedEvent | None:
    arguments = record.args
    if isinstance(arguments, tuple) and arguments and isinstance(arguments[0], EmittedEvent):
        return arguments[0]
    return None


def _when(record: logging.LogRecord) -> str:
    """Format a record's time in UTC, so that logs of several machines can be compared."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info:
        return ""
    text = logging.Formatter().formatException(record.exc_info)
    return str(_to_json_value(text[-TEXT_CAP:]))


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `configure` installs, and finds by its class to replace it.

    Without a stream it writes to the current `sys.stderr`: notebooks and test runners replace it.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(stream)
        self._follows = stream is None

    def emit(self, record: logging.LogRecord) -> None:
        if self._follows and sys.stderr is not None:
            self.stream = sys.stderr
        super().emit(record)


def configure(format: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Write graphflow's events to a stream, one line each. A second call replaces the first.

    Args:
        format: "text" or "json".
        level: "debug", "info", "warning" or "error".
        stream: default: the current stderr.

    Raises:
        ArgumentError: the format or the level is unknown.
    """
    if format not in FORMATS:
        raise ArgumentError(f"logs are written as {' or '.join(FORMATS)}, not {format!r}")
    if level not in LEVELS:
        raise ArgumentError(f"a level of logs is one of {', '.join(LEVELS)}, not {level!r}")
    root = logging.getLogger("graphflow")
    for handler in [each for each in root.handlers if isinstance(each, _Handler)]:
        root.removeHandler(handler)
    handler = _Handler(stream)
    handler.setFormatter(JsonFormat() if format == "json" else TextFormat())
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False


def configure_by_environment(format: str | None = None, level: str | None = None) -> None:
    """Call `configure`, with arguments that are None taken from the environment.

    `GRAPHFLOW_LOG` is the format ("text" or "json"), `GRAPHFLOW_LOG_LEVEL` the level. If neither an
    argument nor the environment sets one of them, nothing happens.

    Raises:
        ArgumentError: the format or the level is unknown; the error names its source.
    """
    told = choice_setting("GRAPHFLOW_LOG", FORMATS) if format is None else format
    wanted = choice_setting("GRAPHFLOW_LOG_LEVEL", LEVELS) if level is None else level
    if told is not None or wanted is not None:
        configure(told or "text", wanted or "info")
