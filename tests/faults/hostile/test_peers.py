"""Peers that should not be where they are: without keys, with the wrong ones, with what they have
recorded, with another version, or at a port that is taken."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow import _version
from graphflow.errors import (
    AddressInUse,
    KeyFileError,
    RendezvousTimeout,
    VersionMismatch,
    WorkerLost,
)
from graphflow.runtime.protocol.reliable_stream import Version
from graphflow.runtime.security.connection_guard import HANDSHAKE_SECONDS
from graphflow.runtime.security.keys import CLIENT, COORDINATOR, WORKER, KeyPair, Keyring
from graphflow.runtime.wire.messages import (
    Ack,
    Broken,
    Chunk,
    Close,
    Compute,
    Hello,
    Load,
    Measure,
    Open,
    Ping,
    Read,
)
from graphflow.runtime.worker.serving import serve
from tests.faults.hostile.strangers import Bystander, Stranger, is_closed, open_silent_connection
from tests.faults.running import Running, Script, Worker, cluster_file, record_duration, took

OWN = Version.own()
HELLO = Hello(1, OWN.version, OWN.wire, OWN.python)


class Keyed:
    """A worker with keys, and those who may or may not talk to it."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        self.worker, self.address, self.folder = worker, worker.address, folder
        self.ring = Keyring()
        self.key = self.ring.key_of("box", WORKER)
        self.file = cluster_file(folder, [self.address], 'key = "boss"', key="box")

    def stranger(self, name: str, role: str, *, trusted: bool) -> Stranger:
        """Somebody with a new key."""
        pair = Keyring(self.folder / f"of-{name}").create_pair(name, role)
        if trusted:
            self.ring.add(str(pair.public), name)
        return Stranger(self.address, pair, self.key)


@pytest.fixture
def keyed(
    workers: Callable[..., list[Worker]],
    keys: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Keyed:
    monkeypatch.setenv("GRAPHFLOW_KEYS", keys["GRAPHFLOW_KEYS"])
    return Keyed(workers(1, "--key", "box", env={**keys, "GRAPHFLOW_LOG": "text"})[0], tmp_path)


def refusals(keyed: Keyed) -> list[str]:
    """The lines of the worker's log about keys."""
    return [line for line in keyed.worker.errors if "key.refused" in line]


@pytest.mark.fault(25)
def test_no_key_and_unknown_keys_are_refused_and_told_once(keyed: Keyed, tmp_path: Path) -> None:
    other = Keyring(tmp_path / "other")
    pair = other.create_pair("eve", COORDINATOR)
    with Bystander(keyed.file), contextlib.ExitStack() as them:

        def come(own: KeyPair | None) -> Stranger:
            made = them.enter_context(Stranger(keyed.address, own, keyed.key))
            made.tell(HELLO)
            return made

        assert come(None).answer(1.0) is None
        for eve in [come(pair) for _ in range(3)]:
            with record_duration(25, "refused: an unknown key"):
                assert eve.is_dropped(2 * HANDSHAKE_SECONDS)
            assert eve.answer(0.0) is None
        for number in range(100):
            come(other.create_pair(f"e{number}", COORDINATOR))
        friend = them.enter_context(keyed.stranger("friend", COORDINATOR, trusted=True))
        assert friend.ask(HELLO, "Welcome")  # past all who wait
    lines = refusals(keyed)
    assert sum(pair.public.key[:16] in line for line in lines) == 1
    assert len(lines) <= 60  # of a hundred refusals


@pytest.mark.fault(25)
def test_a_session_whose_key_is_not_trusted_says_so(keyed: Keyed, tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "mallory")
    ring.create_pair("boss", COORDINATOR)
    ring.add(str(next(k for k in keyed.ring.read_trusted() if k.name == "box")), "box")
    file = tmp_path / "cluster.toml"
    file.write_text("deadline = 1.5\n" + file.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHFLOW_KEYS", str(ring.folder))
        with pytest.raises(RendezvousTimeout, match="trust each other's keys"):
            gf.Session(file)


@pytest.mark.fault(26)
def test_a_session_whose_key_is_revoked_is_told_so_at_its_next_message(keyed: Keyed) -> None:
    count = gf.variable(np.zeros((), "float32"), name="count")
    step = gf.assign(count, count + 1.0)
    with gf.Session(keyed.file) as session:
        session.run(step)
        keyed.ring.revoke("boss")
        started = time.monotonic()
        with pytest.raises(WorkerLost, match="a key that is not trusted any more"):
            while True:
                session.run(step)
                time.sleep(0.05)
        took(26, "a key that is revoked", time.monotonic() - started)
        assert time.monotonic() - started < 2.0


@pytest.mark.fault(26)
def test_a_session_whose_key_is_revoked_ends_though_it_says_nothing(keyed: Keyed) -> None:
    """However long its lease is, and whomever it vouches for: itself, too."""
    with keyed.stranger("friend", COORDINATOR, trusted=True) as friend:
        mine = next(each.key for each in keyed.ring.read_trusted() if each.name == "friend")
        friend.ask(HELLO, "Welcome")
        nobody = "tcp://127.0.0.1:9"
        order = Open(2, 0, [keyed.address, nobody], 80_000.0, keys=[keyed.key, mine])
        friend.ask(order, "Ready")
        keyed.ring.revoke("friend")
        told = friend.answer(2.0)
        while told is not None and not isinstance(told, Broken):
            told = friend.answer(2.0)
        assert isinstance(told, Broken) and "not trusted any more" in told.reason
        friend.tell(Ack(), origin=1)
        assert "not trusted any more" in friend.answer().text


@pytest.mark.fault(48)
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of others need Linux")
def test_a_lack_of_descriptors_ends_no_session_that_is_trusted(keyed: Keyed) -> None:
    """The list of keys, read twice a second, cannot be opened meanwhile."""
    worker = keyed.worker.pid
    with Bystander(keyed.file) as bystander:
        before = resource.prlimit(worker, resource.RLIMIT_NOFILE)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (3, before[1]))
        started, done = time.monotonic(), bystander.steps
        while "keys.unreadable" not in keyed.worker.describe_output():
            assert time.monotonic() < started + 10.0, "it opened the list"
            time.sleep(0.05)
        time.sleep(1.5)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, before)
        assert bystander.steps > done
        done = bystander.steps
        time.sleep(1.0)
        assert bystander.steps > done


@pytest.mark.fault(26, 48)
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of others need Linux")
def test_a_session_whose_key_is_revoked_ends_without_descriptors_too(keyed: Keyed) -> None:
    count = gf.variable(np.zeros((), "float32"), name="count")
    step = gf.assign(count, count + 1.0)
    with gf.Session(keyed.file) as session:
        session.run(step)
        before = resource.prlimit(keyed.worker.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(keyed.worker.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        keyed.ring.revoke("boss")
        started = time.monotonic()
        with pytest.raises(WorkerLost, match="a key that is not trusted any more"):
            while time.monotonic() < started + 5.0:
                session.run(step)
                time.sleep(0.05)
        resource.prlimit(keyed.worker.pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.fault(26)
@pytest.mark.parametrize("role", [WORKER, CLIENT])
def test_a_key_of_another_role_gives_no_orders(keyed: Keyed, role: str) -> None:
    orders = [
        Open(2, 0, [keyed.address], 30.0), Load(3, "p", 1), Compute(4, "p", {}, [], False, 5.0),
        Read(5, "count"), Measure(6), Close(7),
    ]  # fmt: skip
    with Bystander(keyed.file), keyed.stranger("pretender", role, trusted=True) as pretender:
        for order in orders:
            with record_duration(26, "refused"):
                answer = pretender.ask(order, "Failed")
            assert answer.error == "NotAuthorised" and role in answer.text
        pretender.tell(Ping())
        pretender.tell(Chunk("value", 5, "count", "float32", [], [], 4, 0), bytes(4))


@pytest.mark.fault(26)
def test_a_coordinators_key_does_not_pass_for_a_workers(keyed: Keyed) -> None:
    with Bystander(keyed.file), keyed.stranger("other", COORDINATOR, trusted=True) as other:
        other.tell(Chunk("edge", 1, 1, "float32", [], [], 4, 0), bytes(4), origin=1)
        answer = other.answer(5.0)
        assert type(answer).__name__ == "Failed" and answer.error == "NotAuthorised"  # type: ignore[union-attr]


# Replay -------------------------------------------------------------------------------------------


class Recorder:
    """Passes on what comes to an address, and keeps what the client said."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.said: list[bytes] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            worker = open_silent_connection(self._target)
            worker.settimeout(None)
            self._sockets += [client, worker]
            for ends in ((client, worker, self.said), (worker, client, [])):
                thread = threading.Thread(target=self._pass, args=ends, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, kept: list[bytes]) -> None:
        try:
            while data := source.recv(65536):
                kept.append(data)
                target.sendall(data)
        except OSError:
            return
        finally:
            for each in (source, target):
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for each in self._sockets:
            each.close()
        for thread in self._threads:
            thread.join(5.0)


@pytest.fixture
def recorder() -> Iterator[Callable[[str], Recorder]]:
    made: list[Recorder] = []

    def record(target: str) -> Recorder:
        made.append(Recorder(target))
        return made[-1]

    yield record
    for each in made:
        each.close()


def count_steps(file: Path, name: str, steps: int) -> float:
    """What a variable comes to that each step adds one to."""
    count = gf.variable(np.zeros((), "float32"), name=name)
    step = gf.assign(count, count + 1.0)
    with gf.Session(file) as session:
        for _ in range(steps):
            session.run(step)
        return float(session.get(count))


@pytest.mark.every(2)
@pytest.mark.fault(27)
@pytest.mark.parametrize("secured", [False, True], ids=["without keys", "with keys"])
def test_what_was_recorded_of_one_session_does_nothing_in_another(
    secured: bool,
    request: pytest.FixtureRequest,
    recorder: Callable[[str], Recorder],
    tmp_path: Path,
) -> None:
    if secured:
        keyed = request.getfixturevalue("keyed")
        worker, top, key, file = keyed.worker, ['key = "boss"'], "box", keyed.file
    else:
        (worker,) = request.getfixturevalue("workers")(1)
        top, key, file = [], "", cluster_file(tmp_path, [worker.address])
    tap = recorder(worker.address)
    (tmp_path / "tapped").mkdir()
    tapped = cluster_file(tmp_path / "tapped", [tap.address], *top, key=key)
    assert count_steps(tapped, "other", 5) == 5.0
    said = b"".join(tap.said)
    assert len(said) > 1000
    with Bystander(file) as bystander:
        replays = []
        for _ in range(3):
            replays.append(open_silent_connection(worker.address))
            for part in (said[:10], said[10:64], said[64:]):  # as clients do
                replays[-1].sendall(part)
                time.sleep(0.1)
        before = bystander.steps
        time.sleep(1.0)
        assert bystander.steps > before
        if secured:  # the keys of a connection are made for it alone
            assert all(is_closed(each, 2 * HANDSHAKE_SECONDS) for each in replays)
        else:
            for each in replays:
                each.settimeout(0.5)
                heard = b""
                try:
                    while data := each.recv(65536):
                        heard += data
                except TimeoutError:
                    pass
                assert b"StaleSession" in heard and b"Done" not in heard
        for each in replays:
            each.close()
    assert worker.process.poll() is None


@pytest.mark.fault(27)
def test_a_message_with_the_name_of_a_session_but_not_its_token_is_stale(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    (worker,) = workers(1)
    with (
        Bystander(cluster_file(tmp_path, [worker.address])),
        Stranger(worker.address) as owner,
        Stranger(worker.address) as thief,
    ):
        owner.open()
        thief.session = owner.session
        thief._sent = 2
        with record_duration(27, "refused"):
            fenced = thief.ask(Measure(3), "Fenced")
        assert fenced.error == "StaleSession"
        thief.tell(Close(4))
        assert owner.ask(Read(3, "nothing"), "Failed").error == "VariableError"


# Ports, versions, keys ----------------------------------------------------------------------------


@pytest.mark.fault(44)
def test_a_port_in_use_is_told_within_a_second(
    workers: Callable[..., list[Worker]], running: list[Running], tmp_path: Path
) -> None:
    (worker,) = workers(1)
    with Bystander(cluster_file(tmp_path, [worker.address])):
        started = time.monotonic()
        with pytest.raises(AddressInUse, match="choose another port"):
            serve(worker.address)
        took(44, "told", time.monotonic() - started)
        assert time.monotonic() - started < 1.0
        running.append(second := Worker(worker.address))
        assert second.wait(30.0) == 1
        (line,) = [line for line in second.errors if line]
        assert worker.address in line and "choose another port" in line


SKEWED = """
import sys
import graphflow._version as own
own.__version__ = "9.8.7"
from graphflow.cli.main import main
sys.argv = ["graphflow", "worker", "--listen", "tcp://127.0.0.1:*", "--threads", "1"]
main()
"""
REWIRED = SKEWED.replace(
    'own.__version__ = "9.8.7"',
    """
import msgpack
import graphflow.runtime.wire.frame_codec as wire
wire.WIRE_VERSION = 77
own.__version__ = "9.8.7"
packed = msgpack.packb
def later(value, **options):
    if isinstance(value, list) and len(value) == 3:
        value = [value[0], [*value[1], "a later field"], value[2]]
    return packed(value, **options)
msgpack.packb = later
""",
)


@pytest.mark.fault(45)
@pytest.mark.parametrize("text", [SKEWED, REWIRED], ids=["version", "wire"])
def test_another_version_is_refused_and_both_are_shown(
    text: str, script: Callable[..., Script], tmp_path: Path
) -> None:
    other = script(text)
    words = other.line("graphflow worker").split()
    address = next(word for word in words if word.startswith("tcp://"))
    started = time.monotonic()
    with pytest.raises(VersionMismatch) as caught:
        gf.Session(cluster_file(tmp_path, [address]))
    took(45, "refused", time.monotonic() - started)
    assert time.monotonic() - started < 10.0
    assert "9.8.7" in str(caught.value) and _version.__version__ in str(caught.value)
    assert other.process.poll() is None


def _garbage(path: Path) -> None:
    path.write_text("nonsense\n")


def _empty_file(path: Path) -> None:
    path.write_text("")


def _world_readable(path: Path) -> None:
    path.chmod(0o644)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def _remove_file(path: Path) -> None:
    path.unlink()


def _make_public(path: Path) -> None:
    path.write_bytes(path.with_suffix(".public").read_bytes())


def _make_unreadable(path: Path) -> None:
    path.chmod(0)


SPOILT = [
    _garbage,
    _empty_file,
    _world_readable,
    _folder,
    _link,
    _remove_file,
    _make_public,
    _make_unreadable,
]


@pytest.mark.fault(49)
@pytest.mark.parametrize("spoil", SPOILT)
def test_nothing_is_served_with_a_key_file_that_is_not_as_it_should_be(
    spoil: Callable[[Path], None], keys: Mapping[str, str]
) -> None:
    if spoil is _make_unreadable and os.geteuid() == 0:
        pytest.skip("nothing is unreadable for root")
    path = Path(keys["GRAPHFLOW_KEYS"]) / "box.secret"
    spoil(path)
    with pytest.raises(KeyFileError, match=str(path)):
        serve("tcp://127.0.0.1:*", key="box", keys=path.parent)


@pytest.mark.fault(49)
@pytest.mark.parametrize("spoil", [_garbage, _world_readable])
def test_a_worker_does_not_start_with_a_key_file_that_is_not_as_it_should_be(
    spoil: Callable[[Path], None], keys: Mapping[str, str], running: list[Running]
) -> None:
    path = Path(keys["GRAPHFLOW_KEYS"]) / "box.secret"
    spoil(path)
    with record_duration(49, "ended, from its start"):
        running.append(worker := Worker("tcp://127.0.0.1:*", "--key", "box", env=keys))
        assert worker.wait(30.0) == 2
    (line,) = [line for line in worker.errors if line]
    assert str(path) in line and "Traceback" not in worker.describe_output()


@pytest.mark.fault(49)
def test_a_trusted_folder_that_others_can_write_to_stops_a_worker_and_a_session(
    keys: Mapping[str, str], running: list[Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", keys["GRAPHFLOW_KEYS"])
    trusted = Path(keys["GRAPHFLOW_KEYS"]) / "trusted"
    trusted.chmod(0o777)
    running.append(worker := Worker("tcp://127.0.0.1:*", "--key", "box", env=keys))
    assert worker.wait(30.0) == 1 and "can be changed by others" in worker.describe_output()
    with pytest.raises(KeyFileError, match="can be changed by others"):
        Keyring().key_of("box", WORKER)


@pytest.mark.fault(49)
def test_a_secret_of_another_user_is_refused(keys: Mapping[str, str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file another user's")
    path = Path(keys["GRAPHFLOW_KEYS"]) / "box.secret"
    os.chown(path, 12345, 12345)
    with pytest.raises(KeyFileError, match="belongs to another user"):
        serve("tcp://127.0.0.1:*", key="box", keys=path.parent)


@pytest.mark.slow  # several workers, one after the other
@pytest.mark.fault(49)
def test_beyond_loopback_a_worker_without_a_key_does_not_start(
    running: list[Running], tmp_path: Path
) -> None:
    empty = {"GRAPHFLOW_KEYS": str(tmp_path / "none")}
    running.append(worker := Worker("tcp://0.0.0.0:*", env=empty))
    assert worker.wait(30.0) == 2, "the address is at fault"
    (line,) = [line for line in worker.errors if line]
    assert "graphflow keys new" in line
