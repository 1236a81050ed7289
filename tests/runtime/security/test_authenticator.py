"""Who gets in: real sockets and worker processes on loopback, each with a keyring of its own."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import graphflow as gf
from graphflow.errors import (
    InsecureAddress,
    KeyFileError,
    NotAuthorised,
    RendezvousTimeout,
)
from graphflow.runtime.launch import child
from graphflow.runtime.protocol.worker import WorkerMachine
from graphflow.runtime.protocol.worker_events import MessageReceived, UpdatePeerLink
from graphflow.runtime.security import authenticator as guard
from graphflow.runtime.security.authenticator import ZapAuthenticator
from graphflow.runtime.security.keys import CLIENT, COORDINATOR, WORKER, Keyring
from graphflow.runtime.transport.tcp import TcpChannel, TcpListener, check_address
from graphflow.runtime.wire.array_codec import CHUNK_BYTES, checksum
from graphflow.runtime.wire.messages import COORDINATOR as ORIGIN
from graphflow.runtime.wire.messages import (
    KINDS,
    Broken,
    Chunk,
    Envelope,
    Hello,
    Measure,
    Message,
    Open,
    Ping,
    Tensor,
)
from tests.fuzz.targets import inside, make_message

SECONDS = 5.0
SESSION = "5" * 32


def wait_for(what: Callable[[], Any], seconds: float = SECONDS) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "nothing happened in time"
        time.sleep(0.005)
    return found


@pytest.fixture
def context() -> Iterator[Any]:
    context: Any = zmq.Context()
    yield context
    context.destroy(linger=0)


class Box:
    """A listening worker's sockets, and somebody else's."""

    def __init__(self, context: Any, folder: Path) -> None:
        self.ring = Keyring(folder / "box")
        self.pair = self.ring.create_pair("box", WORKER)
        self.guard = ZapAuthenticator(context, self.pair, self.ring)
        self.listener = TcpListener(context, "tcp://127.0.0.1:*", insecure=False, guard=self.guard)
        self._folder = folder
        self.contexts: list[Any] = []
        self.guards: list[ZapAuthenticator] = []

    def visitor(self, name: str, role: str, *, trusted: bool) -> tuple[TcpChannel, str]:
        """A connection with a key of its own, and that key."""
        ring = Keyring(self._folder / name)
        pair = ring.create_pair(name, role)
        if trusted:
            self.ring.add(str(pair.public), name)
        own: Any = zmq.Context()
        self.contexts.append(own)
        self.guards.append(ZapAuthenticator(own, pair, ring))
        channel = TcpChannel(
            own, self.listener.address, insecure=False, watch=True,
            guard=self.guards[-1], key=self.pair.public.key,
        )  # fmt: skip
        return channel, pair.public.key

    def close(self) -> None:
        self.listener.close()
        self.guard.close()
        for own in self.contexts:
            own.destroy(linger=0)


@pytest.fixture
def box(context: Any, tmp_path: Path) -> Iterator[Box]:
    made = Box(context, tmp_path)
    yield made
    made.close()


def test_a_trusted_key_comes_in_and_is_known_by_it(box: Box) -> None:
    channel, key = box.visitor("alice", COORDINATOR, trusted=True)
    channel.send([b"hello"])
    route, frames, who = wait_for(box.listener.receive)
    assert bytes(frames[0]) == b"hello" and who == key and box.guard.role_of(who) == COORDINATOR
    assert box.listener.send(route, [b"welcome"])
    assert bytes(wait_for(channel.receive)[0]) == b"welcome"
    channel.close()


def test_a_whole_chunk_passes_though_sealing_makes_it_longer(box: Box) -> None:
    channel, _ = box.visitor("alice", COORDINATOR, trusted=True)
    channel.send([b"head", bytes(CHUNK_BYTES)])
    _, frames, _ = wait_for(box.listener.receive)
    assert len(frames[1]) == CHUNK_BYTES
    channel.close()


def test_an_unknown_key_is_refused_and_told_once(
    box: Box, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphflow.runtime.security.authenticator._GRACE_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING, "graphflow.security"):
        channel, key = box.visitor("eve", COORDINATOR, trusted=False)
        again = TcpChannel(
            box.contexts[-1], box.listener.address, insecure=False, watch=True,
            guard=box.guards[-1], key=box.pair.public.key,
        )  # fmt: skip
        for each in (channel, again):
            each.send([b"hello"])
            assert wait_for(lambda each=each: False in each.read_link_changes()) and each.refused
            each.close()
        assert box.listener.receive() is None
        assert len([r for r in caplog.records if key[:16] in r.getMessage()]) == 1


def test_a_key_that_is_trusted_while_it_waits_comes_in(box: Box) -> None:
    channel, key = box.visitor("eve", COORDINATOR, trusted=False)
    channel.send([b"hello"])
    wait_for(lambda: channel.read_link_changes() or channel.refused)
    assert box.listener.receive() is None
    box.ring.add(f"graphflow-key-1 coordinator eve {key}", "eve")
    assert wait_for(box.listener.receive)[2] == key
    assert channel.read_link_changes() == [True] and not channel.refused
    channel.close()


def test_many_who_wait_at_the_door_do_not_keep_a_friend_out(box: Box) -> None:
    strangers = [box.visitor(f"eve{i}", COORDINATOR, trusted=False)[0] for i in range(20)]
    for each in strangers:
        each.send([b"let me in"])
    channel, key = box.visitor("alice", COORDINATOR, trusted=True)
    channel.send([b"hello"])
    assert wait_for(box.listener.receive)[2] == key
    for each in (*strangers, channel):
        each.close()


def test_without_a_key_nothing_comes_in(box: Box, context: Any) -> None:
    plain = TcpChannel(context, box.listener.address, insecure=False)
    plain.send([b"hello"])
    time.sleep(0.3)
    assert box.listener.receive() is None
    plain.close()


def test_a_listener_that_shows_another_key_is_not_talked_to(box: Box, tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "alice")
    pair, other = ring.create_pair("alice", COORDINATOR), ring.create_pair("other", WORKER)
    box.ring.add(str(pair.public), "alice")
    own: Any = zmq.Context()
    guard = ZapAuthenticator(own, pair, ring)
    channel = TcpChannel(
        own, box.listener.address, insecure=False, watch=True, guard=guard, key=other.public.key
    )
    channel.send([b"secret"])
    time.sleep(0.3)
    assert True not in channel.read_link_changes() and box.listener.receive() is None
    channel.close()
    own.destroy(linger=0)


def test_workers_of_a_session_are_let_in_while_it_is_open(box: Box) -> None:
    channel, key = box.visitor("box2", WORKER, trusted=False)
    channel.send([b"tensor"])
    time.sleep(0.2)
    assert box.listener.receive() is None
    boss, by = box.visitor("boss", COORDINATOR, trusted=True)
    box.guard.allow_session_keys(SESSION, by, ["", key, by])
    assert wait_for(box.listener.receive)[2] == key and box.guard.role_of(key) == WORKER
    box.guard.forget_session(SESSION)
    assert box.guard.role_of(key) is None
    box.guard.allow_session_keys(SESSION, by, ["", key, by])
    assert box.guard.role_of(key) == WORKER and box.guard.revoked_sessions() == []
    box.ring.revoke("boss")  # and with it all that it vouches for, itself among it
    assert box.guard.role_of(key) is box.guard.role_of(
        by
    ) is None and box.guard.revoked_sessions() == [SESSION]
    channel.close()
    boss.close()


# Roles ------------------------------------------------------------------------------------------

ORDER, TENSOR = Envelope(SESSION, 0, ORIGIN, 0, 1), Envelope(SESSION, 0, 1, 0, 1)
TENSOR_CHUNK = Chunk("edge", 1, 7, "float32", [2, 3], [0, 1], 24, 0, checksum(bytes(24)))
CHUNK = Chunk("edge", 1, 1, "<f4", [1], 4, 0, 0)


@pytest.mark.parametrize(
    ("role", "envelope", "message", "allowed"),
    [
        (COORDINATOR, ORDER, Measure(1), True),
        (COORDINATOR, ORDER, Hello(1, "0", 1, "3"), True),
        (COORDINATOR, TENSOR, CHUNK, False),
        (WORKER, TENSOR, CHUNK, True),
        (WORKER, ORDER, CHUNK, False),
        (WORKER, ORDER, Measure(1), False),
        (WORKER, ORDER, Ping(), False),
        (CLIENT, ORDER, Hello(1, "0", 1, "3"), True),
        (CLIENT, ORDER, Measure(1), False),
    ],
)
def test_a_role_allows_its_own_messages_only(
    box: Box, tmp_path: Path, role: str, envelope: Envelope, message: Message, allowed: bool
) -> None:
    pair = Keyring(tmp_path / "someone").create_pair("someone", role)
    box.ring.add(str(pair.public), "someone")
    if allowed:
        box.guard.authorise(pair.public.key, envelope, message)
        box.ring.revoke("someone")
    with pytest.raises(NotAuthorised):
        box.guard.authorise(pair.public.key, envelope, message)


# Addresses --------------------------------------------------------------------------------------


def test_an_address_beyond_loopback_needs_a_key_or_the_users_word(
    context: Any, tmp_path: Path
) -> None:
    with pytest.raises(InsecureAddress, match="graphflow keys new"):
        TcpListener(context, "tcp://0.0.0.0:*", insecure=False)
    ring = Keyring(tmp_path)
    guard = ZapAuthenticator(context, ring.create_pair("box", WORKER), ring)
    TcpListener(context, "tcp://0.0.0.0:*", insecure=False, guard=guard).close()
    guard.close()
    assert not check_address("tcp://10.0.0.2:7001", insecure=True, listening=True).loopback


def test_a_listener_with_a_key_asks_for_ours(context: Any) -> None:
    with pytest.raises(KeyFileError, match="--key"):
        TcpChannel(context, "tcp://127.0.0.1:7001", insecure=False, key="0" * 64)


# Whole sessions ---------------------------------------------------------------------------------


class Served:
    """A worker process with a keyring of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.ring = Keyring(folder / name)
        self.public = self.ring.create_pair(name, WORKER).public
        command = [sys.executable, "-P", child.__file__, "--listen", "tcp://127.0.0.1:*"]
        command += ["--key", name, "--keys", str(self.ring.folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().partition(" listening on ")[2].split()[0]

    def end(self) -> None:
        self._process.terminate()
        assert self._process.wait(10) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list[Served]]:
    made = [Served(tmp_path, f"box{i}") for i in range(2)]
    yield made
    for each in made:
        each.end()


def test_a_session_runs_over_workers_that_trust_it_and_not_without(
    served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(tmp_path / "alice"))
    alice = Keyring()
    own = alice.create_pair("alice", COORDINATOR).public
    text = "deadline = 2.0\n[defaults]\nflops = 1e11\nbandwidth = 1e10\nlaunch = 1e-6\n"
    text += "[defaults.link]\nlatency = 1e-4\nbandwidth = 1e9\n" + "".join(
        f'[[workers]]\naddress = "{each.address}"\nkey = "{each.public.name}"\n' for each in served
    )
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(KeyFileError, match=r"keys add box0\.public"):
        gf.Session(file)
    for each in served:
        alice.add(str(each.public), each.public.name)
    with pytest.raises(RendezvousTimeout, match="do not trust each other's keys"):
        gf.Session(file)
    for each in served:
        each.ring.add(str(own), "alice")
    x = gf.placeholder("float32", (3,))
    with gf.device("/worker:0"):
        y = x * 2.0
    with gf.device("/worker:1"):
        z = y + 1.0  # a tensor goes from one to the other, who learn their keys from the session
    cluster = gf.Cluster.load(file)
    assert [worker.key for worker in gf.Cluster.from_dict(cluster.to_dict()).workers] == [
        "box0", "box1",
    ]  # fmt: skip
    with gf.Session(file) as session:
        np.testing.assert_array_equal(session.run(z, {x: np.ones(3, "f4")}), np.full(3, 3, "f4"))


# Floods and files that change --------------------------------------------------------------------


def test_refused_keys_are_told_once_and_many_of_them_hide_no_later_one(
    box: Box, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphflow.runtime.security.authenticator._LOGGED_KEYS", 3)
    asked = [guard._ZapRequest([], [], f"10.0.0.{number}", str(number), 0.0) for number in range(5)]
    with caplog.at_level(logging.WARNING, "graphflow.security"):
        for each in (*asked, *asked[-3:]):
            box.guard._log_refusal(each)
    told = [r.getMessage() for r in caplog.records if "key.refused" in r.getMessage()]
    assert len(told) == 5 and all(f"10.0.0.{n} " in line for n, line in enumerate(told))


@pytest.mark.parametrize("spoil", ["permissions", "content"])
def test_a_trusted_folder_that_goes_bad_lets_nobody_do_anything_and_ends_nothing(
    box: Box, tmp_path: Path, spoil: str
) -> None:
    pair = Keyring(tmp_path / "alice").create_pair("alice", COORDINATOR)
    box.ring.add(str(pair.public), "alice")
    box.guard.authorise(pair.public.key, ORDER, Measure(1))
    trusted = box.ring.folder / "trusted"
    if spoil == "permissions":
        trusted.chmod(0o777)
    else:
        (trusted / "odd.public").write_text("nonsense")
    with pytest.raises(NotAuthorised, match="nobody is trusted for now"):
        box.guard.authorise(pair.public.key, ORDER, Measure(1))
    trusted.chmod(0o700)
    (trusted / "odd.public").unlink(missing_ok=True)
    box.guard.authorise(pair.public.key, ORDER, Measure(1))


@pytest.fixture
def no_descriptors(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on no folder can be opened."""

    def fail(path: Path) -> Iterator[Path]:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    return lambda: monkeypatch.setattr(Path, "iterdir", fail)


def test_without_descriptors_those_count_who_were_trusted_and_are_still(
    box: Box, tmp_path: Path, no_descriptors: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_REREAD_SECONDS", 0.0)
    keys = {name: Keyring(tmp_path / name).create_pair(name, COORDINATOR).public for name in "abc"}
    for name in "abc":
        box.ring.add(str(keys[name]), name)
        box.guard.allow_session_keys(name, keys[name].key, [])
    assert box.guard.revoked_sessions() == []
    no_descriptors()
    for key in keys.values():
        box.guard.authorise(key.key, ORDER, Measure(1))
    assert box.guard.revoked_sessions() == []
    trusted = box.ring.folder / "trusted"
    box.ring.revoke("a")
    (trusted / "b.public").write_text(f"{keys['a']}\n")
    assert box.guard.revoked_sessions() == ["a", "b"]
    box.guard.authorise(keys["c"].key, ORDER, Measure(1))
    trusted.chmod(0o777)
    with pytest.raises(NotAuthorised, match="can be changed by others"):
        box.guard.authorise(keys["c"].key, ORDER, Measure(1))


def test_without_descriptors_nobody_counts_who_was_refused_before(
    box: Box, tmp_path: Path, no_descriptors: Callable[[], None]
) -> None:
    key = Keyring(tmp_path / "alice").create_pair("alice", COORDINATOR).public
    box.ring.add(str(key), "alice")
    box.guard.authorise(key.key, ORDER, Measure(1))
    (box.ring.folder / "trusted" / "odd.public").write_text("nonsense")
    with pytest.raises(NotAuthorised, match="nobody is trusted for now"):
        box.guard.authorise(key.key, ORDER, Measure(1))
    no_descriptors()
    with pytest.raises(NotAuthorised):
        box.guard.authorise(key.key, ORDER, Measure(1))


def test_a_guard_does_not_begin_without_descriptors(
    context: Any, tmp_path: Path, no_descriptors: Callable[[], None]
) -> None:
    ring = Keyring(tmp_path)
    pair = ring.create_pair("box", WORKER)
    no_descriptors()
    with pytest.raises(KeyFileError, match="Too many open files"):
        ZapAuthenticator(context, pair, ring)


def test_a_folder_that_cannot_be_read_ends_nothing(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Keyring(tmp_path / "alice").create_pair("alice", COORDINATOR).public
    box.ring.add(str(key), "alice")
    box.guard.allow_session_keys(SESSION, key.key, [])

    def fail(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail)
        patch.setattr(guard, "_REREAD_SECONDS", 0.0)
        assert box.guard.revoked_sessions() == []
        with pytest.raises(NotAuthorised, match=r"nobody is trusted for now: .*Permission denied"):
            box.guard.authorise(key.key, ORDER, Measure(1))
    box.guard.authorise(key.key, ORDER, Measure(1))


def test_a_key_file_that_is_written_over_is_read_again(context: Any, tmp_path: Path) -> None:
    """Its folder stays as it was: nothing was added to it."""
    ring, other = Keyring(tmp_path / "keys"), Keyring(tmp_path / "other")
    first = other.create_pair("alice", COORDINATOR).public
    second = Keyring(tmp_path / "new").create_pair("alice", COORDINATOR).public
    ring.add(str(first), "a mail")
    guard = ZapAuthenticator(context, ring.create_pair("box", WORKER), ring)
    assert guard.role_of(first.key) == COORDINATOR
    (ring.folder / "trusted" / "alice.public").write_text(f"{second}\n")
    wait_for(lambda: guard.role_of(first.key) is None)
    assert guard.role_of(second.key) == COORDINATOR


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
def test_what_a_worker_takes_from_another_is_what_the_guard_lets_through(
    kind: type[Message],
) -> None:
    machine = WorkerMachine(["cpu:0"])
    opening = Open(1, 0, ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], 30.0)
    machine.handle(
        MessageReceived(b"c", Envelope(SESSION, 1, ORIGIN, 0, 1, 0, "token"), opening), 0.0
    )
    data = bytes(24) if kind is Chunk else None
    message = TENSOR_CHUNK if kind is Chunk else make_message(kind)
    if kind is Tensor:
        message = Tensor(inside(7, 2, 3))
    actions = machine.handle(
        MessageReceived(b"p", Envelope(SESSION, 1, 1, 1, 1, 0, "token"), message, data), 0.0
    )
    broken = [a for a in actions if isinstance(getattr(a, "message", None), Broken)]
    effects = [a for a in actions if not isinstance(a, UpdatePeerLink)]
    if kind in guard._BETWEEN_WORKERS:
        assert not broken
    elif kind is not Hello:  # which anybody may say
        assert broken or not effects
