"""Follow a session: read its state once a second, and ask its workers for their reports."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from graphflow.errors import ArgumentError, GraphflowError

if TYPE_CHECKING:
    from graphflow.runtime.security.keys import KeyPair

EVERY = 1.0  # seconds between two looks
KEPT = 3600  # points of the curves
_HTTP_SECONDS = 2.0
_WORKER_SECONDS = 1.5


class CurvePoint(NamedTuple):
    """One point of the curves: seconds since the watch began, step, steps a second, a loss."""

    seconds: float
    step: int
    rate: float
    loss: float | None


class SessionWatcher:
    """The latest state of a session, and what came before it.

    Args:
        address: where the session serves its metrics, such as "127.0.0.1:9100".
        pair: the key with which workers are asked, if they have keys.
        insecure: ask workers beyond loopback without a key.

    Attributes:
        state: the last answer of the session; empty before the first one.
        reports: the last status report of each worker, by its number.
        points: of the curves, one for each look at which steps had committed.
        problem: why the session does not answer; "" while it does.
    """

    def __init__(self, address: str, pair: KeyPair | None = None, insecure: bool = False) -> None:
        self.address = address
        self._pair, self._insecure = pair, insecure
        self.state: dict[str, Any] = {}
        self.reports: dict[int, Any] = {}
        self.points: deque[CurvePoint] = deque(maxlen=KEPT)
        self.problem = "no answer yet"
        self._started = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="session-watcher", daemon=True)

    def start(self) -> None:
        """Look once, then once a second on a thread of its own.

        Raises:
            ArgumentError: no session answers at the address.
        """
        self.look()
        if self.problem:
            raise ArgumentError(
                f"no session answers at {self.address}: {self.problem}; open it with "
                f"gf.Session(metrics={self.address!r}), or set GRAPHFLOW_METRICS"
            )
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopping.set()

    def _follow(self) -> None:
        while not self._stopping.wait(EVERY):
            self.look()

    def look(self) -> None:
        """Ask the session and its workers once."""
        try:
            state = json.loads(self._get("/session.json"))
        except (OSError, ValueError) as error:
            self.problem = str(getattr(error, "reason", error))
            return
        now = time.monotonic() - self._started
        self._add_point(now, state)
        self.problem, self.state = "", state
        self._ask_workers(state)

    def _add_point(self, now: float, state: dict[str, Any]) -> None:
        loss = next(iter(state["scalars"].values()), None)
        last = self.points[-1] if self.points else None
        since = 0.0 if last is None else now - last.seconds
        done = 0 if last is None else state["step"] - last.step
        rate = done / since if since > 0 and done > 0 else 0.0
        self.points.append(CurvePoint(now, state["step"], rate, loss))

    def _ask_workers(self, state: dict[str, Any]) -> None:
        """Take the reports of workers that are up; those that are silent keep their last one."""
        from graphflow.runtime.security.keys import WORKER, Keyring
        from graphflow.runtime.worker.worker_status import WorkerAddress, request_reports

        there = [each for each in state["workers"] if each["state"] == "up" and each["address"]]
        ring = Keyring()
        with suppress(GraphflowError):
            # A session may know the key of a worker by its name.
            keys = [ring.key_of(each["key"], WORKER) if each["key"] else "" for each in there]
            asked = [WorkerAddress(w["address"], key) for w, key in zip(there, keys, strict=True)]
            answers = request_reports(
                asked, seconds=_WORKER_SECONDS, insecure=self._insecure, pair=self._pair
            )
            for each, answer in zip(there, answers, strict=True):
                if not isinstance(answer, GraphflowError):
                    self.reports[each["index"]] = answer

    def plan_page(self) -> str:
        """Return the page of the plan that the session follows now.

        Raises:
            OSError: the session does not answer.
        """
        from pathlib import Path

        from graphflow.placement.plans.plan import Plan

        text = self._get("/plan.json")
        if not text:
            return "<!doctype html><p>No plan: no step has run, or one device computes all."
        with TemporaryDirectory() as folder:
            file, page = Path(folder) / "plan.json", Path(folder) / "plan.html"
            file.write_bytes(text)
            Plan.load(file).save(page)
            return page.read_text(encoding="utf-8")

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(
            f"http://{self.address}{path}", timeout=_HTTP_SECONDS
        ) as answer:
            return answer.read()  # type: ignore[no-any-return]
