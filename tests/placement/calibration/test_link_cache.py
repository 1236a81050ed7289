"""Links between workers elsewhere are measured once, and again when they are not as they were."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from graphflow.placement.calibration import link_cache as network
from graphflow.placement.calibration.calibrate import SIZES
from graphflow.placement.calibration.link_cache import (
    TRIES,
    TRUSTED_SECONDS,
    load_or_measure_links,
    network_path,
)

ADDRESSES = ("tcp://10.0.0.1:7001", "tcp://10.0.0.2:7001", "tcp://10.0.0.3:7001")


def ends(addresses: Sequence[str]) -> dict[str, str]:
    """Addresses of workers, by name."""
    return {f"/worker:{i}": address for i, address in enumerate(addresses)}


class Wires:
    """Links that can be made slower; counts the bytes that probes sent over them."""

    def __init__(self) -> None:
        self.rate: dict[frozenset[int], float] = {}
        self.delays: list[float] = []
        self.sent = 0

    def __call__(self, source: int, target: int, nbytes: int, repeats: int) -> float:
        self.sent += nbytes * repeats
        late = self.delays.pop() if self.delays else 0.0
        return 1e-4 + nbytes / self.rate.get(frozenset((source, target)), 1e9) + late

    def measure_traffic(self, folder: Path, count: int = 3, **options: Any) -> int:
        """Bytes sent to learn of links between so many workers, which must be told as they are."""
        before = self.sent
        found = load_or_measure_links(self, ends(ADDRESSES[:count]), folder=folder, **options)
        for a in range(count):
            for b in {*range(count)} - {a}:
                latency, bandwidth = found[f"/worker:{a}", f"/worker:{b}"]
                assert latency == pytest.approx(1e-4, rel=1e-3)
                assert bandwidth == pytest.approx(self.rate.get(frozenset((a, b)), 1e9), rel=1e-3)
        return self.sent - before


@pytest.fixture
def wires() -> Wires:
    return Wires()


def test_links_are_measured_once_and_looked_at_in_later_sessions(
    wires: Wires, tmp_path: Path
) -> None:
    first = wires.measure_traffic(tmp_path)
    assert wires.measure_traffic(tmp_path) < first / 10
    assert wires.measure_traffic(tmp_path, afresh=True) == first


def test_a_link_that_changed_is_measured_anew_and_no_other(wires: Wires, tmp_path: Path) -> None:
    first = wires.measure_traffic(tmp_path)
    for rate in (1e8, 1e9, 2e9):  # slower, and faster
        wires.rate[frozenset((0, 2))] = rate
        assert first / 3 < wires.measure_traffic(tmp_path) < first / 2
        assert wires.measure_traffic(tmp_path) < first / 10


def test_the_order_of_workers_in_a_file_does_not_matter(wires: Wires, tmp_path: Path) -> None:
    wires.rate[frozenset((0, 1))] = 1e8
    found = load_or_measure_links(wires, ends(ADDRESSES), folder=tmp_path)
    before = wires.sent
    wires.rate = {frozenset((1, 2)): 1e8}
    turned = load_or_measure_links(wires, ends(ADDRESSES[::-1]), folder=tmp_path)
    assert wires.sent - before < before / 10
    assert turned["/worker:2", "/worker:1"] == found["/worker:0", "/worker:1"]


def test_a_message_that_comes_late_by_chance_is_sent_again(wires: Wires, tmp_path: Path) -> None:
    wires.measure_traffic(tmp_path, 2)
    wires.delays = [1.0] * (TRIES - 1)
    assert wires.measure_traffic(tmp_path, 2) < 4 * SIZES[1]


def test_what_is_old_is_measured_anew(
    wires: Wires, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, now = wires.measure_traffic(tmp_path), network.time.time()
    for later in (TRUSTED_SECONDS + 60, -60):  # or of tomorrow: the clock was set back
        monkeypatch.setattr(network.time, "time", lambda later=later: now + later)
        assert wires.measure_traffic(tmp_path) == first
        monkeypatch.undo()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 1, "links": [["a", "b"]]}',
        '{"format": 1, "links": {"a": 1}}',
        json.dumps({"format": 1, "links": [[*ADDRESSES[:2], [1e-4, -1.0, 1e-2], 1e12]]}),
        json.dumps({"format": 1, "links": [[*ADDRESSES[:2], [1e-4, 1e-3], 1e12]]}),
        json.dumps({"format": 2, "links": [[*ADDRESSES[:2], [1e-4, 1e-3, 1e-2], 1e12]]}),
        "[" * 100_000,
        "\0\xff",
    ],
)
def test_a_damaged_file_is_measured_anew(wires: Wires, tmp_path: Path, text: str) -> None:
    network_path(tmp_path).write_bytes(text.encode("latin-1"))
    first = wires.measure_traffic(tmp_path, 2)
    assert first > sum(SIZES)
    assert wires.measure_traffic(tmp_path, 2) < first / 10


def test_where_nothing_can_be_kept_links_are_measured_each_time(
    wires: Wires, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    assert wires.measure_traffic(folder) == wires.measure_traffic(folder) > sum(SIZES)
