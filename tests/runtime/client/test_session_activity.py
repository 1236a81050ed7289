"""A session's metrics and log events: lost workers once, counters that go on in the next epoch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graphflow.errors import OpError
from graphflow.runtime.client.session_activity import SessionActivity
from graphflow.runtime.protocol.clock_sync import PeerClock


def test_what_was_sent_again_counts_on_in_the_next_epoch() -> None:
    mine = SessionActivity("session")
    for epoch, peers in enumerate((["a", "b"], ["a", "c"], ["a", "c"]), 1):
        stream = SimpleNamespace(outbound=SimpleNamespace(resent_count=epoch))
        machine: Any = SimpleNamespace(
            stream=lambda worker, told=stream: told,
            loss_reasons=dict,
            clock=lambda worker: PeerClock(),
        )
        mine.watch(machine, peers)
    told = {each.name: each.values for each in mine.meters.samples() if "resent" in each.name}
    assert told == {"graphflow_resent_messages_total": {("a",): 6, ("b",): 1, ("c",): 5}}


def test_a_lost_worker_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    mine = SessionActivity("session")
    with caplog.at_level("WARNING", "graphflow.coordinator"):
        for _ in range(3):
            mine.on_workers_lost({1: "silent for 5.0 s"}, ["tcp://a:1", "tcp://b:1"])
    (record,) = caplog.records
    assert record.getMessage() == (
        'worker.lost session=session worker=1 address=tcp://b:1 reason="silent for 5.0 s"'
    )
    assert mine.meters.value("graphflow_workers_lost_total") == 1


def test_a_step_that_is_aborted_is_told_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    mine = SessionActivity("session")
    with caplog.at_level("WARNING", "graphflow.coordinator"):
        mine.on_abort(4, 0.1, OpError("singular"))
        mine.add_fed_bytes(16)
        mine.on_commit(5, 0.1, 32)
    assert [record.event for record in caplog.records] == ["step.aborted"]  # type: ignore[attr-defined]
    outcomes = mine.meters.series("graphflow_steps_total")
    assert outcomes == {("aborted",): 1, ("committed",): 1}
    assert mine.meters.value("graphflow_feed_bytes_total") == 16
    assert mine.meters.value("graphflow_fetch_bytes_total") == 32
