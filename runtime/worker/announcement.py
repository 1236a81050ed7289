"""The line in which a worker tells a launcher where it listens: `graphflow worker --announce`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from graphflow import _version
from graphflow.base.atomic_write import write_atomically
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError

STDOUT = "-"


@dataclass(frozen=True)
class Announcement:
    """The address, key, devices and process of a worker that listens.

    Attributes:
        key: its public key, 64 hexadecimal digits; None for a worker without a key.
        devices: their names, such as "cpu:0".
        host: the name of its host, for launchers of workers that listen at every address.
        pid: the id of its process on its host.
    """

    address: str
    key: str | None
    devices: tuple[str, ...]
    host: str
    pid: int

    @staticmethod
    def of_this_process(address: str, key: str | None, devices: Sequence[str]) -> Announcement:
        """Return the announcement of a worker in this process."""
        return Announcement(address, key, tuple(devices), socket.gethostname(), os.getpid())

    def line(self) -> str:
        """Return one line of JSON."""
        told = {"address": self.address, "key": self.key, "devices": list(self.devices)}
        process = {"host": self.host, "pid": self.pid, "version": _version.__version__}
        return json.dumps({**told, **process})

    @staticmethod
    def parse(line: str, where: str) -> Announcement:
        """Return the announcement in a line.

        Args:
            where: the place that the line is from, for errors.

        Raises:
            ArgumentError: it is no announcement.
        """
        try:
            told = json.loads(line)
            key = None if told["key"] is None else str(told["key"])
            devices = tuple(map(str, told["devices"]))
            host, pid = str(told["host"]), int(told["pid"])
            return Announcement(str(told["address"]), key, devices, host, pid)
        except (ValueError, KeyError, TypeError):
            raise ArgumentError(
                f"{where} is no announcement of a worker: {line[:200]!r}; `graphflow worker "
                "--announce FILE` writes one"
            ) from None


@contextmanager
def keep_announced(place: str | None, output: TextIO, announcement: Announcement) -> Iterator[None]:
    """Write an announcement, and remove its file at the end unless another worker replaced it.

    Args:
        place: a file, which appears complete or not at all; "-" for `output`; None for nothing.

    Raises:
        ArgumentError: the file cannot be written.
    """
    line = announcement.line()
    if place is None or place == STDOUT:
        if place is not None:
            print(line, file=output, flush=True)
        yield
        return
    path = Path(place)
    try:
        write_atomically(path, line + "\n")
    except OSError as error:
        raise ArgumentError(f"--announce {place} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == line + "\n":
                path.unlink()
