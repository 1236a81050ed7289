"""Runs more worlds of the simulator than the tests do, until one breaks a promise.

    python -m tests.runtime.protocol.soak --schedules 100000 --seed 0

A world that fails is named by its seed, and runs again with `--schedules 1 --seed SEED`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.runtime.protocol.simulator import Violation, check

_EVERY = 5.0  # seconds between two lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.runtime.protocol.soak", description=__doc__
    )
    parser.add_argument("--schedules", type=int, default=20_000, help="how many worlds")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    given = parser.parse_args(arguments)
    started = told = time.monotonic()

    def progress(seed: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now > told + _EVERY:
            told = now
            done = seed - given.seed + 1
            rate = done / (now - started)
            print(f"{done} of {given.schedules} schedules, {rate:.0f} a second", flush=True)

    try:
        check(range(given.seed, given.seed + given.schedules), progress=progress)
    except Violation as violation:
        print(violation, file=sys.stderr)
        return 1
    print(f"{given.schedules} schedules from seed {given.seed} kept every promise")
    return 0


if __name__ == "__main__":
    sys.exit(main())
