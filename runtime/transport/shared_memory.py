"""Memory that two processes of one host share, and that outlives neither.

A segment is an anonymous file (`memfd_create`). It has no name in /dev/shm, so the kernel frees it
when the last process that holds it ends, however that ends. A peer finds it by a token, through
/proc/<pid>/fd. A token comes from the wire and is taken as hostile. What it points to is examined
without being opened. It must be a segment whose size is sealed, because reading beyond the end of a
truncated file kills the reader. It must begin with the token's own random bytes before it is
mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import struct
import sys
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from graphflow.base.environment import is_on
from graphflow.errors import TransportError

Array = np.ndarray[Any, np.dtype[Any]]

_NAME = "graphflow"
_HEADER = struct.Struct("<16sQ32s")  # magic, bytes of memory, nonce
_HEADER_BYTES = 4096  # one page, so that the memory behind it is aligned
_MAGIC = b"graphflow-shm-1\0"
_LARGEST = 1 << 46  # bytes; a larger size is a mistake
_FREE_SHARE = 0.9  # of the free memory, for one segment at most
_TOKEN = re.compile(r"memfd:([0-9a-f-]{36}):(\d{1,20}):(\d{1,10}):(\d{1,10}):([0-9a-f]{64})")


class SharedMemorySegment:
    """Shared memory that one process creates and others of the same user and host attach.

    Attributes:
        memory: A flat uint8 array, aligned to 64 bytes and zero at first. Views of it stay valid
            after `close`; the memory is freed with the last of them.
        token: By which a peer attaches it.
    """

    def __init__(self, fd: int, nbytes: int, nonce: bytes, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            mapped = mmap.mmap(fd, _HEADER_BYTES + nbytes, mmap.MAP_SHARED, access)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(
                f"{nbytes} bytes of shared memory cannot be mapped: {error}"
            ) from error
        self.memory: Array = np.frombuffer(mapped, np.uint8)[_HEADER_BYTES:]
        self.token = f"memfd:{_boot_id()}:{_pid_namespace()}:{os.getpid()}:{fd}:{nonce.hex()}"
        self._fd = fd
        self._close = weakref.finalize(self, _close, fd)

    @staticmethod
    def create(nbytes: int, *, empty: bool = False) -> SharedMemorySegment:
        """Create a segment of `nbytes` bytes.

        Args:
            empty: Reserve no memory yet. Call `reserve` before a part is touched.

        Raises:
            TransportError: This system has no such memory, or not enough of it.
        """
        if not 0 < nbytes <= _LARGEST:
            raise TransportError(f"a segment must have 1 to {_LARGEST} bytes, not {nbytes}")
        if not has_shared_memory():
            raise TransportError("this system has no anonymous shared memory; tcp serves instead")
        if not empty:
            _check_available(nbytes)
        try:
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise TransportError(f"shared memory cannot be made: {error}") from error
        try:
            nonce = secrets.token_bytes(32)
            os.ftruncate(fd, _HEADER_BYTES + nbytes)
            os.posix_fallocate(fd, 0, _HEADER_BYTES + (0 if empty else nbytes))
            os.pwrite(fd, _HEADER.pack(_MAGIC, nbytes, nonce), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _size_seals())
            return SharedMemorySegment(fd, nbytes, nonce, writable=True)
        except OSError as error:
            os.close(fd)
            raise TransportError(f"no {nbytes} bytes of shared memory: {error}") from error
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def attach(token: str, *, writable: bool = True) -> SharedMemorySegment:
        """Map the segment of another process, or of this one, that `token` names.

        Raises:
            TransportError: It names none, or one that this process cannot reach.
        """
        if not can_attach(token):
            raise TransportError("the token is not of a process that shares memory with this one")
        match = _TOKEN.fullmatch(token)
        assert match is not None
        pid, number, nonce = int(match[3]), int(match[4]), bytes.fromhex(match[5])
        fd = _open_segment(f"/proc/{pid}/fd/{number}", writable)
        try:
            return SharedMemorySegment(fd, _verify_segment(fd, nonce), nonce, writable=writable)
        except BaseException:
            os.close(fd)
            raise

    def reserve(self, start: int, nbytes: int) -> None:
        """Reserve the memory of a part, in the process that created the segment.

        Touching memory that is not reserved would kill the process if there is none.

        Raises:
            TransportError: There is not enough memory.
        """
        _check_available(nbytes)
        try:
            os.posix_fallocate(self._fd, _HEADER_BYTES + start, nbytes)
        except OSError as error:
            raise TransportError(f"no {nbytes} bytes of shared memory: {error}") from error

    def close(self) -> None:
        """Close the segment; peers that have attached it keep it. Idempotent."""
        if self._close.alive:
            self._close()
            self.memory = self.memory[:0].copy()


def _check_available(nbytes: int) -> None:
    """Check that a segment may take `nbytes` of the free memory."""
    left = available_memory()
    if nbytes > left * _FREE_SHARE:
        raise TransportError(
            f"{nbytes} bytes of shared memory are too many: {left} bytes of memory are free"
        )


def has_shared_memory() -> bool:
    """Return True if processes of this system can share memory in this way.

    GRAPHFLOW_SHARED_MEMORY=off forbids it.
    """
    if not is_on("GRAPHFLOW_SHARED_MEMORY"):
        return False
    return sys.platform == "linux" and hasattr(os, "memfd_create") and bool(_pid_namespace())


def can_attach(token: str) -> bool:
    """Return True if `token` is of a process that may share memory with this one.

    That is a process since the same boot of the same host, in the same PID namespace. `attach` may
    still fail, as for another user's process.
    """
    match = _TOKEN.fullmatch(token)
    return bool(
        match and has_shared_memory() and (match[1], match[2]) == (_boot_id(), _pid_namespace())
    )  # fmt: skip


def available_memory() -> int:
    """Return the bytes of free memory of this host, or of the container around this process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        (line,) = (s for s in _read("/proc/meminfo").splitlines() if s.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
        with contextlib.suppress(OSError, ValueError):
            folder = "/sys/fs/cgroup"
            most, used = _read(f"{folder}/memory.max"), _read(f"{folder}/memory.current")
            free = min(free, max(0, int(most) - int(used)))
        return free
    return _LARGEST


# What a token points to ------------------------------------------------------------------------


def _open_segment(path: str, writable: bool) -> int:
    """Open the file at `path` once it is known to be a segment of ours.

    Opening anything else could block (a pipe) or have effects (a device). So the file is examined
    by a handle that opens nothing (O_PATH).
    """
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"shared memory cannot be attached: {error.strerror}") from error
    try:
        mine = f"/proc/self/fd/{handle}"
        found, status = os.readlink(mine), os.fstat(handle)
        if not found.startswith(f"/memfd:{_NAME}") or status.st_nlink:
            raise TransportError("the token names what is no shared memory of ours")
        flags = os.O_RDWR if writable else os.O_RDONLY
        return os.open(mine, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransportError(f"shared memory cannot be attached: {error.strerror}") from error
    finally:
        os.close(handle)


def _verify_segment(fd: int, nonce: bytes) -> int:
    """Return the size of an open segment's memory, after verifying all that it claims."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
        head = os.pread(fd, _HEADER.size, 0)
    except OSError as error:
        raise TransportError(f"the token names what is no shared memory: {error}") from error
    if seals & _size_seals() != _size_seals():
        raise TransportError("the size of the shared memory is not sealed: it could be cut short")
    if len(head) != _HEADER.size or not _HEADER_BYTES < size <= _HEADER_BYTES + _LARGEST:
        raise TransportError(f"shared memory of {size} bytes is none of ours")
    magic, nbytes, found = _HEADER.unpack(head)
    if magic != _MAGIC or _HEADER_BYTES + nbytes != size:
        raise TransportError("the shared memory does not begin as ours does")
    if not secrets.compare_digest(found, nonce):
        raise TransportError("the token is not of this shared memory, but of one before it")
    return int(nbytes)


def _size_seals() -> int:
    """Return the seals that keep a file from being resized or unsealed."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@cache
def _boot_id() -> str:
    """Return the identity of this boot of the host."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


@cache
def _pid_namespace() -> str:
    """Return the inode of the PID namespace; "" if /proc shows another namespace."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def _read(path: str) -> str:
    return Path(path).read_text(encoding="ascii")


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
