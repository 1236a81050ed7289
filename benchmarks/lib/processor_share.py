"""Hold a process to a share of one core, as a slower processor would.

    python benchmarks/lib/processor_share.py PID SHARE

The process is stopped (SIGSTOP) while it is ahead of its share and continued (SIGCONT) once it is
not. It may run ahead by its share of `PERIOD`, so that waits cost it nothing. No rights are needed
beyond those to signal the process. Ends with the process, or when its own parent ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

PERIOD = 0.002
"""Seconds over which the share holds."""
TICK = 0.0005
"""Seconds between two looks at the processor time of a process that runs."""


@dataclass
class Allowance:
    """Seconds of processor time that a process may still use.

    Args:
        share: of one core, above 0 and at most 1.
    """

    share: float
    seconds: float = 0.0

    def advance(self, elapsed: float, used: float) -> float:
        """Account for an interval, and return the seconds for which the process has to stop."""
        earned = self.seconds + self.share * elapsed
        self.seconds = min(self.share * PERIOD, earned) - used
        return max(0.0, -self.seconds / self.share)


def processor_clock(pid: int) -> Callable[[], float]:
    """Return a clock of the processor seconds of a process, all its threads together.

    Reading it raises OSError once the process has ended.
    """
    clock = (~pid << 3) | 2  # as clock_getcpuclockid makes it
    return lambda: time.clock_gettime(clock)


def hold(pid: int, share: float) -> None:
    """Hold a process to a share of a core until it ends or this process's parent does."""
    now, parent = processor_clock(pid), os.getppid()
    allowance = Allowance(share)
    with suppress(OSError):
        before, used = time.perf_counter(), now()
        while os.getppid() == parent:
            time.sleep(TICK)
            at, ran = time.perf_counter(), now()
            pause = allowance.advance(at - before, ran - used)
            before, used = at, ran
            if pause:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(pause)
                os.kill(pid, signal.SIGCONT)


def main() -> None:
    pid, share = int(sys.argv[1]), float(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        hold(pid, share)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main()
