"""Authentication of connections: this process's own key, who may connect, and as what.

CURVE encrypts and proves that a peer holds a key. By itself it admits everybody who knows the
server's public key. So ZeroMQ asks this process at each handshake, by ZAP (RFC 27). A worker trusts
the keys of its keyring and, while a session is open, the keys of the other workers that the
session's coordinator named.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

import zmq

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import KeyFileError, NotAuthorised
from graphflow.runtime.polling.wakeup import WakeupFd
from graphflow.runtime.security.key_files import lacks_descriptors
from graphflow.runtime.security.keys import (
    CLIENT,
    COORDINATOR,
    WORKER,
    KeyPair,
    Keyring,
    PublicKey,
)
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.wire.messages import COORDINATOR as ORIGIN
from graphflow.runtime.wire.messages import (
    Ack,
    Chunk,
    Envelope,
    Hello,
    Message,
    Resend,
    Share,
    Status,
    Tensor,
)

_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"graphflow"
_GRACE_SECONDS = 5.0  # an unknown key is kept waiting: a peer's session may be about to open
_MAX_WAITING = 100  # connections at a time; beyond, the oldest one is refused
_POLL_MS = 50
_REREAD_SECONDS = (
    0.5  # seconds until files are read again: one that is written over leaves its folder as is
)
_LOGGED_KEYS = 1000  # refused keys, each told once

UNTRUSTED = "a key that is not trusted any more"

_BETWEEN_WORKERS = (Chunk, Tensor, Share, Ack, Resend)
"""What a worker may send to the other workers of a session."""

_log = Log("graphflow.security")


@dataclass(frozen=True)
class _ZapRequest:
    """A question of ZAP: may the holder of a key connect?

    `key` is in hexadecimal digits; "" for none.
    """

    route: Sequence[bytes]
    head: Sequence[bytes]  # version and number of the request
    address: str
    key: str
    arrived_at: float

    @staticmethod
    def parse(frames: Sequence[bytes], now: float) -> _ZapRequest:
        """Return the request in the frames of a ZAP message."""
        at = list(frames).index(b"") + 1
        body = frames[at:]
        curve = len(body) == 7 and body[5] == b"CURVE"
        address = body[3].decode(errors="replace") if len(body) > 3 else "?"
        return _ZapRequest(frames[:at], body[:2], address, body[6].hex() if curve else "", now)

    def reply_frames(self, known: bool) -> list[bytes]:
        """Return the reply: status, text, the user (its key), and no metadata."""
        said = (b"200", b"OK", self.key.encode(), b"")
        refusal = (b"400", b"this key is not trusted", b"", b"")
        return [*self.route, *self.head, *(said if known else refusal)]


class ZapAuthenticator:
    """Keys for the sockets of one ZeroMQ context. Thread-safe.

    Args:
        pair: This process's own key.
        ring: The keys that it trusts.

    Raises:
        KeyFileError: The folder of keys cannot be used.
    """

    def __init__(self, context: zmq.Context[Any], pair: KeyPair, ring: Keyring) -> None:
        self.pair = pair
        self._ring = ring
        self._lock = threading.Lock()
        self._version, self._read = -1, 0.0
        self._roles: dict[str, str] = {}
        self._session_keys: dict[
            str, tuple[str, frozenset[str]]
        ] = {}  # by session: of its coordinator, and of its workers
        self._logged: OrderedDict[str, None] = OrderedDict()
        self._current_roles()  # raises if the folder cannot be used
        self._context = context
        self._end: WakeupFd | None = None
        self._thread: threading.Thread | None = None

    # Sockets --------------------------------------------------------------------------------------

    def secure_listener(self, sock: zmq.Socket[bytes]) -> None:
        """Admit only holders of trusted keys to a socket. Call before it is bound."""
        if self._thread is None:
            self._start()
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)
        sock.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

    def secure_channel(self, sock: zmq.Socket[bytes], key: str) -> None:
        """Let a socket talk only to the holder of `key`. Call before it is connected."""
        sock.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key))
        sock.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self.pair.public.key))
        sock.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)

    # Roles ----------------------------------------------------------------------------------------

    def allow_session_keys(self, session: str, by: str, keys: Sequence[str]) -> None:
        """Admit the workers of a session until `forget_session`.

        They are refused earlier if the key `by` of the session's coordinator is revoked.
        """
        with self._lock:
            self._session_keys[session] = by, frozenset(keys) - {""}

    def forget_session(self, session: str) -> None:
        """Stop admitting the workers of a session that is closed."""
        with self._lock:
            self._session_keys.pop(session, None)

    def role_of(self, key: str) -> str | None:
        """Return the role of `key` by now; None for one that is not trusted or was revoked."""
        roles = self._current_roles()
        if key in roles:
            return roles[key]
        with self._lock:
            session_keys = [
                keys for by, keys in self._session_keys.values() if roles.get(by) == COORDINATOR
            ]
        return WORKER if any(key in keys for keys in session_keys) else None

    def revoked_sessions(self) -> list[str]:
        """Return the sessions whose coordinator's key was revoked.

        Return none while the trusted keys cannot be read.
        """
        try:
            roles = self._current_roles()
        except KeyFileError:
            return []
        with self._lock:
            return [
                name for name, (by, _) in self._session_keys.items() if roles.get(by) != COORDINATOR
            ]

    def authorise(self, key: str, envelope: Envelope, message: Message) -> str:
        """Check that the holder of `key` may send `message`; return the role of the key.

        Raises:
            NotAuthorised: The role does not allow the message, the key was revoked, or the trusted
                keys cannot be read for another reason than a lack of file descriptors.
        """
        try:
            role = self.role_of(key)
        except KeyFileError as error:
            raise NotAuthorised(f"nobody is trusted for now: {error}") from error
        between_workers = isinstance(message, _BETWEEN_WORKERS) and envelope.origin != ORIGIN
        allowed = {
            COORDINATOR: not between_workers,
            WORKER: between_workers,
            CLIENT: isinstance(message, Hello | Status),
            None: False,
        }[role]
        if role is None or not allowed:
            who = f"a {role}'s key" if role else UNTRUSTED
            raise NotAuthorised(f"{who} does not allow {type(message).__name__}")
        return role

    def _current_roles(self) -> dict[str, str]:
        """Return the role of each trusted key, read again if the files have changed."""
        version, now = self._ring.version, monotonic()
        if version != self._version or now > self._read + _REREAD_SECONDS:
            self._roles = {key.key: key.role for key in self._read_trusted_keys()}
            self._version, self._read = version, now
        return self._roles

    def _read_trusted_keys(self) -> list[PublicKey]:
        """Read the trusted keys.

        If only a lack of file descriptors prevents that, the keys read before count while their
        files are untouched. The lack is soon over, and must not end sessions.
        """
        try:
            return self._ring.read_trusted()
        except KeyFileError as error:
            if self._version < 0 or not lacks_descriptors(error):
                raise
            _log.tell("keys.unreadable", reason=str(error))
            return self._ring.unchanged_keys()

    # ZAP requests ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Answer the requests of the context's sockets on a thread."""
        answers: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        answers.setsockopt(zmq.LINGER, 0)
        answers.bind(_ENDPOINT)
        self._end = end = WakeupFd()
        self._thread = threading.Thread(
            target=self._serve, args=(answers, end), name="guard", daemon=True
        )
        self._thread.start()

    def _serve(self, answers: zmq.Socket[bytes], end: WakeupFd) -> None:
        """Answer requests until `end` is woken.

        A request with an unknown key is kept for some seconds, because the session that brings the
        key may be about to open.
        """
        poller = zmq.Poller()
        poller.register(answers, zmq.POLLIN)
        poller.register(end.fileno(), zmq.POLLIN)
        waiting: deque[_ZapRequest] = deque()
        try:
            while True:
                ready = dict(poller.poll(_POLL_MS if waiting else None))
                if end.fileno() in ready:
                    return
                if answers in ready:
                    waiting.append(_ZapRequest.parse(answers.recv_multipart(), monotonic()))
                for _ in range(len(waiting)):
                    request = waiting.popleft()
                    known = self._is_known(request.key)
                    late = (
                        monotonic() > request.arrived_at + _GRACE_SECONDS
                        or len(waiting) >= _MAX_WAITING
                    )
                    if known or late or not request.key:
                        answers.send_multipart(request.reply_frames(known))
                        if not known:
                            self._log_refusal(request)
                    else:
                        waiting.append(request)
        finally:
            answers.close(linger=0)

    def _is_known(self, key: str) -> bool:
        """Return True if `key` is trusted. A keyring that cannot be read is logged."""
        try:
            return bool(key) and self.role_of(key) is not None
        except KeyFileError as error:
            _log.tell("keys.unreadable", reason=str(error))
            return False

    def _log_refusal(self, request: _ZapRequest) -> None:
        """Log a refused key once, as long as few others come."""
        key = request.key
        if key not in self._logged:
            self._logged[key] = None
            if len(self._logged) > _LOGGED_KEYS:
                self._logged.popitem(last=False)
            _log.tell("key.refused", address=request.address, key=key or "none")

    def close(self) -> None:
        """End the thread. Nobody can connect from now on. Idempotent."""
        end, self._end = self._end, None
        if end is not None and self._thread is not None:
            end.wake()
            self._thread.join()
            end.close()
