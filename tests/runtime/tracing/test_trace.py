"""Traces: spans become files that Perfetto opens, and measurements that plans show."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, SessionError
from graphflow.runtime.tracing.events import Exchange, link_track
from graphflow.runtime.tracing.trace import Span, Trace

A, B, GPU = "/worker:0/cpu:0", "/worker:1/cpu:0", "/worker:1/gpu:0"
EDGES = {7: ("matmul", A, B, 4096), 8: ("relu", B, GPU, 128)}
MS = 1_000_000


def spans(start: int) -> list[Span]:
    """A multiplies and sends; B waits, adds; its GPU adds as well."""
    return [
        (A, "matmul", start, start + 2 * MS),
        (A, "send/matmul/7", start + 2 * MS, start + 2 * MS + MS // 4),
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
    assert (moved.track, moved.name, moved.bytes) == (link_track(A, B), "matmul", 4096)
    assert moved.end - moved.start == MS


def test_what_left_and_never_came_is_left_out() -> None:
    assert link_track(B, GPU) not in {event.track for event in trace(6).steps[0].events}


def test_an_edge_that_nobody_described_is_left_out() -> None:
    made = Trace()
    made.add_step(1, 0, 10, [("departure", "9", 1, 1), ("arrival", "9", 2, 2)], EDGES)
    assert made.steps[0].events == ()


@pytest.mark.parametrize("text", ["²", "9" * 5000, "-1", " 1", "1_0", "٣", ""])
def test_what_a_worker_tells_in_place_of_a_number_is_left_out(text: str, tmp_path: Path) -> None:
    tracks = ("departure", "arrival", f"/worker:{text}/cpu:0")
    trace = Trace()
    told = [(track, name, 5, 6) for track in tracks for name in (text, f"recv/x/{text}")]
    trace.add_step(1, 0, 9, told, {1: ("x", "/worker:0/cpu:0", "/worker:1/cpu:0", 4)})
    trace.save(tmp_path / "trace.json")
    assert not trace.edges and {event.edge for event in trace.steps[0].events} == {None}


def test_the_measured_step_is_the_median_from_its_own_start() -> None:
    seen = trace(9, 5, 7).measured()
    assert seen.makespan == pytest.approx(7e-3)
    assert seen.steps == 3
    assert seen.peak_memory == {A: 300, B: 50}
    kinds = {(bar.track, bar.name): bar for bar in seen.timeline}
    assert kinds[A, "matmul"].start == 0.0
    assert kinds[A, "matmul"].finish == pytest.approx(2e-3)
    assert kinds[B, "recv/matmul/7"].kind == "wait"
    assert kinds[link_track(A, B), "matmul"].kind == "transfer"
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
    assert set(places) == {"steps", A, B, GPU, link_track(A, B)}
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


@pytest.mark.parametrize("wrong", ["missing/trace.json", "", 5, "a\0b", "folder"])
def test_a_session_says_before_the_block_that_a_trace_cannot_be_written(
    wrong: Any, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / wrong if isinstance(wrong, str) and wrong.isprintable() and wrong else wrong
    with gf.Session() as s:
        with pytest.raises((ArgumentError, SessionError), match="trace"), s.trace(path):
            pytest.fail("the block began")
        with s.trace(tmp_path / "trace.json"):
            assert os.listdir(tmp_path) == ["folder"]
    assert sorted(os.listdir(tmp_path)) == ["folder", "trace.json"]


# What travelled --------------------------------------------------------------------------------


def test_sends_and_waits_know_their_edge_and_its_other_end() -> None:
    (step,) = trace(6).steps
    (send,) = [event for event in step.events if event.kind == "send"]
    (wait,) = [event for event in step.events if event.kind == "wait"]
    for event in (send, wait):
        assert (event.edge, event.bytes, event.source, event.target) == (7, 4096, A, B)
    assert send.track == A and wait.track == B


def test_a_node_whose_name_begins_like_a_send_is_a_node() -> None:
    made = Trace()
    made.add_step(1, 0, 10, [(A, "send/it", 1, 2), (A, "send/x/99", 2, 3)], EDGES)
    assert [(e.kind, e.edge) for e in made.steps[0].events] == [("compute", None)] * 2


def make_transfer_spans(*latencies: int, edge: int = 7, step: int = 1) -> list[Span]:
    found: list[Span] = []
    for use, latency in enumerate(latencies):
        key = str(edge | use << 32)
        at = 100 * MS * use
        found += [("departure", key, at, at), ("arrival", key, at + latency, at + latency)]
        found += [(A, f"send/matmul/{edge}", at, at + MS // 10)]
        found += [(B, f"recv/matmul/{edge}", at, at + latency)]
    return found


def test_edges_have_the_median_and_the_95_per_cent_of_their_latencies() -> None:
    made = Trace()
    made.add_step(1, 0, 10**10, make_transfer_spans(*(MS * i for i in range(1, 101))), EDGES)
    (edge,) = made.edges
    assert (edge.tensor, edge.source, edge.target, edge.bytes) == ("matmul", A, B, 4096)
    assert edge.count == 100 and edge.error == 0.0
    assert edge.latency == pytest.approx(50.5e-3) and edge.p95 == pytest.approx(95e-3)
    assert edge.waiting == pytest.approx(50.5e-3) and edge.sending == pytest.approx(1e-4)
    assert edge.bandwidth == pytest.approx(4096 / 50.5e-3)


def test_what_came_before_it_left_within_the_error_took_no_time() -> None:
    made = Trace()
    spans_ = [("departure", "7", 500, 500), ("arrival", "7", 400, 400)]
    made.add_step(1, 0, 1000, spans_, EDGES, errors={0: 0.0, 1: 2e-6})
    (edge,) = made.edges
    assert edge.latency == 0.0 and math.isinf(edge.bandwidth) and edge.error == 2e-6
    assert "2 µs" in str(made) and "–" in str(made)


def test_errors_of_both_ends_add_up_and_devices_of_one_worker_share_a_clock() -> None:
    made = Trace()
    spans_ = [*make_transfer_spans(MS), *make_transfer_spans(MS, edge=8)]
    made.add_step(1, 0, 10**9, spans_, EDGES, errors={0: 1e-6, 1: 2e-6})
    errors = {edge.edge: edge.error for edge in made.edges}
    assert errors == {7: pytest.approx(3e-6), 8: 0.0}


def test_a_clock_of_which_nothing_is_known_is_told() -> None:
    made = Trace()
    made.add_step(1, 0, 10**9, make_transfer_spans(MS), EDGES, errors={0: 0.0, 1: math.inf})
    assert "unknown" in str(made)
    json.dumps(made.to_dict(), allow_nan=False)


def test_the_edges_that_were_waited_for_longest_come_first() -> None:
    made = Trace()
    made.add_step(
        1, 0, 10**9, [*make_transfer_spans(MS), *make_transfer_spans(5 * MS, edge=8)], EDGES
    )
    assert [edge.edge for edge in made.edges] == [8, 7]


def test_a_printed_trace_is_a_table_and_a_notebook_shows_it_with_names_escaped() -> None:
    text = str(trace(6, 8))
    assert text.splitlines()[0] == "2 traced steps, median 7 ms"
    assert "matmul" in text and "4 KiB" in text and "1 ms" in text
    made = Trace()
    made.add_step(1, 0, 10**9, make_transfer_spans(MS), {7: ("<script>alert(1)</script>", A, B, 1)})
    page = made._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_traces_without_steps_or_edges_say_so() -> None:
    assert str(Trace()) == "no step was traced" and "no step" in Trace()._repr_html_()
    made = Trace()
    made.add_step(1, 0, 10, [(A, "matmul", 1, 2)], {})
    assert "no tensor went" in str(made) and "no tensor went" in made._repr_html_()
    assert made.edges == ()


def test_an_edge_inside_a_loop_is_seen_in_each_iteration_under_its_tensors_whole_name() -> None:
    x = gf.placeholder("float32", (8,), name="x")

    def body(state: Any) -> Any:
        count, value = state
        with gf.name_scope("tower"), gf.device("cpu:1"):
            there = gf.tanh(value)
        with gf.device("cpu:0"):
            return count + 1, there * 1.5

    begin = (gf.constant(np.int64(0)), x)
    _, last = gf.while_loop(lambda state: state[0] < 4, body, begin, max_iterations=10)
    cluster = gf.Cluster.here(devices=["cpu:0", "cpu:1"])
    with gf.Session(cluster, trial=False) as session, session.trace() as made:
        for _ in range(3):
            session.run(last, {x: np.ones(8, np.float32)})
    counts = {(edge.tensor, edge.bytes): edge.count for edge in made.edges}
    assert {name for name, _ in counts} >= {"tower/tanh"}, counts
    assert counts["tower/tanh", 32] == 12
    (edge,) = [each for each in made.edges if each.tensor == "tower/tanh"]
    for kind, took in (("wait", edge.waiting), ("send", edge.sending)):
        seen = [event for step in made.steps for event in step.events
                if (event.kind, event.edge) == (kind, edge.edge)]  # fmt: skip
        assert len(seen) == 12 and took > 0
        assert {event.name for event in seen} == {
            f"{'recv' if kind == 'wait' else 'send'}/tower/tanh/{edge.edge}"
        }
        assert sorted(event.use for event in seen[:4]) == [0, 1, 2, 3]
    check_format(made.to_dict())


def make_exchange_spans(step: int, late: int) -> list[Span]:
    """A group of two, whose second device comes late; both have the result 3 ms after that."""
    at = 100 * MS * step
    end = at + late + 3 * MS
    return [
        (A, "start/sum", at, at + MS),
        (A, "sum", at + MS, end),
        (B, "start/sum_1", at + late, at + late + MS),
        (B, "sum_1", at + late + MS, end - MS),
    ]


GROUP = Exchange(0, "all_reduce", (A, B), 1 << 20)
GROUPS = {(A, "start/sum"): GROUP, (B, "start/sum_1"): GROUP}


def test_collectives_are_timed_from_when_the_last_device_takes_part() -> None:
    made = Trace()
    for step, late in enumerate((2 * MS, 4 * MS, 6 * MS)):
        spans_ = make_exchange_spans(step, late)
        made.add_step(step, 100 * MS * step - 1, 10**10, spans_, {}, None, {1: 1e-6}, GROUPS)
    (group,) = made.exchanges
    assert (group.name, group.kind, group.devices) == ("sum", "all_reduce", (A, B))
    assert (group.bytes, group.count, group.error) == (1 << 20, 3, 1e-6)
    assert group.taking == pytest.approx(3e-3) and group.apart == pytest.approx(4e-3)
    assert group.bandwidth == pytest.approx((1 << 20) / 3e-3)
    text = str(made)
    assert "all_reduce" in text and "1 MiB" in text and "no tensor went" not in text
    assert "all_reduce" in made._repr_html_()
    (slice_, *_) = [e for e in events(made, "X") if e["name"] == "sum"]
    assert slice_["args"]["exchange"] == "all_reduce" and slice_["args"]["devices"] == [A, B]


def test_of_unequal_pieces_the_largest_is_told_whichever_comes_first() -> None:
    for sizes in ((64, 96), (96, 64)):
        groups = {
            key: Exchange(0, "all_gather", (A, B), size)
            for key, size in zip(GROUPS, sizes, strict=True)
        }
        made = Trace()
        made.add_step(1, 0, 10**10, make_exchange_spans(1, MS), {}, exchanges=groups)
        assert made.exchanges[0].bytes == 96


def test_a_collective_in_which_a_device_is_missing_is_left_out() -> None:
    made = Trace()
    made.add_step(1, 0, 10**10, make_exchange_spans(1, MS)[:2], {}, exchanges=GROUPS)
    assert made.exchanges == () and "no collective ran" in str(made.exchanges)
    assert "no collective" in made.exchanges._repr_html_() and "no tensor went" in str(made)


# The file ----------------------------------------------------------------------------------------

NUMBER, INTEGER, TEXT = (int, float), (int,), (str,)
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "M": {"name": TEXT, "pid": INTEGER, "tid": INTEGER, "args": (dict,)},
    "X": {"name": TEXT, "cat": TEXT, "pid": INTEGER, "tid": INTEGER, "ts": NUMBER, "dur": NUMBER,
          "args": (dict,)},
    "s": {"name": TEXT, "cat": TEXT, "id": TEXT, "pid": INTEGER, "tid": INTEGER, "ts": NUMBER},
    "f": {"name": TEXT, "cat": TEXT, "id": TEXT, "pid": INTEGER, "tid": INTEGER, "ts": NUMBER,
          "bp": TEXT},
}  # fmt: skip


def check_format(written: dict[str, Any]) -> None:
    """The Trace Event Format, as far as Perfetto reads it: fields and their types, names of what is
    drawn, slices of a thread that do not cross, and arrows whose ends lie in slices."""
    assert set(written) == {"traceEvents", "displayTimeUnit"}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = set()
    for event in written["traceEvents"]:
        fields = FIELDS[event["ph"]]
        assert event.keys() - {"ph"} == fields.keys()
        for name, kinds in fields.items():
            assert type(event[name]) in kinds, (name, event)
            assert not isinstance(event[name], float) or math.isfinite(event[name])
        if event["ph"] == "M" and event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            place = (event["pid"], event["tid"])
            threads.setdefault(place, []).append((event["ts"], event["ts"] + event["dur"]))
    assert threads.keys() <= named
    for slices in threads.values():
        ordered = sorted(slices)
        for (_, end), (start, _) in pairwise(ordered):
            assert end <= start + 1e-6
    arrows: dict[str, list[dict[str, Any]]] = {}
    for event in written["traceEvents"]:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(event)
    for start, end in arrows.values():
        assert (start["ph"], end["ph"]) == ("s", "f") and start["ts"] <= end["ts"]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])


def test_the_file_is_in_the_trace_event_format() -> None:
    check_format(trace(6, 7, 5).to_dict())
    check_format(Trace().to_dict())


def test_tensors_that_are_under_way_at_once_get_lanes_of_one_name() -> None:
    made = Trace()
    at = [(1, 10), (2, 8), (9, 12), (11, 13)]
    edges = {i: (f"t{i}", A, B, 8) for i in range(len(at))}
    points = [
        (kind, str(i), t * MS, t * MS)
        for i, pair in enumerate(at)
        for kind, t in zip(("departure", "arrival"), pair, strict=True)
    ]
    made.add_step(1, 0, 100 * MS, points, edges)
    check_format(made.to_dict())
    lanes = [e["tid"] for e in events(made, "X") if e["cat"] == "transfer"]
    assert lanes[0] != lanes[1] == lanes[2] and lanes[3] == lanes[0]
    names = {e["tid"]: e["args"]["name"] for e in events(made, "M") if e["name"] == "thread_name"}
    assert {names[lane] for lane in lanes} == {link_track(A, B)}


def test_arrows_begin_in_the_slice_that_sends_and_end_in_the_one_that_receives() -> None:
    made = trace(6)
    (start,), (end,) = events(made, "s"), events(made, "f")
    slices = {e["name"]: e for e in events(made, "X")}
    for arrow, name in ((start, "send/matmul/7"), (end, "recv/matmul/7")):
        drawn = slices[name]
        assert (arrow["pid"], arrow["tid"]) == (drawn["pid"], drawn["tid"])
        assert drawn["ts"] <= arrow["ts"] <= drawn["ts"] + drawn["dur"]
