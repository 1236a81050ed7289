"""What sessions do is told: to logs of real processes, to meters, and to whoever asks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphflow.errors import NotAuthorised, OpError, SessionError
from graphflow.runtime.security import authenticator as guards
from graphflow.runtime.security.keys import CLIENT, Keyring
from graphflow.runtime.security.keys import COORDINATOR as COORDINATOR_KEY
from graphflow.runtime.telemetry.metrics import Meters
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    Abort,
    Close,
    Commit,
    Compute,
    Envelope,
    Forget,
    Load,
    Open,
    Read,
    Status,
)
from graphflow.runtime.wire.step_values import EDGE_BITS, HostUsage
from graphflow.runtime.worker.worker_activity import WorkerActivity
from graphflow.runtime.worker.worker_status import MAX_WAITS, make_report
from tests import loaded
from tests.house.sources import ROOT

COMPUTE = Compute(1, "p", {}, [], False, 5.0)
SCRIPT = """
import numpy as np, graphflow as gf

def main():
    x = gf.placeholder("float32", (4,), name="x")
    with gf.device("/worker:0"):
        a = x + 1.0
    with gf.device("/worker:1"):
        b = gf.log(a)
    with gf.Session(gf.Cluster.local(workers=2), trial=False, check_finite=True) as s:
        for _ in range(2):
            s.run(b, {x: np.ones(4, "float32")})
        try:
            s.run(b, {x: -2 * np.ones(4, "float32")})
        except gf.errors.NonFiniteError:
            print(s._life.hosts.session, s._life.hosts.token)

if __name__ == "__main__":
    main()
"""


def test_real_processes_tell_one_json_object_a_line_and_no_secret(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    telling = {"GRAPHFLOW_LOG": "json", "GRAPHFLOW_LOG_LEVEL": "debug"}
    done = loaded.run_python([str(script)], {**os.environ, "PYTHONPATH": str(ROOT), **telling})
    assert done.returncode == 0, done.stderr
    session, token = done.stdout.split()
    told = [json.loads(line) for line in done.stderr.splitlines()]  # two workers, one stream
    assert session not in done.stderr and token[:16] not in done.stderr
    events = [(each["logger"].rpartition(".")[2], each["event"]) for each in told]
    for who, event, times in [
        ("worker", "worker.listening", 2), ("worker", "session.opened", 2),
        ("coordinator", "cluster.ready", 1), ("coordinator", "program.loaded", 1),
        ("coordinator", "step.committed", 2), ("coordinator", "step.aborted", 1),
        ("worker", "step.computed", 4), ("worker", "step.failed", 1),
        ("worker", "session.closed", 2), ("coordinator", "session.ended", 1),
    ]:  # fmt: skip
        assert events.count((who, event)) >= times, (who, event, events)
    assert {each["session"] for each in told if "session" in each} == {session[:16] + "…"}
    (failed, *_) = (each for each in told if each["event"] == "step.failed")
    assert failed["error"] == "NonFiniteError" and "log" in failed["reason"]
    assert failed["level"] == "warning" and failed["seconds"] >= 0


def test_a_sessions_jobs_are_counted_and_shown() -> None:
    meters = Meters()
    mine = WorkerActivity("session", 3, 1, meters, [])
    assert mine.report()["doing"] == "" and mine.report()["step"] == -1
    for program in ("p", "q"):
        mine.begin(Load(1, program, 1), 0)
        mine.end(Load(1, program, 1), 0, None)
    mine.begin(COMPUTE, 7)
    now = mine.report()
    assert now["doing"] == "compute step 7" and now["doing_seconds"] >= 0 and now["step"] == 7
    mine.end(COMPUTE, 7, object())
    for step in (7, 8):
        mine.begin(Commit(), step)
        mine.end(Commit(), step, None)
    mine.begin(COMPUTE, 9)
    mine.end(COMPUTE, 9, OpError("it failed"))
    mine.begin(Abort("OpError", "it failed"), 9)
    mine.end(Abort("OpError", "it failed"), 9, None)
    mine.begin(COMPUTE, 10)
    mine.end(COMPUTE, 10, SessionError("step 10 was cancelled"), cancelled=True)
    mine.begin(Abort("SessionError", "step 10 was cancelled"), 10)
    mine.end(Abort("SessionError", "step 10 was cancelled"), 10, None)
    mine.begin(Forget(2, ["q"], []), 0)
    mine.end(Forget(2, ["q"], []), 0, None)
    told = mine.report()
    assert (told["committed"], told["programs"], told["epoch"], told["worker"]) == (2, 1, 3, 1)
    assert told["steps_per_second"] > 0
    outcomes = meters.series("graphflow_steps_total")
    assert outcomes == {("committed",): 2, ("aborted",): 2, ("failed",): 1}


def test_tensors_are_counted_by_edge_and_words_about_them_by_kind() -> None:
    meters = Meters()
    mine = WorkerActivity("session", 1, 0, meters, ["tcp://a:1"])
    words = ["collective/p0(7)/2/offer", "collective/p0(8)/from /worker:0/cpu:0/found", "taken/3/4"]
    for key in (3, 5 << EDGE_BITS | 3, *words):
        mine.count_tensor("sent", 0, key, 10)
    sent = {edge: count for (_, edge), count in meters.series("graphflow_sent_bytes_total").items()}
    assert sent == {"3": 20, "collective": 20, "taken": 10}


@pytest.mark.parametrize("job", [Read(1, "v"), Close(1), Open(1, 0, [], 1.0)])
def test_other_jobs_are_named(job: Any) -> None:
    mine = WorkerActivity("session", 1, 0, Meters(), [])
    mine.begin(job, 0)
    assert mine.report()["doing"] == type(job).__name__.lower()
    mine.end(job, 0, None)
    assert mine.report()["doing"] == ""


# What is shown to whom ----------------------------------------------------------------------------


def make_session(waits: dict[str, float]) -> Any:
    usage = HostUsage({"cpu:0": 8}, {"cpu:0": 4}, waits)
    mine = WorkerActivity("0123456789abcdef", 1, 0, Meters(), [])
    return SimpleNamespace(activity=mine, queued_jobs=2, usage=lambda: usage)


def report_session(waits: dict[str, float], *, names: bool) -> dict[str, Any]:
    whole = make_report(
        started=0.0, devices=["cpu:0"], sessions=[make_session(waits)], parked=["0123456789abcdef"],
        meters=Meters(), names=names,
    )  # fmt: skip
    (session,) = whole["sessions"]
    return dict(session)


def test_names_of_models_are_shown_to_those_who_may_see_them_only() -> None:
    waits = {"edge 3 from /worker:1/cpu:0 ('secret', made at /home/me/secret.py:7)": 1.5}
    shown = report_session(waits, names=True)
    assert "secret.py:7" in shown["waits"][0][0]
    hidden = report_session(waits, names=False)
    assert hidden["waits"] == [["edge 3 from /worker:1/cpu:0", 1.5]]
    assert "secret" not in json.dumps(hidden)


def test_a_sessions_name_is_shown_to_nobody_in_full() -> None:
    assert report_session({}, names=True)["session"] == "01234567"


def test_a_report_stays_small_whatever_a_session_waits_for() -> None:
    waits = {f"edge {i} from x ('{'n' * 10_000}')": float(i) for i in range(5000)}
    shown = report_session(waits, names=True)
    assert shown["waiting"] == 5000 and len(shown["waits"]) == MAX_WAITS
    assert shown["waits"][0][1] == 4999.0 and len(json.dumps(shown)) < 10_000


def test_a_clients_key_may_ask_for_the_status_and_give_no_order(tmp_path: Path) -> None:
    import zmq

    ring = Keyring(tmp_path)
    roles = {}
    for role in (CLIENT, COORDINATOR_KEY):
        pair = Keyring(tmp_path / role).create_pair(role, role)
        ring.add(str(pair.public), "here")
        roles[role] = pair.public.key
    context: zmq.Context[Any] = zmq.Context()
    guard = guards.ZapAuthenticator(context, pair, ring)
    try:
        envelope = Envelope("s", 1, COORDINATOR, 0, 1)
        for key in roles.values():
            guard.authorise(key, envelope, Status(1))
        for order in (COMPUTE, Open(1, 0, [], 1.0), Read(1, "v"), Close(1), Load(1, "p", 1)):
            guard.authorise(roles[COORDINATOR_KEY], envelope, order)
            with pytest.raises(NotAuthorised, match="client's key"):
                guard.authorise(roles[CLIENT], envelope, order)
    finally:
        guard.close()
        context.destroy(linger=0)
