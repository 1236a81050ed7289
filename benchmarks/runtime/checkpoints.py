"""What checkpoints cost: the time of a step with and without them, the pause when a worker dies.

    python benchmarks/runtime/checkpoints.py [--width 1024] [--every 20] [--rounds 12]
        [--output FILE]

Two sessions over two workers each train the same multilayer perceptron by turns, one with a
checkpoint every few steps, one without: the ratio is of the means, writing included. Then a worker
is killed between two steps, several times; the pause is that of the next step, beyond a usual one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import graphflow as gf

BATCH = 128


class Model:
    def __init__(self, width: int) -> None:
        with gf.random.seed(0):
            self.x = gf.placeholder("float32", (BATCH, width), name="x")
            h = self.x
            for layer in range(4):
                with gf.device(f"/worker:{layer // 2}"):
                    w = gf.variable(gf.init.glorot((width, width)), name=f"w{layer}")
                    h = gf.tanh(h @ w)
            self.loss = gf.mean(gf.square(h))
            self.train = gf.optim.SGD(0.1, momentum=0.9).minimize(self.loss)
        self.feed = {self.x: np.random.default_rng(0).normal(size=(BATCH, width)).astype("float32")}

    def steps(self, session: gf.Session, count: int) -> float:
        """Mean seconds of a step."""
        start = time.perf_counter()
        for _ in range(count):
            session.run([self.loss, self.train], self.feed)
        return (time.perf_counter() - start) / count


def opened(**options: Any) -> gf.Session:
    return gf.Session(gf.Cluster.local(workers=2, threads=1), trial=False, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    model = Model(given.width)
    nbytes = 2 * 4 * given.width**2 * 4
    with (
        tempfile.TemporaryDirectory() as folder,
        opened() as plain,
        opened(checkpoint=folder, every=given.every) as kept,
    ):
        for session in (plain, kept):
            model.steps(session, given.every)
        pairs = [
            (model.steps(plain, given.every), model.steps(kept, given.every))
            for _ in range(given.rounds)
        ]
        usual = statistics.median(seconds for _, seconds in pairs)
        pauses = []
        for number in range(given.kills):
            model.steps(kept, 5)
            os.kill(kept._life.hosts.pids[number % 2], signal.SIGKILL)  # type: ignore[attr-defined]
            pauses.append(model.steps(kept, 1) - usual)
        assert kept.checkpoint_error is None
    ratio = statistics.median(kept / plain for plain, kept in pairs)
    step = statistics.median(plain for plain, _ in pairs)
    found = {
        "state_bytes": nbytes,
        "every": given.every,
        "step_seconds": step,
        "with_checkpoints": ratio,
        "pause_seconds": {"median": statistics.median(pauses), "most": max(pauses)},
    }
    print(f"state {nbytes / 1e6:.0f} MB, a checkpoint every {given.every} steps")
    print(f"step without checkpoints {step * 1e3:.1f} ms; with them {ratio:.3f} times that")
    print(
        f"a worker killed: the next step is there after {statistics.median(pauses):.2f} s more "
        f"(median of {len(pauses)}), at most {max(pauses):.2f} s"
    )
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
