"""The pause when a worker dies, by the bytes of state: mirrors that take over, and checkpoints.

    python benchmarks/processes/takeover.py [--sizes 10M 1G] [--kills 3] [--output FILE]

Two workers hold half of a table each, and train rows of both. A worker is killed between two steps.
The pause is that from the kill, and from its detection, to the next result. A session with
checkpoints has one from a few steps before, on disk. A session with mirrors is a new one for each
kill, which so begins with both workers.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import graphflow as gf

WIDTH, LOOKUPS, WARM_UP = 256, 64, 6
UNITS = {"M": 1 << 20, "G": 1 << 30}


class Model:
    """Two tables of a given size together, one on each worker."""

    def __init__(self, nbytes: int) -> None:
        rows = nbytes // 2 // WIDTH // 4
        losses, self.feed = [], {}
        for worker in range(2):
            with gf.device(f"/worker:{worker}"):
                table = gf.variable(gf.init.full((rows, WIDTH), 0.5), name=f"table{worker}")
                ids = gf.placeholder("int64", (LOOKUPS,), name=f"ids{worker}")
                losses.append(gf.mean(gf.square(gf.take(table, ids, 0))))
            self.feed[ids] = np.random.default_rng(worker).integers(rows, size=LOOKUPS)
        self.loss = losses[0] + losses[1]
        self.train = gf.optim.SGD(0.1).minimize(self.loss)

    def step(self, session: gf.Session) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        session.run([self.loss, self.train], self.feed)
        return time.perf_counter() - start


class Detections(logging.Handler):
    """When the loss of a worker was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("worker.lost"):
            self.at = time.perf_counter()


def pause(nbytes: int, detections: Detections, **options: Any) -> dict[str, float]:
    """Seconds of a usual step, and from a kill and its detection to the next result."""
    model = Model(nbytes)
    with gf.Session(gf.Cluster.local(workers=2, threads=1), trial=False, **options) as session:
        usual = statistics.median([model.step(session) for _ in range(WARM_UP)][1:])
        if "checkpoint" in options:
            session.save()
            usual = statistics.median(model.step(session) for _ in range(3))
        os.kill(session._life.hosts.pids[1], signal.SIGKILL)
        killed = time.perf_counter()
        model.step(session)
        done = time.perf_counter()
        after = statistics.median(model.step(session) for _ in range(5))
        return {
            "usual step": usual,
            "from the kill": done - killed,
            "from the detection": done - detections.at,
            "step after": after,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["10M", "1G"])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--most", default="1G", help="the most state to write to disk")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    detections = Detections()
    log = logging.getLogger("graphflow")
    log.addHandler(detections)
    log.propagate = False
    found: dict[str, Any] = {}
    for size in arguments.sizes:
        for kind in ("mirrors", "checkpoint"):
            if kind == "checkpoint" and number_of(size) > number_of(arguments.most):
                continue
            runs = []
            for _ in range(arguments.kills):
                with ExitStack() as stack:
                    options: dict[str, Any] = {"replicas": 2}
                    if kind == "checkpoint":
                        folder = stack.enter_context(tempfile.TemporaryDirectory())
                        options = {"checkpoint": Path(folder) / "c", "every": "1h"}
                    runs.append(pause(number_of(size), detections, **options))
            medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            spread = [run["from the detection"] for run in runs]
            found[f"{size} {kind}"] = {**medians, "spread": [min(spread), max(spread)]}
            told = ", ".join(f"{name} {1e3 * value:.0f} ms" for name, value in medians.items())
            print(f"{size} {kind}: {told} ({1e3 * min(spread):.0f} to {1e3 * max(spread):.0f})")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def number_of(size: str) -> int:
    """The bytes of a size such as "10M"."""
    return int(float(size[:-1]) * UNITS[size[-1]])


if __name__ == "__main__":
    main()
