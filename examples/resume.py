"""Train on real digits over two worker processes, lose one, and get the same curve.

The towers of digits_towers.py are trained three times, half of each batch on each worker: without a
fault; with a worker that is killed (SIGKILL) halfway; and in a process that is itself killed, after
which another one continues. All losses are equal, bit for bit.

    pip install '.[demo]'
    python examples/resume.py [--steps 120] [--folder DIR]

Checkpoints go to DIR, or to a temporary folder.
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

from command_line import check_folder, positive_int, run_program
from digits_towers import Towers, batches, split_digits

import graphflow as gf

BATCH, EVERY = 64, 20


def train(steps: int, kill_at: int | None = None, **options: Any) -> dict[int, str]:
    """Return the loss of each step that this process ran."""
    model = Towers(towers=4, width=128)
    halves = gf.parallel.Data(replicas=2)  # so that each worker has a part of each step
    update = gf.optim.SGD(0.1, momentum=0.9).minimize(model.loss, strategy=halves)
    images, _, labels, _ = split_digits()
    feeds = list(islice(batches(model, images, labels, BATCH, epochs=1000), steps))
    curve = {}
    with gf.Session(gf.Cluster.local(workers=2, threads=1), **options) as s:
        for number in range(s.step, steps):  # s.step: the checkpoint's step
            if number == kill_at:
                os.kill(s.workers[1].pid, signal.SIGKILL)
                print(f"step {number}: killed a worker")
            loss, _ = s.run([model.loss, update], feeds[number])
            curve[number] = repr(float(loss))  # all its bits
            print(f"step {number} {curve[number]}", flush=True)
    return curve


def kill_and_resume(steps: int, folder: Path) -> dict[int, str]:
    """Train in another process, kill it halfway, and start it again."""
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
    parser.add_argument(
        "--steps", type=positive_int, default=120, help="training steps; default: 120"
    )
    parser.add_argument("--folder", type=Path, help="folder for checkpoints")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        check_folder(parser, "--folder", given.folder)
    if given.part:
        with suppress(KeyboardInterrupt):  # sent by the process that started this one
            train(given.steps, checkpoint=given.folder, every=EVERY)
        return
    with tempfile.TemporaryDirectory() as fresh:
        root = given.folder or Path(fresh)
        curve = train(given.steps)
        lost = train(given.steps, given.steps // 2, checkpoint=root / "lost", every=EVERY)
        resumed = kill_and_resume(given.steps, root / "resumed")
    print(f"with a worker killed: {'the same curve' if lost == curve else 'ANOTHER CURVE'}")
    print(f"with the client killed: {'the same curve' if resumed == curve else 'ANOTHER CURVE'}")
    if not curve == lost == resumed:
        raise SystemExit(1)


if __name__ == "__main__":
    run_program(main)
