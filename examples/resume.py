"""Train on real digits over two worker processes, and lose one on the way: the curve is the same.

The towers of digits_towers.py are trained three times: without a fault; with a worker that is
killed (SIGKILL) in the middle; and by a process that is killed itself, and by another one that goes
on where it was. The losses are equal, bit for bit.

    pip install '.[demo]'
    python examples/resume.py [--steps 120] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from command_line import check_folder, positive, run
from digits_towers import Towers, batches, digits

import graphflow as gf

BATCH, EVERY = 64, 20


def train(steps: int, kill_at: int | None = None, **options: Any) -> dict[int, str]:
    """The loss of each step that this process did."""
    model = Towers(towers=4, width=128)
    images, _, labels, _ = digits()
    feeds = list(islice(batches(model, images, labels, BATCH, epochs=1000), steps))
    curve = {}
    with gf.Session(gf.Cluster.local(workers=2, threads=1), **options) as s:
        for number in range(s.step, steps):  # s.step: where a checkpoint goes on
            if number == kill_at:
                os.kill(s._life.hosts.pids[1], signal.SIGKILL)
                print(f"step {number}: killed a worker")
            loss, _ = s.run([model.loss, model.train], feeds[number])
            curve[number] = repr(float(loss))  # all its bits
            print(f"step {number} {curve[number]}", flush=True)
    return curve


def killed_and_resumed(steps: int, folder: Path) -> dict[int, str]:
    """A training in another process, which is killed, and then once more."""
    command = [sys.executable, __file__, "--steps", str(steps), "--folder", str(folder), "--part"]
    curve: dict[int, str] = {}
    for last in (steps // 2, steps):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                _, number, loss = line.split()
                curve[int(number)] = loss
                if int(number) == last:
                    process.kill()
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=120, help="of training; 120")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        check_folder(parser, "--folder", given.folder)
    if given.part:
        with suppress(KeyboardInterrupt):  # told by the process that started this one
            train(given.steps, checkpoint=given.folder, every=EVERY)
        return
    with tempfile.TemporaryDirectory() as fresh:
        root = given.folder or Path(fresh)
        curve = train(given.steps)
        lost = train(given.steps, given.steps // 2, checkpoint=root / "lost", every=EVERY)
        resumed = killed_and_resumed(given.steps, root / "resumed")
    print(f"with a worker killed: {'the same curve' if lost == curve else 'ANOTHER CURVE'}")
    print(f"with the client killed: {'the same curve' if resumed == curve else 'ANOTHER CURVE'}")
    if not curve == lost == resumed:
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
