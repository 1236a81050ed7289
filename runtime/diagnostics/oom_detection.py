"""Out-of-memory kills by Linux: which process they hit, and whether one happened.

Control groups count the kills.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SCORE = Path("/proc/self/oom_score_adj")
_MAX_SCORE = 1000  # of oom_score_adj
_SCORE_ADDED = 100  # thousandths of the machine's memory


def prefer_as_oom_victim() -> None:
    """Make Linux kill this process before its parent when memory runs out.

    It does not if the parent uses a tenth of the machine's memory more. A session that loses a
    worker continues. One that loses its client or its fork server loses all.
    """
    with suppress(OSError, ValueError):  # other systems have no such file
        _SCORE.write_text(str(min(_MAX_SCORE, int(_SCORE.read_text()) + _SCORE_ADDED)))


class MemoryKills:
    """The out-of-memory kills in the control group of a process that has just started."""

    def __init__(self, pid: int) -> None:
        self._file = _find_counter(pid)
        self._before = _read_count(self._file)

    def has_happened(self) -> bool:
        """Return True if there was a kill since."""
        return _read_count(self._file) > self._before


def _find_counter(pid: int) -> Path | None:
    """Return the file with the counter, of either cgroup version; None if there is none."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups = {kinds: path.lstrip("/") for _, kinds, path in (line.split(":", 2) for line in lines)}
    found = [_ROOT / "memory" / groups.get("memory", "") / "memory.oom_control"]
    for root in (_ROOT, _ROOT / "unified"):
        found.append(root / groups.get("", "") / "memory.events")
    # Inside a container, its own group is the visible root, whatever its path says.
    found += [_ROOT / "memory" / "memory.oom_control", _ROOT / "memory.events"]
    return next((file for file in found if file.is_file()), None)


def _read_count(file: Path | None) -> int:
    if file is None:
        return 0
    try:
        words = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
        return int(words.get("oom_kill", "0"))
    except (OSError, ValueError):
        return 0
