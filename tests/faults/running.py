"""Real processes for tests of faults: workers by address and scripts, with every line that they
write."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations, pairwise
from pathlib import Path
from typing import IO, Any

from tests import loaded

ROOT = Path(__file__).resolve().parents[2]
START = 60.0
"""Seconds for a process to come up on a busy machine."""


class Running:
    """A process whose output is read as it comes.

    Args:
        command: what it runs.
        inside: what comes before that, such as the command that enters a network namespace.
        python: the command is what follows `python`, and the package is loaded already.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        inside: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        python: bool = False,
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        environment |= env or {}
        early = any(name.startswith(("LD_", "PYTHON")) for name in env or {})  # read at the start
        self.process: Any  # a Popen, or what stands for a fork
        if python and not inside and not early:
            self.process = loaded.start_python(command, environment, cwd)
        else:
            self.process = subprocess.Popen(
                [*inside, *((sys.executable,) if python else ()), *command],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
            )  # fmt: skip
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.times: list[float] = []
        """When each line of `lines` came."""
        self._next: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self.process.stdout is not None and self.process.stderr is not None
        self._readers = [
            self._reader(self.process.stdout, self.lines, self._next),
            self._reader(self.process.stderr, self.errors, None),
        ]

    def _reader(
        self, stream: IO[str], kept: list[str], told: queue.SimpleQueue[str | None] | None
    ) -> threading.Thread:
        def read() -> None:
            for line in stream:
                if told is not None:
                    self.times.append(time.monotonic())
                kept.append(line.rstrip("\n"))
                if told is not None:
                    told.put(kept[-1])
            if told is not None:
                told.put(None)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, start: str = "", seconds: float = START) -> str:
        """The next line of its output that starts so."""
        until = time.monotonic() + seconds
        while True:
            try:
                line = self._next.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no line {start!r} in {seconds} s\n{self.describe_output()}"
                ) from None
            assert line is not None, f"it ended before a line {start!r}\n{self.describe_output()}"
            if line.startswith(start):
                return line

    def gap(self) -> float:
        """The longest time between two lines of its output."""
        return max((b - a for a, b in pairwise(self.times)), default=0.0)

    def send(self, number: int) -> float:
        """Signal it; when that was."""
        os.kill(self.process.pid, number)
        return time.monotonic()

    def wait(self, seconds: float = START) -> int:
        """Its exit status, when it ends by itself."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"it still runs after {seconds} s\n{self.describe_output()}"
            ) from None
        for reader in self._readers:
            reader.join(5.0)
        return status

    def describe_output(self) -> str:
        """All that it wrote, for messages of assertions."""
        return "\n".join(["stdout:", *self.lines, "stderr:", *self.errors])

    def end(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10.0)
        for reader in self._readers:
            reader.join(5.0)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Worker(Running):
    """`graphflow worker` at an address."""

    def __init__(
        self,
        listen: str = "tcp://127.0.0.1:*",
        *options: str,
        inside: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        command = ["-m", "graphflow", "worker", "--listen", listen, "--threads", "1", *options]
        super().__init__(command, inside=inside, env=env, python=True)
        self.address = ""

    def end(self) -> None:
        """As of any process; without sessions it ends when it is asked, and nobody mourns it."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
        super().end()

    def ready(self) -> Worker:
        """When it listens."""
        words = self.line("graphflow worker").split()
        self.address = next(word for word in words if word.startswith("tcp://"))
        return self


class Script(Running):
    """A Python script that uses graphflow."""

    def __init__(
        self,
        text: str,
        *arguments: str,
        inside: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        command = ["-c", text, *arguments]
        super().__init__(command, inside=inside, env=env, cwd=cwd, python=True)


def cluster_file(
    folder: Path, addresses: Sequence[str], *top: str, key: str = "", measured: bool = False
) -> Path:
    """A file that names workers by where they are reached, proxies perhaps.

    Args:
        top: lines before the workers.
        key: name of the key that all workers hold.
        measured: whether sessions measure speeds; else they are given, which saves seconds.
    """
    lines = [*top]
    if not measured:
        lines += ["[defaults]", "flops = 5e9", "bandwidth = 1e10", "launch = 1e-5"]
    for address in addresses:
        lines += ["[[workers]]", f'address = "{address}"', 'devices = ["cpu:0"]']
        lines += [f'key = "{key}"'] if key else []
    for a, b in () if measured else combinations(range(len(addresses)), 2):
        lines += ["[[links]]", f'source = "/worker:{a}"', f'target = "/worker:{b}"']
        lines += ["latency = 1e-4", "bandwidth = 1e9"]
    path = folder / "cluster.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def took(number: int, what: str, seconds: float) -> None:
    """Note what a fault took, for the table of docs/operations/faults.md, in the file that
    GRAPHFLOW_FAULT_TIMES names."""
    if file := os.environ.get("GRAPHFLOW_FAULT_TIMES"):
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(f"{number}\t{what}\t{seconds:.3f}\n")


@contextmanager
def record_duration(number: int, what: str) -> Iterator[None]:
    """Note what the block took."""
    started = time.monotonic()
    yield
    took(number, what, time.monotonic() - started)


def children(pid: int) -> list[int]:
    """The processes that a process, or one of these, has started and that are not gone."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs, or is stopped; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def have_ended(pids: Sequence[int], seconds: float) -> bool:
    """Whether all of these end within some seconds."""
    until = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def resident(pid: int) -> int:
    """Bytes of a process's own memory that are in RAM."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def stop(pid: int) -> None:
    """Freeze a process; it is frozen when this returns.

    A signal is not enough: until the thread that is to take it is run, which on a busy machine
    takes milliseconds, the other threads of its process go on.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 5.0
    while set(_states(pid)) != {"T"}:
        assert time.monotonic() < until, f"process {pid} goes on: {_states(pid)}"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    """What the threads of a process do, as its kernel says it with a letter."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]
