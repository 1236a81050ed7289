"""Structured logs: one event is one line, with a stable name and key=value fields.

    Log.tell("worker.lost", worker=1, …) → a record of `logging` → a line of text or JSON

`log_events` declares every event with its level and its fields, so that programs that read logs can
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
from graphflow.runtime.telemetry.log_events import EVENTS

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
TEXT_CAP = 4000
"""Characters of a field; longer text is cut."""

_WINDOW_SECONDS = 10.0  # of rate limits
_MAX_PEERS = 1000  # peers whose counts are kept for rate limits
_SHOWN_DIGITS = 16  # digits of keys, tokens and names of sessions
_DIGITS = re.compile(r"[0-9a-fA-F]{32,}")
_BARE = re.compile(r"[^\s\"=\\]+")


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
