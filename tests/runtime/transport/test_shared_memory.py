"""Memory that processes share: it cannot be left behind, and a token cannot lead anywhere else."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from graphflow.errors import TransportError
from graphflow.runtime.transport import shared_memory as segment
from graphflow.runtime.transport.shared_memory import (
    SharedMemorySegment,
    can_attach,
    has_shared_memory,
)

pytestmark = pytest.mark.skipif(not has_shared_memory(), reason="no anonymous shared memory here")

SEALS = 0 if sys.platform != "linux" else (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
)  # fmt: skip

PEER = """
import sys
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
found = SharedMemorySegment.attach(sys.argv[1])
assert found.memory[:4].tolist() == [1, 2, 3, 4]
found.memory[4:8] = 9
print("attached", flush=True)
sys.stdin.read()
"""


def peer(token: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", PEER, token], stdin=pipe, stdout=pipe, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def token_of(fd: int, nonce: str = "0" * 64) -> str:
    kept = SharedMemorySegment.create(1)
    parts = kept.token.split(":")
    return ":".join([*parts[:4], str(fd), nonce])


def forge_memfd(seals: int, size: int = 8192, head: bytes = b"", name: str = "graphflow") -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, head, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_two_processes_see_the_same_bytes() -> None:
    mine = SharedMemorySegment.create(1 << 20)
    mine.memory[:4] = [1, 2, 3, 4]
    process = peer(mine.token)
    try:
        assert process.stdout is not None and process.stdout.readline() == "attached\n"
        assert mine.memory[4:8].tolist() == [9, 9, 9, 9]
    finally:
        process.kill()
        process.communicate()


def test_memory_is_aligned_flat_and_zero() -> None:
    mine = SharedMemorySegment.create(1000)
    assert mine.memory.shape == (1000,) and mine.memory.dtype == np.uint8
    assert mine.memory.ctypes.data % 64 == 0 and not mine.memory.any()


def test_a_reader_cannot_write() -> None:
    mine = SharedMemorySegment.create(100)
    other = SharedMemorySegment.attach(mine.token, writable=False)
    mine.memory[3] = 7
    assert other.memory[3] == 7 and not other.memory.flags.writeable


def test_views_outlive_the_segment() -> None:
    mine = SharedMemorySegment.create(64)
    view = mine.memory[:8]
    view[:] = 5
    mine.close()
    mine.close()
    assert view.tolist() == [5] * 8 and mine.memory.nbytes == 0


def test_nothing_is_left_when_both_processes_are_killed() -> None:
    held = """
import sys
from graphflow.runtime.transport.shared_memory import SharedMemorySegment
mine = SharedMemorySegment.create(64 << 20)
print(mine.token, flush=True)
sys.stdin.read()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    owner = subprocess.Popen(
        [sys.executable, "-c", held], stdin=pipe, stdout=pipe, text=True, env=env
    )
    assert owner.stdout is not None
    token = owner.stdout.readline().strip()
    SharedMemorySegment.attach(token).memory[:4] = [1, 2, 3, 4]
    process = peer(token)
    assert process.stdout is not None and process.stdout.readline() == "attached\n"
    holders = [owner.pid, process.pid]
    assert all(_segments(pid) for pid in holders)
    for each in (owner, process):
        each.kill()
        each.communicate()
    assert not any(_segments(pid) for pid in holders)
    assert not [name for name in os.listdir("/dev/shm") if "graphflow" in name]
    with pytest.raises(TransportError):
        SharedMemorySegment.attach(token)


def _segments(pid: int) -> list[str]:
    try:
        return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
                if "/memfd:graphflow" in line]  # fmt: skip
    except OSError:
        return []


def test_closing_frees_the_file_descriptors() -> None:
    SharedMemorySegment.create(10).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        mine = SharedMemorySegment.create(4096)
        SharedMemorySegment.attach(mine.token).close()
        mine.close()
    assert len(os.listdir("/proc/self/fd")) == before


# Hostile tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token",
    [
        "",
        "memfd",
        "/dev/shm/x",
        "memfd:../../etc/passwd",
        "memfd:" + "a" * 36 + ":1:1:1:" + "0" * 64,
        "x" * 100_000,
        "memfd:\0",
    ],
)
def test_a_token_that_is_none_is_refused(token: str) -> None:
    assert not can_attach(token)
    with pytest.raises(TransportError):
        SharedMemorySegment.attach(token)


def test_a_token_of_another_host_or_namespace_is_told_apart() -> None:
    parts = SharedMemorySegment.create(1).token.split(":")
    elsewhere = ["memfd", "0" * 8 + parts[1][8:], *parts[2:]]
    contained = [*parts[:2], "4026530000", *parts[3:]]
    for other in (elsewhere, contained):
        assert not can_attach(":".join(other))
        with pytest.raises(TransportError):
            SharedMemorySegment.attach(":".join(other))


def test_a_token_of_a_process_that_is_gone_is_refused() -> None:
    mine = SharedMemorySegment.create(1)
    token = mine.token
    mine.close()
    with pytest.raises(TransportError):
        SharedMemorySegment.attach(token)


def test_a_token_never_opens_another_file(tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_bytes(b"keep me" * 4096)
    fd = os.open(file, os.O_RDWR)
    with pytest.raises(TransportError, match="no shared memory of ours"):
        SharedMemorySegment.attach(token_of(fd))
    os.close(fd)
    assert file.read_bytes() == b"keep me" * 4096


def test_a_token_that_names_a_pipe_does_not_block() -> None:
    read, write = os.pipe()
    started = time.monotonic()
    for fd in (read, write):
        with pytest.raises(TransportError):
            SharedMemorySegment.attach(token_of(fd))
    assert time.monotonic() - started < 5
    os.close(read)
    os.close(write)


def test_memory_of_another_name_is_refused() -> None:
    fd = forge_memfd(SEALS, name="other")
    with pytest.raises(TransportError, match="no shared memory of ours"):
        SharedMemorySegment.attach(token_of(fd))
    os.close(fd)


def test_memory_that_could_be_cut_short_is_refused() -> None:
    fd = forge_memfd(0)
    with pytest.raises(TransportError, match="sealed"):
        SharedMemorySegment.attach(token_of(fd))
    os.close(fd)


@pytest.mark.parametrize("size", [0, 10, 4096])
def test_memory_without_room_for_a_header_is_refused(size: int) -> None:
    fd = forge_memfd(SEALS, size=size)
    with pytest.raises(TransportError):
        SharedMemorySegment.attach(token_of(fd))
    os.close(fd)


def test_the_nonce_must_stand_in_the_header() -> None:
    mine = SharedMemorySegment.create(4096)
    wrong = mine.token[:-64] + "f" * 64
    with pytest.raises(TransportError, match="token"):
        SharedMemorySegment.attach(wrong)


def test_a_size_that_differs_from_the_header_is_refused() -> None:
    nonce = b"n" * 32
    head = segment._HEADER.pack(segment._MAGIC, 1 << 30, nonce)
    fd = forge_memfd(SEALS, head=head)
    with pytest.raises(TransportError, match="begin"):
        SharedMemorySegment.attach(token_of(fd, nonce.hex()))
    os.close(fd)


# Budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 60])
def test_a_size_that_is_none_is_refused(nbytes: int) -> None:
    with pytest.raises(TransportError, match="bytes"):
        SharedMemorySegment.create(nbytes)


def test_more_than_there_is_is_refused_before_anything_is_taken() -> None:
    with pytest.raises(TransportError, match="free"):
        SharedMemorySegment.create(1 << 45)


def test_a_system_without_room_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", raise_disk_full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="No space"):
        SharedMemorySegment.create(4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_system_without_such_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    token = SharedMemorySegment.create(1).token
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not has_shared_memory() and not can_attach(token)
    with pytest.raises(TransportError, match="tcp"):
        SharedMemorySegment.create(1)
