"""Links between workers: what they keep, for how long, and what they send again."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from graphflow.errors import TransportError
from graphflow.runtime.protocol import reliable_stream as stream
from graphflow.runtime.protocol.reliable_stream import Outbound
from graphflow.runtime.protocol.worker_events import UpdatePeerLink
from graphflow.runtime.wire.array_codec import CHUNK_BYTES, checksum
from graphflow.runtime.wire.frame_codec import decode_frames
from graphflow.runtime.wire.messages import Ack, Chunk, Resend
from graphflow.runtime.worker.peer_link import PeerLink


class Line:
    """A channel that notes what is sent, and may have no room."""

    address = "tcp://127.0.0.1:7001"

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.frames: list[Any] = []
        self.closed = False
        self.full = False

    def changes(self) -> list[bool]:
        return []

    def under_way(self, now: float) -> int:
        return 0

    def send_unlocked(self, frames: list[Any]) -> bool:
        if not self.full:
            self.frames.append(frames)
        return not self.full

    def close(self) -> None:
        self.closed = True

    def numbers(self) -> list[int]:
        return [decode_frames(frames)[0].sequence for frames in self.frames]


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.setattr(
        "graphflow.runtime.worker.peer_link.LEND_MIN_BYTES", 1 << 60
    )  # nothing by shared memory
    monkeypatch.setattr(stream, "WINDOW", 3)
    return Line()


@pytest.fixture
def link(line: Line) -> PeerLink:
    return PeerLink(line, Outbound("s", 2, 0, "secret"))


def send(
    link: PeerLink, number: int, array: Any, *, owned: bool = True, patience: float = 0.0
) -> None:
    until = time.monotonic() + patience
    link.send(
        "edge", number, "e", array, owned=owned, should_continue=lambda: time.monotonic() < until
    )


def make_big(value: int = 1) -> Any:
    return np.full(5000, value, np.int64)  # too large to lie inside a message


def test_what_goes_over_a_link_is_numbered_and_has_its_session_epoch_and_token(
    line: Line, link: PeerLink
) -> None:
    send(link, 7, make_big())
    envelope, chunk, data = decode_frames(line.frames[0])
    assert (envelope.session, envelope.epoch, envelope.token) == ("s", 2, "secret")
    assert (envelope.step, envelope.sequence) == (7, 1)
    assert isinstance(chunk, Chunk) and data is not None and chunk.checksum == checksum(data)


@pytest.mark.parametrize(
    ("address", "sealed", "pieces"),
    [
        ("tcp://127.0.0.1:1", False, 1),
        ("tcp://127.0.0.1:1", True, 4),
        ("tcp://10.0.0.1:1", False, 4),
        ("tcp://10.0.0.1:1", True, 4),
    ],
)
def test_pieces_are_small_where_they_go_far_or_are_encrypted(
    line: Line, monkeypatch: pytest.MonkeyPatch, address: str, sealed: bool, pieces: int
) -> None:
    monkeypatch.setattr(stream, "WINDOW", 10)
    monkeypatch.setattr(line, "address", address)
    link = PeerLink(line, Outbound("s", 2, 0, "secret"), sealed=sealed)
    array = np.arange(CHUNK_BYTES, dtype=np.uint8)
    send(link, 7, array)
    sent = [decode_frames(frames)[2] for frames in line.frames]
    assert len(sent) == pieces
    assert b"".join(map(bytes, sent)) == array.tobytes()


def test_a_sender_waits_for_room_and_goes_on_when_it_is_acknowledged(
    line: Line, link: PeerLink
) -> None:
    for step in range(3):
        send(link, step, make_big())
    with pytest.raises(TransportError, match="takes no more messages"):
        send(link, 3, make_big())
    assert line.numbers() == [1, 2, 3]  # what was given up has no number
    sender = threading.Thread(target=send, args=(link, 3, make_big()), kwargs={"patience": 10.0})
    sender.start()
    time.sleep(0.1)
    assert sender.is_alive() and len(line.frames) == 3
    link.apply_update(UpdatePeerLink("s", 1, acknowledged=1, received=0))
    sender.join(5.0)
    assert not sender.is_alive() and line.numbers() == [1, 2, 3, 4]


def test_an_owned_array_is_kept_by_reference_until_it_is_acknowledged_and_no_longer(
    line: Line, link: PeerLink
) -> None:
    array = make_big()
    gone = weakref.ref(array)
    send(link, 1, array)
    line.frames.clear()
    del array
    gc.collect()
    assert gone() is not None
    link.apply_update(UpdatePeerLink("s", 1, acknowledged=1, received=0))
    gc.collect()
    assert gone() is None


def test_an_array_that_is_not_owned_may_be_written_to_at_once(line: Line, link: PeerLink) -> None:
    array = make_big(1)
    send(link, 1, array, owned=False)
    array[:] = 2
    link.apply_update(UpdatePeerLink("s", 1, 0, 0, wanted=Resend(1, 1)))
    for frames in line.frames:
        assert np.frombuffer(decode_frames(frames)[2], np.int64)[0] == 1


def test_what_is_asked_for_is_sent_again_once_and_sealed_anew(line: Line, link: PeerLink) -> None:
    array = make_big(1)
    for step in range(3):
        send(link, step, array)
    array[:] = 2  # of a step that was aborted meanwhile
    asked = UpdatePeerLink("s", 1, acknowledged=1, received=5, wanted=Resend(2, 1))
    link.apply_update(asked)
    link.apply_update(asked)
    assert line.numbers() == [1, 2, 3, 2, 3]
    envelope, chunk, data = decode_frames(line.frames[-1])
    assert envelope.acknowledged == 5
    assert isinstance(chunk, Chunk) and data is not None and chunk.checksum == checksum(data)
    link.apply_update(UpdatePeerLink("s", 1, 1, 5, wanted=Resend(2, 2)))
    assert line.numbers()[5:] == [2, 3]


def test_a_link_tells_what_was_received_and_asks_while_it_is_not_acknowledged(
    line: Line, link: PeerLink
) -> None:
    link.heartbeat(owed=False)
    assert line.frames == []
    link.apply_update(UpdatePeerLink("s", 1, acknowledged=0, received=4, told=Ack()))
    send(link, 1, make_big())
    link.heartbeat(owed=False)
    link.apply_update(UpdatePeerLink("s", 1, acknowledged=1, received=4))
    link.heartbeat(owed=True)
    told = [decode_frames(frames)[:2] for frames in line.frames]
    assert [envelope.acknowledged for envelope, _ in told] == [4, 4, 4, 4]
    asking = [message.asks for _, message in told if isinstance(message, Ack)]
    assert asking == [False, True, False]
    assert [envelope.sequence for envelope, _ in told] == [0, 1, 1, 1]


def test_a_peer_that_takes_nothing_is_told_of_and_gets_a_new_chance_in_each_step(
    line: Line, link: PeerLink
) -> None:
    send(link, 7, np.ones(3))
    for _ in range(4):
        link.heartbeat(owed=False)
    assert link.find_unacknowledged() is None  # it may be slow
    link.heartbeat(owed=False)
    assert link.find_unacknowledged() == (5, (7, "e"))
    send(link, 8, np.ones(3))
    link.heartbeat(owed=False)
    assert link.find_unacknowledged() is None  # what was cut may be whole again


def test_what_a_full_connection_did_not_take_is_sent_when_it_is_asked_for(
    line: Line, link: PeerLink
) -> None:
    line.full = True
    send(link, 1, make_big())
    line.full = False
    send(link, 2, make_big())
    assert line.numbers() == [2]
    link.apply_update(UpdatePeerLink("s", 1, 0, 0, wanted=Resend(1, 1)))
    assert line.numbers() == [2, 1, 2]


def test_closing_a_link_closes_its_connection(line: Line, link: PeerLink) -> None:
    link.close()
    assert line.closed
