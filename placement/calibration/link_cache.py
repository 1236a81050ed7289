"""Links to workers of other machines, and between them, kept from session to session.

    probe ─links─→ {(end, end): LinkSpeed}
             └─→ a file beside this machine's profile: by addresses, seconds of messages, and when

Networks change. So a kept link counts if a small and a larger message take about as long as before,
which takes a tenth of measuring. Otherwise the link is measured anew.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlanError
from graphflow.ops.kernels.jit.object_cache import cache_folder
from graphflow.placement.calibration.calibrate import (
    SIZES,
    LinkSpeed,
    Probe,
    symmetric_links,
    time_messages,
)
from graphflow.placement.calibration.profile_file import write_json

FORMAT = 1
ALIKE = 1.5
"""Factor by which a message may take longer or shorter over an unchanged link."""
REPEATS, TRIES = 3, 3
"""Of a message, and how often: one median must be alike. The first messages of a session find
everybody asleep, and others may wait for a processor."""
TRUSTED_SECONDS = 7 * 86400.0
"""Seconds after which a link is measured anew in any case."""
LINKS = 4096
"""Links that are kept, the latest ones."""

Pair = tuple[str, str]
"""The addresses of two ends, in order."""


@dataclass(frozen=True)
class _LinkRecord:
    """Seconds of messages of `SIZES`, and when they were measured: seconds since 1970."""

    times: Sequence[float]
    at: float


def load_or_measure_links(
    probe: Probe,
    addresses: Mapping[str, str],
    pairs: Iterable[tuple[int, int]] | None = None,
    *,
    afresh: bool = False,
    folder: Path | None = None,
) -> dict[tuple[str, str], LinkSpeed]:
    """Return latency and bandwidth between ends, by their names.

    Kept links are used while they hold; others are measured and kept.

    Args:
        addresses: By the names of the ends, "/worker:0" or "/client".
        pairs: Indices of the ends of each link. Default: all pairs.
        afresh: Measure all links.
    """
    names = list(addresses)
    path = network_path(folder)
    known = {} if afresh else _load(path)
    found, new = {}, {}
    for a, b in combinations(range(len(names)), 2) if pairs is None else pairs:
        pair = _pair(addresses[names[a]], addresses[names[b]])
        kept = known.get(pair)
        if kept is None or not _is_unchanged(probe, a, b, kept):
            kept = new[pair] = _LinkRecord(time_messages(probe, a, b), time.time())
        found[a, b] = kept.times
    if new:
        _save(path, new)
    return symmetric_links(found, names)


def network_path(folder: Path | None = None) -> Path:
    """Return the path of the file that keeps measured links."""
    return (folder or cache_folder()) / "network.json"


def _pair(one: str, other: str) -> Pair:
    """Return two addresses in order."""
    return (one, other) if one < other else (other, one)


def _is_unchanged(probe: Probe, source: int, target: int, kept: _LinkRecord) -> bool:
    """Return True if a link is as it was, by all but the largest of the messages."""
    if not 0 <= time.time() - kept.at <= TRUSTED_SECONDS:
        return False
    return all(
        any(_is_alike(probe(source, target, size, REPEATS), before) for _ in range(TRIES))
        for size, before in zip(SIZES[:-1], kept.times, strict=False)
    )


def _is_alike(now: float, before: float) -> bool:
    return before / ALIKE <= now <= before * ALIKE


def _load(path: Path) -> dict[Pair, _LinkRecord]:
    """Read the kept links; a damaged file counts as empty."""
    try:
        data: Any = json.loads(path.read_text())
        if data["format"] != FORMAT:
            return {}
        return {
            _pair(str(one), str(other)): _LinkRecord(_check_seconds(times), float(at))
            for one, other, times, at in data["links"]
        }
    except (OSError, KeyError, TypeError, ValueError, RecursionError, PlanError):
        return {}


def _check_seconds(times: Any) -> list[float]:
    """Return the times of messages if they are valid."""
    seconds = [float(each) for each in times]
    if len(seconds) != len(SIZES) or not all(0 < each < math.inf for each in seconds):
        raise PlanError(f"{times!r} are no times of messages")  # caught where the file is read
    return seconds


def _save(path: Path, new: Mapping[Pair, _LinkRecord]) -> None:
    """Keep the links for later sessions if the folder can be written."""
    latest = sorted({**_load(path), **new}.items(), key=lambda item: item[1].at)[-LINKS:]
    rows = [[*pair, list(kept.times), kept.at] for pair, kept in latest]
    write_json(path, {"format": FORMAT, "links": rows})
