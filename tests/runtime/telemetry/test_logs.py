"""Structured logs: one event is one line, declared, documented, bounded, and without secrets."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import ArgumentError
from graphflow.runtime.telemetry import logs
from graphflow.runtime.telemetry.log_events import EVENTS
from graphflow.runtime.telemetry.logs import (
    Log,
    configure,
    configure_by_environment,
    quote_value,
)
from tests.house.sources import ROOT, sources

LOG = Log("graphflow.test")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger("graphflow")
    before = (list(root.handlers), root.level, root.propagate)
    monkeypatch.setattr(logs, "_RATE_LIMITER", logs._RateLimiter())
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def configure_to_string(format: str = "text", level: str = "debug") -> io.StringIO:
    stream = io.StringIO()
    configure(format, level, stream)
    return stream


def test_stderr_is_what_it_is_when_something_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    configure()
    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        LOG.tell("worker.lost", session="s1")
        assert "worker.lost session=s1" in stream.getvalue()
        stream.close()


def test_an_event_is_one_line_of_names_and_values() -> None:
    stream = configure_to_string()
    LOG.tell("worker.lost", reason="its process ended", session="s1", worker=1)
    (line,) = stream.getvalue().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z warning graphflow.test "
        r'worker\.lost session=s1 worker=1 reason="its process ended"',
        line,
    )


def test_as_json_an_event_is_one_object_a_line() -> None:
    stream = configure_to_string("json")
    LOG.tell("cluster.ready", session="s1", workers=["a", "b"], seconds=0.12345678)
    LOG.tell("worker.stopped", address="tcp://127.0.0.1:1")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info", "logger": "graphflow.test", "event": "cluster.ready", "session": "s1",
        "workers": ["a", "b"], "seconds": 0.123457,
    }  # fmt: skip
    assert second["address"] == "tcp://127.0.0.1:1" and "seconds" not in second


@given(st.text())
def test_whatever_a_peer_says_stays_on_its_line_and_in_its_field(text: str) -> None:
    stream = configure_to_string()
    LOG.tell("worker.lost", session="s", reason=text)
    line = stream.getvalue()
    assert line.endswith("\n") and line[:-1].isprintable()
    assert len(line.splitlines()) == 1
    rest = re.sub(r'"(?:[^"\\]|\\.)*"', "", line)  # what is quoted holds no field
    assert rest.count("=") == 1 + (text != "")


@given(st.text())
def test_json_lines_hold_the_text_as_it_is(text: str) -> None:
    stream = configure_to_string("json")
    LOG.tell("worker.lost", session="s", reason=text)
    (line,) = stream.getvalue().splitlines()
    assert line.isascii()
    if not re.search("[0-9a-fA-F]{32}", text):
        assert json.loads(line).get("reason", "") == text


@pytest.mark.parametrize("format", logs.FORMATS)
def test_an_error_comes_with_where_it_was_raised_on_the_same_line(format: str) -> None:
    stream = configure_to_string(format)
    try:
        raise OSError("no\nsuch thing")
    except OSError as error:
        LOG.tell("loop.failed", reason=repr(error), raised=error)
    (line,) = stream.getvalue().splitlines()
    assert "test_logs.py" in line and "traceback" in line


@pytest.mark.parametrize("format", logs.FORMATS)
def test_what_other_code_logs_under_our_name_is_one_line_too(format: str) -> None:
    stream = configure_to_string(format)
    logging.getLogger("graphflow.users").warning("two\nlines of %s", "text")
    (line,) = stream.getvalue().splitlines()
    assert "message" in line and "two\\nlines of text" in line


def test_keys_tokens_and_names_of_sessions_are_cut() -> None:
    stream = configure_to_string()
    LOG.tell("key.refused", address="10.0.0.1", key="ab" * 32)
    assert "abababababababab…" in stream.getvalue() and "ab" * 9 not in stream.getvalue()


def test_a_long_text_is_cut() -> None:
    stream = configure_to_string()
    LOG.tell("session.broken", session="s", reason="x" * 100_000)
    assert len(stream.getvalue()) < 2 * logs.TEXT_CAP


def test_what_a_peer_could_cause_without_end_is_told_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    stream = configure_to_string("json")
    for _ in range(1000):
        LOG.tell("message.refused", peer="a", reason="garbage")
    LOG.tell("message.refused", peer="b", reason="garbage")
    assert [json.loads(line)["peer"] for line in stream.getvalue().splitlines()] == ["a"] * 5 + [
        "b"
    ]
    now += 11
    LOG.tell("message.refused", peer="a", reason="garbage")
    assert json.loads(stream.getvalue().splitlines()[-1])["silenced"] == 995


def test_many_peers_together_cannot_flood_either() -> None:
    stream = configure_to_string()
    for peer in range(5000):
        LOG.tell("message.refused", peer=f"peer {peer}", reason="garbage")
    assert len(stream.getvalue().splitlines()) == 50
    assert len(logs._RATE_LIMITER._seen) <= 1000


@pytest.mark.parametrize(
    "event",
    ["message.refused", "key.refused", "key.forbidden", "connection.dropped", "metrics.refused",
     "session.opened", "session.closed", "session.broken", "answer.unsent", "keys.unreadable"],
)  # fmt: skip
def test_what_strangers_can_cause_has_a_limit(event: str) -> None:
    assert 0 < EVENTS[event].limit <= 20


def test_an_event_below_the_level_costs_no_formatting() -> None:
    stream = configure_to_string(level="warning")
    LOG.tell("session.opened", session=_Unspeakable())
    assert not LOG.is_enabled("session.opened") and LOG.is_enabled("worker.lost")
    assert stream.getvalue() == ""


class _Unspeakable:
    def __str__(self) -> str:
        raise AssertionError("nobody listens")


def test_a_library_that_nobody_asked_for_logs_installs_no_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GRAPHFLOW_LOG", raising=False)
    monkeypatch.delenv("GRAPHFLOW_LOG_LEVEL", raising=False)
    before = list(logging.getLogger("graphflow").handlers)
    configure_by_environment()
    assert logging.getLogger("graphflow").handlers == before


def test_the_environment_asks_for_logs_and_a_second_time_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHFLOW_LOG", "json")
    monkeypatch.setenv("GRAPHFLOW_LOG_LEVEL", "error")
    configure_by_environment()
    configure_by_environment()
    LOG.tell("worker.lost", session="s")
    LOG.tell("loop.failed", session="s", reason="x")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "loop.failed"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("GRAPHFLOW_LOG", "yaml", "text or json"), ("GRAPHFLOW_LOG_LEVEL", "loud", "debug, info")],
)
def test_an_environment_that_asks_for_what_there_is_not_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=f"{name}.*{says}"):
        configure_by_environment()


def test_formats_and_levels_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ArgumentError, match="text or json"):
        configure("xml")
    with pytest.raises(ArgumentError, match="debug, info, warning, error"):
        configure("text", "verbose")


@pytest.mark.parametrize(
    ("event", "fields"), [("worker.died", {}), ("worker.lost", {"colour": "red"})]
)
def test_an_event_or_field_that_is_not_declared_is_a_mistake(
    event: str, fields: dict[str, str]
) -> None:
    with pytest.raises(ArgumentError, match="not declared in EVENTS"):
        LOG.tell(event, **fields)


@pytest.mark.parametrize("value", ["plain", "tcp://127.0.0.1:7001", "a/b:c"])
def test_a_plain_value_is_written_bare(value: str) -> None:
    assert quote_value(value) == value


@pytest.mark.parametrize("value", ["", "a b", "a=b", '"', "\x1b[2J", "\u202e", "\u2028", "\x9b"])
def test_any_other_value_is_quoted_and_printable(value: str) -> None:
    assert quote_value(value).startswith('"') and quote_value(value).isprintable()


def told_in_sources() -> Iterator[tuple[str, str, set[str]]]:
    """Every `_log.tell("event", field=…)` of the packages: where, which, with what."""
    for source in sources():
        if "_log.tell(" not in source.text:
            continue
        for node in ast.walk(source.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr != "tell" or not node.args:
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id.endswith("_log")):
                continue
            names = {keyword.arg or "**" for keyword in node.keywords} - {"raised"}
            for constant in ast.walk(node.args[0]):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield source.locate(node), constant.value, names


def test_events_are_told_with_their_fields_only() -> None:
    found = list(told_in_sources())
    assert len(found) > 30
    for where, event, names in found:
        assert event in EVENTS, f"{where}: {event}"
        allowed = set(EVENTS[event].fields)
        assert names - {"**"} <= allowed, f"{where}: {event} has no {names - allowed}"


def test_every_event_is_told_somewhere() -> None:
    text = "".join(Path(source.path).read_text(encoding="utf-8") for source in sources()
                   if source.path.name != "log_events.py")  # fmt: skip
    assert [event for event in EVENTS if f'"{event}"' not in text] == []


def test_nothing_in_the_runtime_logs_past_the_events() -> None:
    wrong = [
        str(source.path)
        for source in sources()
        if "import logging" in source.path.read_text(encoding="utf-8")
        and source.path.name not in ("logs.py", "log_events.py")
    ]
    assert wrong == []


def test_the_docs_list_every_event_with_its_fields_and_meaning() -> None:
    page = (ROOT / "docs" / "operations" / "logs.md").read_text(encoding="utf-8")
    for name, event in EVENTS.items():
        level = logging.getLevelName(event.level).lower()
        assert f"| `{name}` | {level} | {event.meaning} | {' '.join(event.fields)} |" in page
