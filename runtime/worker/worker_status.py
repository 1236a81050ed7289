"""Status reports: how a worker answers `graphflow status`, and how it is asked.

    graphflow status ─Status→ worker ─StatusReport→ a table

A worker answers outside of any session, from numbers that it keeps anyway. Session names are
secrets, so a report shows their first digits only. Names of nodes and lines of models are shown to
coordinators' keys, and where no keys are in use; a client's key sees numbers, devices and
addresses.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import (
    GraphflowError,
    ProtocolError,
    RendezvousTimeout,
    TransportError,
    VersionMismatch,
)
from graphflow.runtime.polling.wakeup import EpollWaiter
from graphflow.runtime.protocol.reliable_stream import Version
from graphflow.runtime.protocol.remote_errors import error_from_message
from graphflow.runtime.security.authenticator import ZapAuthenticator
from graphflow.runtime.security.keys import CLIENT, KeyPair, Keyring
from graphflow.runtime.security.keys import COORDINATOR as COORDINATOR_KEY
from graphflow.runtime.security.receive_accounting import UNFRAMED_CAP
from graphflow.runtime.telemetry.metrics import Meters, peak_resident_bytes, resident_bytes
from graphflow.runtime.transport import transport_of
from graphflow.runtime.transport.interface import HANDSHAKE_ENDED, Channel
from graphflow.runtime.transport.zmq_setup import open_context
from graphflow.runtime.wire.frame_codec import decode_frames, encode
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    Envelope,
    Failed,
    Hello,
    Message,
    Status,
    StatusReport,
    Welcome,
)

if TYPE_CHECKING:
    from graphflow.runtime.worker.hosted_session import HostedSession

MAX_WAITS = 20
"""Waits of a session that a report lists; it only counts further ones."""
_MAX_TEXT = 200  # characters of a wait's description
_SESSION_DIGITS = 8  # digits of a session's name
_LOOK_SECONDS = 0.05  # between two checks of the receiving side
_BATCH = (
    64  # messages received from one worker before the others, and the deadline, have their turn
)

Report = Mapping[str, Any]

# The types of a report: [type] is a list, {str: type} a mapping from names. A report may come from
# any program of any version, so it is checked before it is shown.
_LINK = {"peer": str, "sent": int, "received": int}
_SESSION_FORM = {
    "session": str, "worker": int, "epoch": int, "age": float, "programs": int, "step": int,
    "committed": int, "steps_per_second": float, "last_step_seconds": float, "doing": str,
    "doing_seconds": float, "parked": bool, "queued": int, "arenas": {str: int},
    "variables": {str: int}, "waiting": int, "waits": [(str, float)],
}  # fmt: skip
_REPORT_FORM = {
    "version": str, "wire": int, "python": str, "host": str, "pid": int, "devices": [str],
    "uptime": float, "resident": int, "resident_peak": int, "refused": int, "links": [_LINK],
    "sessions": [_SESSION_FORM],
}  # fmt: skip


# The worker's side --------------------------------------------------------------------------------


def make_report(
    *,
    started: float,
    devices: Sequence[str],
    sessions: Sequence[HostedSession],
    parked: Sequence[str],
    meters: Meters,
    names: bool,
) -> dict[str, Any]:
    """Return a worker's status as plain data: bytes, and seconds of its own clock.

    Args:
        started: when the worker started, on the monotonic clock.
        parked: sessions whose coordinator is silent.
        names: whether the asker may see names of nodes and lines of models.
    """
    own = Version.own()
    return {
        "version": own.version,
        "wire": own.wire,
        "python": platform.python_version(),
        "host": socket.gethostname()[:_MAX_TEXT],
        "pid": os.getpid(),
        "devices": list(devices),
        "uptime": time.monotonic() - started,
        "resident": resident_bytes(),
        "resident_peak": peak_resident_bytes(),
        "refused": int(
            meters.value("graphflow_refused_messages_total")
            + meters.value("graphflow_forbidden_messages_total")
        ),
        "links": _links(meters),
        "sessions": [_session(each, each.activity.session in parked, names) for each in sessions],
    }


def _session(hosted: HostedSession, is_parked: bool, names: bool) -> dict[str, Any]:
    usage = hosted.usage()
    waits = sorted(usage.waits.items(), key=lambda each: -each[1])
    activity = hosted.activity.report()
    return {
        **activity,
        "session": activity["session"][:_SESSION_DIGITS],
        "parked": is_parked,
        "queued": hosted.queued_jobs,
        "arenas": dict(usage.arenas),
        "variables": dict(usage.variables),
        "waiting": len(waits),
        "waits": [
            [(what if names else _without_names(what))[:_MAX_TEXT], seconds]
            for what, seconds in waits[:MAX_WAITS]
        ],
    }


def _without_names(what: str) -> str:
    """Return a wait's description without node names and lines: "edge 3 from /worker:1/cpu:0"."""
    return what.partition(" (")[0]


def _links(meters: Meters) -> list[dict[str, Any]]:
    """Return the bytes to and from each other worker, over all sessions so far."""
    found: dict[str, dict[str, int]] = {}
    for direction in ("sent", "received"):
        for (peer, _), count in meters.series(f"graphflow_{direction}_bytes_total").items():
            link = found.setdefault(peer, {"sent": 0, "received": 0})
            link[direction] += int(count)
    return [{"peer": peer, **link} for peer, link in sorted(found.items())]


def find_misfit(report: Any) -> str | None:
    """Return the part of a received report that has a wrong type; None if all is valid."""
    return _find_misfit(report, _REPORT_FORM, "report")


def _find_misfit(value: Any, form: Any, where: str) -> str | None:
    """Return the part of a value that does not have a form; None if all of it has."""
    match form:
        case dict() if str in form:
            if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
                return where
            parts = [(each, form[str], f"{where}.{name}") for name, each in value.items()]
        case dict():
            if not isinstance(value, dict) or form.keys() != value.keys():
                return where
            parts = [(value[name], each, f"{where}.{name}") for name, each in form.items()]
        case list():
            if not isinstance(value, list):
                return where
            parts = [(each, form[0], f"{where}[]") for each in value]
        case tuple():
            if not isinstance(value, list) or len(value) != len(form):
                return where
            parts = [(each, kind, f"{where}[]") for each, kind in zip(value, form, strict=True)]
        case _:
            number = type(value) in (int, float) and abs(value) < 2**63  # no infinity, no NaN
            fits = number if form is float else type(value) is form and (form is not int or number)
            return None if fits else where
    found = (_find_misfit(*part) for part in parts)
    return next((wrong for wrong in found if wrong is not None), None)


# The side of who asks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerAddress:
    """The address where a worker listens, and its public key; "" if it has none."""

    address: str
    key: str = ""


def choose_key_pair(ring: Keyring, name: str | None) -> KeyPair:
    """Return the key to ask with: the named one, else the only client key, else the coordinator's.

    Raises:
        KeyFileError: there is no such key, or more than one.
    """
    roles = {key.name: key.role for key in ring.pairs()}
    if name is not None and name in roles:
        return ring.own_pair(name, roles[name] if roles[name] == COORDINATOR_KEY else CLIENT)
    role = CLIENT if CLIENT in roles.values() or COORDINATOR_KEY not in roles.values() else None
    return ring.own_pair(name, role or COORDINATOR_KEY)


def request_reports(
    workers: Sequence[WorkerAddress],
    *,
    seconds: float,
    insecure: bool = False,
    pair: KeyPair | None = None,
    ring: Keyring | None = None,
) -> list[Report | GraphflowError]:
    """Ask all workers at once; return their reports in order.

    The error stands in for the report of a worker that did not answer.

    Args:
        seconds: for all of them together.
        insecure: ask addresses beyond loopback without a key.
        pair: this process's own key, if the workers have keys.

    Raises:
        TransportError: an address is malformed, or insecure.
    """
    context = open_context()
    guard = None if pair is None else ZapAuthenticator(context, pair, ring or Keyring())
    asked: list[_StatusRequest] = []
    try:
        for worker in workers:
            asked.append(_StatusRequest(context, worker, insecure=insecure, guard=guard))
        until = time.monotonic() + seconds
        while waiting := [each for each in asked if each.outcome is None]:
            left = until - time.monotonic()
            if left <= 0:
                break
            _wait_for_any([each.channel for each in waiting], min(_LOOK_SECONDS, left))
            for each in waiting:
                each.receive()
        return [each.outcome or each.silence_error(seconds) for each in asked]
    finally:
        for each in asked:
            each.channel.close()
        if guard is not None:
            guard.close()
        context.destroy(linger=0)


def _wait_for_any(channels: Sequence[Channel], seconds: float) -> None:
    """Wait until one of `channels` may have a message, at most for some seconds."""
    if any(channel.has_message() for channel in channels):
        return
    with closing(EpollWaiter()) as waiter:
        for tag, channel in enumerate(channels):
            waiter.add(channel.fileno(), tag)
        waiter.wait(seconds)


class _StatusRequest:
    """A request to one worker, and its outcome."""

    def __init__(
        self, context: Any, worker: WorkerAddress, *, insecure: bool, guard: ZapAuthenticator | None
    ) -> None:
        self._address = worker.address
        self._keyed = bool(worker.key)
        self._handshake_done = False  # a connection was up at least once
        self.outcome: Report | GraphflowError | None = None
        transport = transport_of(worker.address)
        parts = transport.check_address(
            worker.address, insecure=insecure or bool(worker.key), listening=False
        )
        self.channel = transport.connect(
            context, worker.address, insecure=insecure, watch=True, guard=guard, key=worker.key
        )
        try:
            transport.check_host(parts)
        except TransportError as error:
            self.outcome = error
            return
        own = Version.own()
        for message in (Hello(1, own.version, own.wire, own.python), Status(2)):
            self.channel.send([encode(Envelope("", 0, COORDINATOR, 0, message.request), message)])

    def receive(self) -> None:
        """Receive messages up to the one that decides the outcome."""
        self._note_handshake()
        if self.channel.count_unframed(time.monotonic()) > UNFRAMED_CAP:
            self.outcome = ProtocolError(
                f"{self._address} sends a message without an end: it is no graphflow worker"
            )
            self.channel.close()
        for _ in range(_BATCH):
            frames = self.channel.receive() if self.outcome is None else None
            if frames is None:
                return
            try:
                _, message, _ = decode_frames(frames)
            except ProtocolError as error:
                self.outcome = ProtocolError(f"{self._address} sent an invalid message: {error}")
                return
            self.outcome = self._outcome_of(message) or self.outcome

    def _note_handshake(self) -> None:
        self._handshake_done |= any(self.channel.read_link_changes())

    def _outcome_of(self, message: Message) -> Report | GraphflowError | None:
        if isinstance(message, StatusReport):
            return self._check_report(message.report)
        if isinstance(message, Failed):
            return error_from_message(message, f"worker at {self._address}")
        if isinstance(message, Welcome) and Version.from_message(message) != Version.own():
            return VersionMismatch(
                f"{self._address} runs {Version.from_message(message)}, this is {Version.own()}; "
                "ask with the version that it runs"
            )
        return None

    def _check_report(self, report: Any) -> Report | GraphflowError:
        wrong = find_misfit(report)
        if wrong is not None:
            return ProtocolError(
                f"{self._address} sent an invalid report: {wrong} has a wrong type"
            )
        return dict(report)

    def silence_error(self, seconds: float) -> GraphflowError:
        """Return the error of a worker that did not answer, with the likely reason."""
        self._note_handshake()
        if self.channel.refused and not self._keyed:
            return RendezvousTimeout(
                f"{self._address} {HANDSHAKE_ENDED}; look there, or give its --worker-key"
            )
        if self.channel.refused:
            return RendezvousTimeout(
                f"somebody listens at {self._address}, but there are keys that are not trusted: "
                "there, run `graphflow keys add` with the .public file of this machine's key; here,"
                " check the worker's key; or it shows none, has too many connections, or hangs"
            )
        if self.channel.silent:
            return RendezvousTimeout(
                f"somebody listens at {self._address}, but said nothing within {seconds:g} s: a "
                "worker that is frozen or overloaded, or no graphflow worker; look there"
            )
        if self._handshake_done:
            return RendezvousTimeout(
                f"{self._address} took the connection, but did not answer within {seconds:g} s: an "
                "op holds its Python interpreter, or it has too much to do; give it a longer "
                "--timeout, or look there"
            )
        return RendezvousTimeout(
            f"nobody answered at {self._address} within {seconds:g} s; "
            "is `graphflow worker --listen ADDRESS` running there?"
        )
