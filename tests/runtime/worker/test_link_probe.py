"""Echoes: they go at once where nothing keeps them waiting, and else on a thread that may wait."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from graphflow.runtime.protocol.worker_events import MessageReceived, RunJob, UpdatePeerLink
from graphflow.runtime.wire.messages import Chunk, Envelope
from graphflow.runtime.worker.link_probe import LinkProber
from tests.runtime.protocol.test_fast_path import SESSION, TOKEN, Cluster


class FakeLink:
    """A link to a worker, which takes arrays while it has `room`."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.senders: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def has_room(self, nbytes: int) -> bool:
        return nbytes <= self.room

    def send(self, *_: Any) -> None:
        self.senders.append(threading.get_ident())
        assert self.may_go.wait(10)


def echo(nbytes: int) -> RunJob:
    chunk = Chunk("echo", 7, 1, "uint8", [nbytes], [0], nbytes, 0)
    return RunJob("session", chunk, 0, 1, {1: np.zeros(nbytes, np.uint8)})


def test_an_echo_goes_at_once_unless_it_would_wait_for_room_or_overtake() -> None:
    link: Any = FakeLink(room=100)
    echoes = LinkProber(0, ["a", "b"], {1: link}, lambda *_: False, threading.Event(), "echo")
    assert echoes.try_send_back(echo(100)) and link.senders == [threading.get_ident()]
    assert not echoes.try_send_back(echo(101))
    link.may_go.clear()
    echoes.queue_echo(echo(101))
    assert not echoes.try_send_back(echo(1))
    link.may_go.set()
    echoes.close()
    assert len(link.senders) == 2 and link.senders[1] != threading.get_ident()
    assert echoes.try_send_back(echo(1))


def test_what_an_echo_brings_back_acknowledges_what_asked_for_it() -> None:
    """Else the next one could not go by a lane, since it might overtake this, nor those after."""
    worker = Cluster().workers[1]
    asked = Chunk("echo", 7, 0, "uint8", [4], [0], 4, 0)
    for number in (1, 2):
        said = Envelope(SESSION, 1, 0, 0, number, number - 1, TOKEN)
        actions = worker.handle(MessageReceived(b"route", said, asked, b"1234"), 10.0)
        heard, run = actions
        assert isinstance(heard, UpdatePeerLink) and isinstance(run, RunJob)
        assert (heard.received, heard.acknowledged) == (number, number - 1)
