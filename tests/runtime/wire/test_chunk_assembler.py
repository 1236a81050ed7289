"""Arrays in pieces: nothing is believed, and nothing is taken on beyond its budget."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphflow.errors import GraphLimitError, MessageTooLarge, ProtocolError
from graphflow.runtime.wire import chunk_assembler as assembler
from graphflow.runtime.wire.array_codec import CHUNK_BYTES, split_array
from graphflow.runtime.wire.chunk_assembler import ByteBudget, ChunkAssembler
from graphflow.runtime.wire.messages import Chunk

CHUNK = Chunk("edge", 5, "e", "float32", [2, 3], [0, 1], 24, 0)


@pytest.mark.parametrize(
    ("change", "data"),
    [
        ({"dtype": "object"}, b"\0" * 24),
        ({"dtype": "O"}, b"\0" * 24),
        ({"dtype": "float32,float32"}, b"\0" * 24),
        ({"dtype": "longdouble"}, b"\0" * 24),
        ({"shape": [2, 4]}, b"\0" * 24),
        ({"shape": [2**62, 2**62]}, b"\0" * 24),
        ({"shape": [2**63 - 1, 0], "nbytes": 0}, b""),
        ({"shape": [2**40, 2**40, 0], "axes": [0, 1, 2], "nbytes": 0}, b""),
        ({"shape": [1] * 40, "axes": list(range(40)), "nbytes": 4}, b"\0" * 4),
        ({"axes": [0, 0]}, b"\0" * 24),
        ({"axes": [0]}, b"\0" * 24),
        ({"nbytes": 20}, b"\0" * 20),
        ({}, b"\0" * 20),
        ({}, b"\0" * 28),
        ({"offset": 8}, b"\0" * 16),
        ({"offset": CHUNK_BYTES}, b""),
        ({"shape": [2**40], "axes": [0], "nbytes": 2**42}, b"\0" * CHUNK_BYTES),
    ],
)
def test_a_header_is_checked_before_memory_is_allocated(change: Any, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            ChunkAssembler().add(0, replace(CHUNK, **change), data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_budget_bounds_what_is_under_way_until_it_is_taken_or_forgotten() -> None:
    inbox = ChunkAssembler(budget=100, entries=3)
    for number in range(3):
        inbox.add(0, replace(CHUNK, number=number), b"\0" * 24)
    with pytest.raises(MessageTooLarge, match="arrays"):
        inbox.add(0, replace(CHUNK, number=3), b"\0" * 24)
    inbox.forget("edge", 0)
    inbox.take(0, "edge", 1, "e")
    wide = replace(CHUNK, number=4, shape=[4, 5], nbytes=80)
    with pytest.raises(MessageTooLarge, match="budget"):
        inbox.add(0, wide, b"\0" * 80)
    inbox.forget("edge", 2)
    assert inbox.add(0, wide, b"\0" * 80)


def test_each_peer_has_a_budget_and_all_sessions_share_one() -> None:
    shared_budget = ByteBudget(130)
    first, second = (
        ChunkAssembler(60, shared_budget=shared_budget),
        ChunkAssembler(60, shared_budget=shared_budget),
    )
    for inbox, origin in ((first, 0), (first, 0), (first, 1), (second, 0)):
        inbox.add(origin, replace(CHUNK, number=shared_budget.held), b"\0" * 24)
    with pytest.raises(MessageTooLarge, match="48 of 60 bytes of its sender"):
        first.add(0, replace(CHUNK, number=1), b"\0" * 24)
    second.add(1, CHUNK, b"\0" * 24)
    with pytest.raises(MessageTooLarge, match="120 of 130 of all"):
        first.add(2, CHUNK, b"\0" * 24)
    with pytest.raises(GraphLimitError):
        first.add(2, replace(CHUNK, purpose="part"), b"\0" * 24)
    first.take(1, "edge", 48, "e")
    first.clear()
    assert shared_budget.held == 48
    second.clear()
    assert shared_budget.held == 0


def test_memory_that_there_is_not_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(nbytes: int) -> Any:
        raise MemoryError

    monkeypatch.setattr(assembler, "empty_aligned", none)
    with pytest.raises(MessageTooLarge, match="no memory"):
        ChunkAssembler().add(0, CHUNK, b"\0" * 24)


def test_chunks_must_continue_each_other() -> None:
    array = np.zeros(CHUNK_BYTES + 8, np.uint8)
    (first, data), (second, rest) = split_array("edge", 1, "e", array)
    inbox = ChunkAssembler()
    with pytest.raises(ProtocolError, match="starts at"):
        inbox.add(0, second, rest)
    assert not inbox.add(0, first, data)
    with pytest.raises(ProtocolError, match="continue"):
        inbox.add(0, replace(second, dtype="bool"), rest)
    with pytest.raises(ProtocolError, match="continue"):
        inbox.add(0, first, data)
    with pytest.raises(ProtocolError, match="not sent"):
        inbox.take(0, "edge", 1, "e")
    assert inbox.add(0, second, rest)
    with pytest.raises(ProtocolError, match="second time"):
        inbox.add(0, first, data)
