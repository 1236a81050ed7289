"""What takes long is told on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys
import time

import pytest

from graphflow.base import progress
from graphflow.base.progress import show_progress, show_stage, show_wait


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def capture_progress(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, nodes: int, silent: float
) -> str:
    """What appears while work goes on until something does, or for a moment."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "SILENT", silent)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress("placing", nodes):
        deadline = time.monotonic() + (10.0 if silent == 0 else 0.05)
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.001)
    return stream.getvalue()


def test_long_work_on_a_large_graph_is_told_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LARGE", 1)
    text = ""
    for _ in range(3):  # a first frame may still be on its way when the work ends
        text += capture_progress(monkeypatch, Terminal(), 12_345, 0.0)
    assert "placing 12,345 nodes" in text


@pytest.mark.parametrize(
    ("stream", "nodes", "silent"),
    [(io.StringIO(), 100_000, 0.0001), (Terminal(), 10, 0.0001), (Terminal(), 100_000, 60.0)],
    ids=["a file", "a small graph", "quick work"],
)
def test_nothing_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, nodes: int, silent: float
) -> None:
    assert capture_progress(monkeypatch, stream, nodes, silent) == ""


def test_the_line_says_which_stage_the_work_is_in_and_how_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "SILENT", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    until = time.monotonic() + 10.0
    with show_progress("placing", 5_000, "on 8 devices") as work:
        show_stage("trial steps", 3, 5)
        while "trial" not in stream.getvalue() and time.monotonic() < until:
            time.sleep(0.001)
    assert work is None  # the stage is named by function, wherever the work is done
    assert "placing 5,000 nodes on 8 devices: trial steps, 3 of 5" in stream.getvalue()


def test_work_inside_work_is_a_stage_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    outer = show_progress("placing", 5_000)
    with outer:
        show_stage("partitioning")
        with show_progress("loading a program on 8 workers"):
            assert str(outer) == "placing 5,000 nodes: loading a program on 8 workers"
            show_stage("workers", 2)
            assert str(outer) == "placing 5,000 nodes: workers, 2"
        assert str(outer) == "placing 5,000 nodes: partitioning"
    show_stage("nothing is shown any more")
    assert str(outer) == "placing 5,000 nodes: partitioning"


def test_an_error_ends_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(KeyError), show_progress("placing", 100_000):
        raise KeyError("no")
    with show_progress("placing", 100_000):  # which is not a stage of the first
        assert str(progress._active.get()) == "placing 100,000 nodes"
    assert progress._active.get() is None


def test_a_wait_tells_what_it_still_waits_for_each_second_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, heard = Terminal(), list[float]()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "SILENT", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    until = time.monotonic() + 20.0
    with show_wait(lambda s: "waiting for [worker 2] at tcp://h:1", heard.append):
        while (len(heard) < 2 or "[worker 2]" not in stream.getvalue()) and (
            time.monotonic() < until
        ):
            time.sleep(0.01)
    count = len(heard)
    assert count >= 2 and heard[1] - heard[0] >= 0.9
    assert "waiting for [worker 2] at tcp://h:1" in stream.getvalue()


def test_a_short_wait_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    heard = list[float]()
    with show_wait(lambda s: "never", heard.append):
        pass
    assert heard == []


def test_without_a_terminal_only_the_listener_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, heard = io.StringIO(), list[float]()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "SILENT", 0.01)
    until = time.monotonic() + 20.0
    with show_wait(lambda s: "x", heard.append):
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
    assert heard and stream.getvalue() == ""
