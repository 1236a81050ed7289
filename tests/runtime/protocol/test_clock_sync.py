"""Clocks: an offset by round trips, with a bound that holds, over drift, jumps and slow answers."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.runtime.protocol.clock_sync import (
    BURST,
    DRIFT,
    UNKNOWN,
    ClockReading,
    PeerClock,
    clock_identity,
)
from graphflow.runtime.protocol.coordinator_events import CoordinatorEvent
from tests.runtime.protocol.simulator import World

HOUR = 3600.0


def pings(
    clock: PeerClock,
    *,
    seed: int,
    count: int,
    offset: float,
    drift: float = 0.0,
    start: float = 1000.0,
    every: float = 1.0,
) -> float:
    """Round trips with delays that differ each way, some very slow; when the last one came."""
    random_ = random.Random(seed)
    at = start
    for _ in range(count):
        slow = random_.random() < 0.2
        there, back = (random_.expovariate(1 / (0.05 if slow else 2e-4)) + 5e-5 for _ in range(2))
        read = at + there
        clock.add_round_trip(at, read + offset + drift * (read - start), read + back)
        at = read + back + every
    return at


@given(
    st.integers(0, 10**6),
    st.floats(-1e6, 1e6),
    st.floats(-DRIFT / 2, DRIFT / 2),
    st.integers(1, 400),
    st.sampled_from([0.0, 0.5, 1.0, 20.0]),
)
def test_the_true_offset_lies_within_the_bound(
    seed: int, offset: float, drift: float, count: int, every: float
) -> None:
    clock = PeerClock()
    end = pings(clock, seed=seed, count=count, offset=offset, drift=drift, every=every)
    found = clock.estimate_at(end)
    true = offset + drift * (end - 1000.0)
    assert abs(found.offset - true) <= found.error + 1e-9
    assert 2 * found.error <= clock.round_trip + 2 * DRIFT * (8 * every + 10) + 1e-9


def test_a_burst_of_quick_round_trips_bounds_the_error_by_half_of_the_quickest() -> None:
    clock = PeerClock()
    end = pings(clock, seed=3, count=BURST, offset=-77.7, every=0.0)
    found = clock.estimate_at(end)
    assert found.error <= clock.round_trip / 2 + 1e-4
    assert found.offset == pytest.approx(-77.7, abs=found.error)


def test_over_hours_a_drift_is_found_and_the_bound_stays_small() -> None:
    clock, drift = PeerClock(), 4e-5  # 40 ppm: 144 ms an hour
    end = pings(clock, seed=1, count=2 * 3600, offset=5.0, drift=drift)
    found = clock.estimate_at(end)
    assert found.drift == pytest.approx(drift, abs=5e-6)
    assert found.error < 1e-3
    assert abs(found.offset - (5.0 + drift * (end - 1000.0))) <= found.error
    spoken = 5.0 + drift * (end - 1000.0 + 0.5) + end + 0.5  # half a second later
    assert found.to_ours(round(spoken * 1e9)) * 1e-9 == pytest.approx(end + 0.5, abs=1e-3)


def test_memory_does_not_grow_with_the_length_of_a_run() -> None:
    clock = PeerClock()
    pings(clock, seed=1, count=20_000, offset=1.0)
    assert len(clock._kept) + len(clock._recent) <= 40


def test_a_clock_that_jumps_is_followed() -> None:
    clock = PeerClock()
    pings(clock, seed=1, count=50, offset=5.0)
    end = pings(clock, seed=2, count=20, offset=905.0, start=2000.0)
    found = clock.estimate_at(end)
    assert abs(found.offset - 905.0) <= found.error < 0.1


def test_processes_that_share_a_clock_are_not_shifted_at_all() -> None:
    clock = PeerClock(home="here")
    clock.add_round_trip(1.0, 1.0003, 1.0004, home="here")
    assert clock.estimate_at(2.0) == ClockReading(2.0, 0.0, 0.0, 0.0)
    spans = [("/worker:0/cpu:0", "matmul", 10**18 + 1, 10**18 + 3)]
    assert clock.estimate_at(2.0).shift_spans(spans) == spans


def test_a_machine_that_only_says_it_shares_our_clock_is_shifted() -> None:
    clock = PeerClock(home="here")
    clock.add_round_trip(1.0, 501.0003, 1.0004, home="here")
    assert clock.estimate_at(1.0).offset == pytest.approx(500.0, abs=1e-3)


@pytest.mark.parametrize("homes", [("", ""), ("here", "there"), ("here", "")])
def test_other_clocks_are_estimated_even_where_they_agree(homes: tuple[str, str]) -> None:
    clock = PeerClock(homes[0])
    clock.add_round_trip(1.0, 1.0002, 1.0004, homes[1])
    assert clock.estimate_at(1.0).error == pytest.approx(2e-4, abs=1e-6)


def test_before_the_first_round_trip_nothing_is_known() -> None:
    assert PeerClock().estimate_at(5.0) == UNKNOWN and math.isinf(PeerClock().round_trip)


@pytest.mark.parametrize("trip", [(2.0, 1.0, 1.0), (1.0, math.nan, 2.0), (1.0, math.inf, 2.0)])
def test_round_trips_that_cannot_be_are_left_out(trip: tuple[float, float, float]) -> None:
    clock = PeerClock()
    clock.add_round_trip(*trip)
    assert clock.estimate_at(1.0) == UNKNOWN


def test_times_of_a_machine_that_runs_for_years_keep_their_nanoseconds() -> None:
    reading = ClockReading(1.0, 1e8, 0.0, 1e-6)
    assert reading.to_ours(10**17 + 10**9 + 7) - reading.to_ours(10**17 + 10**9) == 7


def test_processes_of_one_boot_have_one_identity() -> None:
    assert clock_identity() == clock_identity() and len(clock_identity()) in (0, 16)


# In the simulator: delays, resets, duplicates and frozen processes, clocks of their own ---------


def checks_in_world(seed: int) -> int:
    """Runs a world, and looks at the clocks after each event of its user; how often."""
    world = World(seed, workers=2, sessions=1, steps=5)
    random_ = random.Random(seed)
    for worker in world.workers:
        worker.rate = 1.0 + random_.uniform(-DRIFT / 2, DRIFT / 2)
    (user,) = world.users
    user.rate, handle, checked = 1.0, user.handle, 0

    def check_clocks(event: CoordinatorEvent) -> None:
        nonlocal checked
        handle(event)
        if user.machine is None or any(worker.life > 1 for worker in world.workers):
            return  # a process that was started again: a worker's clock is its machine's
        known = [user.machine.clock(index).estimate_at(world.now) for index in range(2)]
        if any(math.isinf(each.error) for each in known):
            return
        shown = [
            reading.to_ours(round(worker.clock() * 1e9)) * 1e-9
            for worker, reading in zip(world.workers, known, strict=True)
        ]
        for at, reading in zip(shown, known, strict=True):
            assert abs(at - world.now) <= reading.error + 1e-6
        # What one sends now the other may have now, at the earliest: whichever way it goes.
        assert abs(shown[0] - shown[1]) <= known[0].error + known[1].error + 2e-6
        checked += 1

    user.handle = check_clocks  # type: ignore[method-assign]
    world.run()
    return checked


def test_in_every_world_a_tensor_is_sent_before_it_arrives_within_the_bound() -> None:
    assert sum(checks_in_world(seed) for seed in range(60)) > 1000
