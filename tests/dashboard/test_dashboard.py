"""The dashboard: who may look, what it says of a session, and that names stay text."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.cli.main import main
from graphflow.dashboard.live_page import details, tiles
from graphflow.dashboard.server import DashboardServer
from graphflow.dashboard.session_watcher import SessionWatcher
from graphflow.errors import AddressInUse, ArgumentError, WorkerLost
from tests.placement.view.chromium import Page, find

HOSTILE = "<img src=x onerror=alert(1)>"
TOKEN = "a-token-of-this-test"

pytest.importorskip("bokeh", reason="pip install 'graphflow[viz]'")
pytest.importorskip("prometheus_client", reason="pip install 'graphflow[metrics]'")


class Training:
    """A session that trains over two workers, and serves its state."""

    def __init__(self, workers: int = 2) -> None:
        x = gf.placeholder("float32", (None, 4), name="x")
        w = gf.variable(np.ones((4, 4), "float32"), name=HOSTILE)
        self.loss = gf.mean((x @ w) ** 2, name=HOSTILE + "loss")
        strategy = gf.parallel.Data(workers) if workers > 1 else None
        self.train = gf.optim.SGD(1e-3).minimize(self.loss, strategy=strategy)
        cluster = gf.Cluster.local(workers, threads=1) if workers > 1 else None
        self.session = gf.Session(cluster, metrics="127.0.0.1:*", trial=False)
        self.feeds = {x: np.ones((8, 4), "float32")}
        server = self.session._life.server
        assert server is not None
        self.address = server.address

    def step(self, count: int = 1) -> float:
        for _ in range(count):
            value, _ = self.session.run([self.loss, self.train], self.feeds)
        return float(value)


@pytest.fixture
def training(request: pytest.FixtureRequest) -> Iterator[Training]:
    made = Training(getattr(request, "param", 2))
    with made.session:
        yield made


@pytest.fixture
def served(training: Training) -> Iterator[tuple[DashboardServer, SessionWatcher]]:
    """A dashboard of the training, served on another thread."""
    training.step(3)
    watcher = SessionWatcher(training.address)
    watcher.start()
    ready: list[DashboardServer] = []

    def serve() -> None:
        import asyncio

        asyncio.set_event_loop(asyncio.new_event_loop())
        ready.append(DashboardServer(watcher, token=TOKEN))
        ready[0].run()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    until = time.monotonic() + 20.0
    while not ready and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)
    yield ready[0], watcher
    ready[0].close()
    watcher.stop()
    thread.join(10.0)


def ask(server: DashboardServer, path: str, **headers: str) -> http.client.HTTPResponse:
    port = int(server.url.split(":")[2].split("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def test_only_who_has_the_token_at_this_hosts_name_may_look(
    served: tuple[DashboardServer, SessionWatcher],
) -> None:
    server, _ = served
    assert server.url.endswith(f"/?token={TOKEN}")
    good = ask(server, f"/?token={TOKEN}")
    assert good.status == 200
    cookie = (good.getheader("Set-Cookie") or "").split(";")[0]
    assert ask(server, "/", Cookie=cookie).status == 200
    for path in ("/", "/plan", f"/?token={TOKEN}x", "/?token=", f"/?token={TOKEN[:-1]}"):
        assert ask(server, path).status == 403, path
    for host in ("evil.test", "127.0.0.1.evil.test:80", "127.0.0.1:1"):
        assert ask(server, f"/?token={TOKEN}", Host=host).status == 403
        assert ask(server, f"/plan?token={TOKEN}", Host=host).status == 403
    plan = ask(server, "/plan", Cookie=cookie)
    text = plan.read().decode()
    assert plan.status == 200 and "Where each node" in text and HOSTILE not in text


def test_the_page_tells_steps_times_loss_workers_memory_and_links(training: Training) -> None:
    loss = training.step(5)
    watcher = SessionWatcher(training.address)
    watcher.look()
    assert watcher.problem == "" and watcher.state["step"] == 5
    assert watcher.state["scalars"] == {training.loss.name: pytest.approx(loss)}
    assert watcher.state["predicted"] > 0 and watcher.state["measured"] > 0
    assert [each["state"] for each in watcher.state["workers"]] == ["up", "up"]
    assert {*watcher.reports} == {0, 1}
    training.step(4)
    watcher.look()
    assert watcher.points[-1].step == 9 and watcher.points[-1].rate > 0
    shown = tiles(watcher) + details(watcher)
    assert "onerror" in shown and HOSTILE not in shown
    for text in ("steps a second", "measured / predicted", "/worker:1/cpu:0", "Links", "MiB"):
        assert text in shown


def test_a_killed_worker_turns_lost_and_a_closed_session_is_told(training: Training) -> None:
    training.step()
    watcher = SessionWatcher(training.address)
    watcher.look()
    pid = training.session.workers[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        training.step()
    watcher.look()
    assert [each["state"] for each in watcher.state["workers"]] == ["up", "lost"]
    assert "lost: killed by signal 9" in details(watcher)
    training.session.close()
    watcher.look()
    assert "does not answer" in tiles(watcher)


def test_text_of_a_worker_that_looks_like_a_cell_stays_text(training: Training) -> None:
    training.step()
    watcher = SessionWatcher(training.address)
    watcher.look()
    watcher.reports[1] = {**watcher.reports[1], "host": f"<td>{HOSTILE}"}
    watcher.state["workers"][1]["reason"] = f"<td>{HOSTILE}"
    shown = details(watcher)
    assert HOSTILE not in shown and shown.count("&lt;td&gt;&lt;img") == 2


def test_wrong_arguments_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["9100"], "not an address"),
        (["127.0.0.1:9100", "--token", "short"], "at least eight"),
        (["127.0.0.1:1"], "gf.Session(metrics="),
    ):
        assert main(["dashboard", *arguments]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("training", [1], indirect=True)
def test_a_port_in_use_is_an_error(training: Training) -> None:
    training.step()
    watcher = SessionWatcher(training.address)
    with pytest.raises(AddressInUse, match="--port"):
        DashboardServer(watcher, port=int(training.address.rpartition(":")[2]))
    with pytest.raises(ArgumentError, match="no session answers"):
        SessionWatcher("127.0.0.1:1").start()


@pytest.mark.parametrize("training", [1], indirect=True)
def test_a_session_without_steps_has_a_page(training: Training) -> None:
    watcher = SessionWatcher(training.address)
    watcher.look()
    assert watcher.state["step"] == 0 and "–" in tiles(watcher)
    assert "one device computes all" in watcher.plan_page()
    assert json.loads(watcher._get("/session.json"))["scalars"] == {}


@pytest.mark.browser
def test_a_browser_opens_it_soon_and_sees_a_worker_die(
    training: Training, served: tuple[DashboardServer, SessionWatcher]
) -> None:
    if find() is None:
        pytest.skip("needs Chromium: apt install chromium, then pytest --run-browser")
    server, _ = served
    ready = "window.Bokeh !== undefined && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle"

    def text(page: Page) -> Any:
        return page.evaluate(
            "Bokeh.documents[0].roots()[0].children.map(m => m.text ?? '').join(' ')"
        )

    with Page(server.url, ready=ready) as page:
        shown = page.evaluate("performance.now()")
        assert shown < 10_000
        assert "up" in text(page)
        pid = training.session.workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            training.step()
        lost = "Bokeh.documents[0].roots()[0].children.some(m => (m.text ?? '').includes('lost'))"
        page.wait_until(lost, seconds=6.0)
        assert [e for e in page.errors if "favicon" not in e and "404" not in e] == []
