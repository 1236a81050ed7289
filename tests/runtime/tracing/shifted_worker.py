"""A worker whose monotonic clock is ahead and too fast: a machine that booted earlier.

    python shifted_worker.py SECONDS PPM --listen tcp://127.0.0.1:*

Time namespaces would do the same, where the kernel lets them shift the clock.
"""

from __future__ import annotations

import sys
import time

_seconds, _rate = float(sys.argv[1]), 1.0 + float(sys.argv[2]) * 1e-6
_now, _now_ns, _started = time.monotonic, time.monotonic_ns, time.monotonic_ns()

# Before anything that imports these names.
time.monotonic = lambda: time.monotonic_ns() * 1e-9
time.monotonic_ns = lambda: _started + round((_now_ns() - _started) * _rate) + round(_seconds * 1e9)

if __name__ == "__main__":
    from graphflow.runtime.worker.serving import main

    sys.exit(main(sys.argv[3:]))
