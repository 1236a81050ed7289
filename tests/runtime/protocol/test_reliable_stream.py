"""Streams over a line that loses, repeats and reorders: everything arrives, once, in order."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import StaleEpoch, StaleSession
from graphflow.runtime.protocol import reliable_stream as stream
from graphflow.runtime.protocol.reliable_stream import (
    Inbound,
    Outbound,
    OutgoingMessage,
    ReceiveStatus,
    ReliableStream,
    stale_error,
)
from graphflow.runtime.wire.array_codec import BorrowedBuffer, split_array
from graphflow.runtime.wire.messages import Ack, Chunk, Envelope, Forget, Load, Ping, Resend

WINDOW = 5
DEEDS = ["send", "send back", "deliver", "lose", "repeat", "swap", "damage", "reset", "beat"]


class Line:
    """Two streams, and what is under way in each direction."""

    def __init__(self) -> None:
        self.ends = [ReliableStream("s", 1, -1, "t"), ReliableStream("s", 1, 0, "t")]
        self.under_way: list[list[OutgoingMessage]] = [[], []]  # from each end
        self.sent: list[list[int]] = [[], []]
        self.arrived: list[list[int]] = [[], []]  # at each end

    def put(self, end: int, letters: list[OutgoingMessage]) -> None:
        self.under_way[end] += letters
        outbound = self.ends[end].outbound
        assert outbound.pending <= WINDOW

    def send(self, end: int) -> None:
        number = len(self.sent[end])
        self.sent[end].append(number)
        ((chunk, data),) = split_array("fetch", number, "x", np.array([number]))
        self.put(end, self.ends[end].send(chunk, 0, data))

    def deliver(self, end: int, *, damaged: bool = False) -> None:
        if not self.under_way[end]:
            return
        letter = self.under_way[end].pop(0)
        data = None if letter.data is None else bytes(letter.data)
        if damaged and data is not None:
            data = bytes([data[0] ^ 1]) + data[1:]
        other = 1 - end
        arrival, answers = self.ends[other].receive(letter.envelope, letter.message, data)
        if arrival is ReceiveStatus.FRESH:
            assert data is not None and isinstance(letter.message, Chunk)
            self.arrived[other].append(int(np.frombuffer(data, np.int64)[0]))
        self.put(other, answers)

    def beat(self) -> None:
        for end, each in enumerate(self.ends):
            self.put(end, [each.send_unnumbered(Ack(asks=True))])

    def do(self, deed: str, end: int) -> None:
        flow = self.under_way[end]
        match deed:
            case "send":
                self.send(end)
            case "send back":
                self.send(1 - end)
            case "deliver":
                self.deliver(end)
            case "damage":
                self.deliver(end, damaged=True)
            case "lose":
                del flow[:1]
            case "repeat":
                flow += flow[:1]
            case "swap":
                flow.reverse()
            case "reset":
                flow.clear()
            case "beat":
                self.beat()


@given(st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 1)), max_size=80))
def test_whatever_a_line_does_everything_arrives_once_and_in_order(
    deeds: list[tuple[str, int]],
) -> None:
    with mock.patch.object(stream, "WINDOW", WINDOW), mock.patch.object(stream, "ACK_EVERY", 3):
        line = Line()
        for deed, end in deeds:
            line.do(deed, end)
            for at in range(2):  # never ahead of what was sent, and never twice
                assert line.arrived[1 - at] == line.sent[at][: len(line.arrived[1 - at])]
        for _ in range(200):  # the line is good from here on
            line.beat()
            while any(line.under_way):
                line.deliver(0)
                line.deliver(1)
        assert line.arrived == [line.sent[1], line.sent[0]]
        assert all(end.outbound.pending == end.waiting_count == 0 for end in line.ends)


def make_envelope(number: int) -> Envelope:
    return Envelope("s", 1, 0, 0, number)


def test_a_gap_is_asked_for_once_and_again_only_when_the_answer_was_lost() -> None:
    inbound = Inbound()
    forget = Forget(1, [], [])
    assert inbound.receive(make_envelope(3), forget, None) == (ReceiveStatus.MISSING, Resend(1, 1))
    assert inbound.receive(make_envelope(4), forget, None) == (ReceiveStatus.MISSING, None)
    # The sender has not heard of the request yet: the same one again.
    assert inbound.receive(make_envelope(4), Ping(resent=0), None) == (
        ReceiveStatus.UNNUMBERED,
        Resend(1, 1),
    )
    # It has answered, and the answer was lost: another one.
    assert inbound.receive(make_envelope(4), Ping(resent=1), None) == (
        ReceiveStatus.UNNUMBERED,
        Resend(1, 2),
    )
    assert inbound.receive(make_envelope(1), forget, None)[0] is ReceiveStatus.FRESH
    assert inbound.receive(make_envelope(3), forget, None) == (ReceiveStatus.MISSING, Resend(2, 3))


def test_an_array_in_shared_memory_is_taken_without_a_look_at_it() -> None:
    inbound = Inbound()
    chunk = Chunk("edge", 1, 7, "uint8", [9], [0], 9, 0, slot=128, turn=1)
    borrowed: list[Any] = []
    lent = BorrowedBuffer(lambda: borrowed.append(1))  # type: ignore[arg-type,return-value]
    assert inbound.receive(make_envelope(1), chunk, lent) == (ReceiveStatus.FRESH, None)
    assert (
        inbound.receive(make_envelope(1), chunk, lent) == (ReceiveStatus.DUPLICATE, None)
        and not borrowed
    )


def test_many_messages_in_one_direction_are_acknowledged_by_number_and_by_bytes() -> None:
    inbound = Inbound()
    told = [inbound.receive(make_envelope(n), Load(1, "p", 0), None)[1] for n in range(1, 65)]
    assert told == [None] * 63 + [Ack()]
    inbound.mark_acknowledged()
    ((chunk, data),) = split_array("fetch", 1, "x", np.zeros(1 << 20, np.uint8))
    told = [inbound.receive(make_envelope(n), chunk, data)[1] for n in range(65, 73)]
    assert told == [None] * 7 + [Ack()]


def test_one_message_that_is_larger_than_the_window_is_sent_alone() -> None:
    outbound = Outbound("s", 1, 0)
    assert outbound.has_room(1 << 30)
    outbound.post(Load(1, "p", 0))
    assert not outbound.has_room(1 << 30) and outbound.has_room(1 << 20)
    assert outbound.acknowledge(1) and outbound.has_room(1 << 30)
    assert not outbound.acknowledge(9)  # of what was never sent


@pytest.mark.parametrize(
    ("epoch", "token", "error"),
    [(2, "t", None), (1, "t", StaleEpoch), (3, "t", StaleEpoch), (2, "", StaleSession),
     (2, "guess", StaleSession), (3, "guess", StaleSession)],
)  # fmt: skip
def test_only_the_sessions_epoch_with_its_token_gets_in(
    epoch: int, token: str, error: type | None
) -> None:
    found = stale_error(Envelope("s", epoch, 0, 0, 1, token=token), 2, "t")
    assert (found and type(found)) is error
    if error is StaleEpoch:  # who was away while the others began anew
        late = "its sender" if epoch < 2 else "its receiver"
        assert f"{late} missed a recovery" in str(found)
