"""Arenas: programs of a device lie in the same memory, and no result knows of it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import DeviceOutOfMemory
from graphflow.runtime.memory.arenas import Arena, Arenas
from graphflow.runtime.memory.backend import CpuBackend
from graphflow.runtime.transport import shared_memory as segment

Array = np.ndarray[Any, Any]


class Scarce(CpuBackend):
    """A device of so many bytes, all of them free."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(1)
        self.nbytes = nbytes

    def empty(self, nbytes: int) -> Array:
        if nbytes > self.nbytes:
            raise DeviceOutOfMemory(f"{nbytes} bytes")
        return super().empty(nbytes)


def test_a_program_lies_where_there_is_room() -> None:
    arenas = Arenas(CpuBackend(1))
    first = arenas.reserve(1000, False)
    assert first.memory.nbytes == 1000, "the first has what it needs"
    assert arenas.reserve(640, False) is first and first.used_bytes == 1000
    second = arenas.reserve(1100, False)
    assert second is not first and second.memory.nbytes == 1500 and second.used_bytes == 1100
    assert arenas.reserve(1500, False) is second and second.used_bytes == 1500
    assert arenas.reserve(640, False) is second


def test_sizes_that_grow_leave_few_arenas_behind() -> None:
    arenas = Arenas(CpuBackend(1))
    made = {arenas.reserve(nbytes, False): nbytes for nbytes in range(1 << 10, 1 << 15, 64)}
    assert len(made) < 12
    assert sum(arena.memory.nbytes for arena in made) < 3 * 1.5 * (1 << 15)


def test_an_arena_goes_with_the_last_of_its_programs() -> None:
    arenas = Arenas(CpuBackend(1))
    large = arenas.reserve(1 << 20, False)
    del large
    gc.collect()
    assert arenas.reserve(1 << 10, False).memory.nbytes == 1 << 10


def test_where_memory_is_short_a_program_gets_what_it_needs_or_an_error() -> None:
    arenas = Arenas(Scarce(1200))
    first = arenas.reserve(1000, False)
    assert arenas.reserve(1200, False).memory.nbytes == 1200
    with pytest.raises(DeviceOutOfMemory):
        arenas.reserve(1300, False)
    assert first.used_bytes == 1000


@pytest.mark.skipif(not segment.has_shared_memory(), reason="needs Linux's anonymous shared memory")
def test_what_others_are_to_reach_is_shared_and_serves_the_rest_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arenas = Arenas(CpuBackend(1))
    private = arenas.reserve(1 << 12, False)
    shared = arenas.reserve(1 << 10, True)
    assert private.segment is None and shared.segment is not None
    assert shared.memory.nbytes >= 1 << 12
    assert arenas.reserve(1 << 12, False) is shared
    shared.memory[: 1 << 12] = 7  # it is there
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", "off")
    assert Arenas(CpuBackend(1)).reserve(1 << 10, True).segment is None


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_steps_of_any_sizes_and_fetches_have_the_bits_that_they_have_with_memory_of_their_own(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training step, a validation and a loop by turns: each would trip over what another left."""
    x = gf.placeholder("float32", (None, 5), name="x")
    w = gf.variable(np.linspace(-1, 1, 35).reshape(5, 7).astype("f4"), name="w")
    with gf.device(devices[-1]):
        y = gf.tanh(x @ w)
    loss = gf.mean((gf.sum(y, axis=1) - gf.sum(x, axis=1)) ** 2)
    step = gf.optim.Adam(0.1).minimize(loss)
    fetches = [[loss, step], [loss, y], gf.scan(lambda c, row: (c * 0.5 + row, c), y[0], y)]
    rng = np.random.default_rng(4)
    turns = [(rng.normal(size=(int(rng.integers(1, 60)), 5)), rng.choice(3)) for _ in range(60)]

    def run() -> list[list[bytes]]:
        with gf.Session(gf.Cluster.here(devices)) as s:
            steps = [s.run(fetches[which], {x: fed.astype("f4")}) for fed, which in turns]
        return [[v.tobytes() for v in values if v is not None] for values in steps]

    together = run()
    taken = []

    def allocate_apart(self: Arenas, nbytes: int, shared: bool) -> Arena:
        taken.append(Arena(CpuBackend(1).empty(nbytes)))
        taken[-1].memory[:] = 255  # NaNs
        return taken[-1]

    monkeypatch.setattr(Arenas, "reserve", allocate_apart)
    assert together == run() and len(taken) > 40
