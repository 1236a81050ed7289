"""Traces: spans become files that Perfetto opens, and measurements that plans show."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from graphflow.errors import SessionError
from graphflow.runtime.trace import Span, Trace, link

A, B, GPU = "/worker:0/cpu:0", "/worker:1/cpu:0", "/worker:1/gpu:0"
EDGES = {7: ("matmul", A, B, 4096), 8: ("relu", B, GPU, 128)}
MS = 1_000_000


def spans(start: int) -> list[Span]:
    """A multiplies and sends; B waits, adds; its GPU adds as well."""
    return [
        (A, "matmul", start, start + 2 * MS),
        ("departure", "7", start + 2 * MS, start + 2 * MS),
        (B, "recv/matmul/7", start + MS // 2, start + 3 * MS),
        ("arrival", "7", start + 3 * MS, start + 3 * MS),
        (B, "relu", start + 3 * MS, start + 4 * MS),
        ("departure", "8", start + 4 * MS, start + 4 * MS),
        (GPU, "add", start + 4 * MS, start + 5 * MS),
    ]


def trace(*makespans: int) -> Trace:
    made = Trace()
    at = 1_000_000_000_000
    for number, makespan in enumerate(makespans, 1):
        made.add_step(number, at, at + makespan * MS, spans(at), EDGES, {A: 100 * number, B: 50})
        at += makespan * MS
    return made


def events(made: Trace, phase: str) -> list[dict[str, Any]]:
    return [event for event in made.to_dict()["traceEvents"] if event["ph"] == phase]


def test_a_departure_and_an_arrival_make_a_transfer_on_the_link() -> None:
    (step,) = trace(6).steps
    (moved,) = [event for event in step.events if event.kind == "transfer"]
    assert (moved.track, moved.name, moved.bytes) == (link(A, B), "matmul", 4096)
    assert moved.end - moved.start == MS


def test_what_left_and_never_came_is_left_out() -> None:
    assert link(B, GPU) not in {event.track for event in trace(6).steps[0].events}


def test_an_edge_that_nobody_described_is_left_out() -> None:
    made = Trace()
    made.add_step(1, 0, 10, [("departure", "9", 1, 1), ("arrival", "9", 2, 2)], EDGES)
    assert made.steps[0].events == ()


def test_the_measured_step_is_the_median_from_its_own_start() -> None:
    seen = trace(9, 5, 7).measured()
    assert seen.makespan == pytest.approx(7e-3)
    assert seen.steps == 3
    assert seen.peak_memory == {A: 300, B: 50}
    kinds = {(bar.track, bar.name): bar for bar in seen.timeline}
    assert kinds[A, "matmul"].start == 0.0
    assert kinds[A, "matmul"].finish == pytest.approx(2e-3)
    assert kinds[B, "recv/matmul/7"].kind == "wait"
    assert kinds[link(A, B), "matmul"].kind == "transfer"
    assert kinds[GPU, "add"].kind == "compute"


def test_of_an_even_number_of_steps_the_median_is_between_the_middle_two() -> None:
    assert trace(9, 6).measured().makespan == pytest.approx(7.5e-3)


def test_peak_memory_may_be_given() -> None:
    assert trace(6).measured({B: 1}).peak_memory == {B: 1}


def test_nothing_traced_is_nothing_measured() -> None:
    with pytest.raises(SessionError, match="no step ran"):
        Trace().measured()


def test_every_track_has_a_name_and_its_own_place() -> None:
    made = trace(6)
    places = {
        event["args"]["name"]: (event["pid"], event["tid"])
        for event in events(made, "M")
        if event["name"] == "thread_name"
    }
    assert set(places) == {"steps", A, B, GPU, link(A, B)}
    assert len(set(places.values())) == len(places)
    assert places[B][0] == places[GPU][0] != places[A][0]
    named = {event["pid"] for event in events(made, "M") if event["name"] == "process_name"}
    assert {event["pid"] for event in events(made, "X")} <= named


def test_complete_events_have_microseconds_and_say_which_step() -> None:
    for event in events(trace(6, 7), "X"):
        assert isinstance(event["ts"], float) and event["ts"] >= 0
        assert isinstance(event["dur"], float) and event["dur"] >= 0
        assert event["args"]["step"] in (1, 2)
    (first, second) = [event for event in events(trace(6, 7), "X") if event["name"] == "relu"]
    assert (first["ts"], first["dur"]) == (3000.0, 1000.0)
    assert second["ts"] == 9000.0


def test_a_transfer_has_bytes_and_an_arrow_from_device_to_device() -> None:
    made = trace(6, 6)
    moved = [event for event in events(made, "X") if event["cat"] == "transfer"]
    assert [event["args"]["bytes"] for event in moved] == [4096, 4096]
    starts, ends = events(made, "s"), events(made, "f")
    assert [event["id"] for event in starts] == [event["id"] for event in ends]
    assert len({event["id"] for event in starts}) == 2
    for start, end in zip(starts, ends, strict=True):
        assert start["ts"] <= end["ts"]
        assert (start["pid"], start["tid"]) != (end["pid"], end["tid"])
        assert end["bp"] == "e"


def test_the_file_is_json_and_replaces_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    made = trace(6)
    made.save(path)
    assert json.loads(path.read_text()) == made.to_dict()
    assert os.listdir(tmp_path) == ["trace.json"]


def test_an_empty_trace_is_saved(tmp_path: Path) -> None:
    Trace().save(tmp_path / "trace.json")
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


def test_a_path_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="no_such_folder"):
        trace(6).save(tmp_path / "no_such_folder" / "trace.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SessionError, match="folder"):
        trace(6).save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]
