"""What takes long is told on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys
import time

import pytest

from graphflow import progress
from graphflow.progress import telling


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, nodes: int, silent: float) -> str:
    """What appears while work goes on until something does, or for a moment."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "SILENT", silent)
    monkeypatch.setenv("TERM", "xterm")
    with telling("placing", nodes):
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
        text += told(monkeypatch, Terminal(), 12_345, 0.0)
    assert "placing 12,345 nodes" in text


@pytest.mark.parametrize(
    ("stream", "nodes", "silent"),
    [(io.StringIO(), 100_000, 0.0001), (Terminal(), 10, 0.0001), (Terminal(), 100_000, 60.0)],
    ids=["a file", "a small graph", "quick work"],
)
def test_nothing_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, nodes: int, silent: float
) -> None:
    assert told(monkeypatch, stream, nodes, silent) == ""


def test_an_error_ends_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(KeyError), telling("placing", 100_000):
        raise KeyError("no")
