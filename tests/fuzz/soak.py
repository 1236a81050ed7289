"""Many inputs into every decoder: `python -m tests.fuzz.soak --inputs 1000000`, or `make fuzz`.

Each input is made of a seed by a number, so that a finding is made again by that number alone:
`--only "plan file" --number 123456 --inputs 1`. `tests.fuzz.guided` chooses inputs by what they
reach.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from tests.fuzz.mutate import Mutator
from tests.fuzz.targets import Target, targets

SECONDS = 2.0
"""Of the processor for one input, however busy it is; most take less than a millisecond."""
HANGS = 300.0
"""Of any clock, for one that waits for something: the process may be stopped for a while."""
_CLOCKS = ((signal.SIGPROF, signal.ITIMER_PROF), (signal.SIGALRM, signal.ITIMER_REAL))
GROWTH = 64 << 20
"""Bytes that a batch of inputs may take, and all batches may leave, once each decoder has had its
seeds."""
WARMING = 200
REGRESSIONS = Path(__file__).with_name("regressions")


class TooSlow(BaseException):
    """An input took longer than it may; no Exception, so that no decoder takes it for its own."""


@dataclass(frozen=True)
class Finding:
    """An input that a decoder did not take as it should."""

    target: str
    number: int
    data: bytes
    error: str

    def keep(self, folder: Path) -> Path:
        """Write the input to a file that the default run will feed to the decoder."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.target.replace(' ', '-')}-{self.number}.bin"
        path.write_bytes(self.data)
        return path


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raises TooSlow in what computes or waits for too long; if that does not end it, the process
    ends with all stacks on stderr."""

    def raise_too_slow(number: int, frame: object) -> None:
        raise TooSlow(f"still running after {seconds:g} s of the processor, or {HANGS:g} s")

    before = [signal.signal(number, raise_too_slow) for number, _ in _CLOCKS]
    for (_, clock), limit in zip(_CLOCKS, (seconds, HANGS), strict=True):
        signal.setitimer(clock, limit)
    faulthandler.dump_traceback_later(2 * HANGS, exit=True)
    try:
        yield
    finally:
        for _, clock in _CLOCKS:
            signal.setitimer(clock, 0)
        faulthandler.cancel_dump_traceback_later()
        for (number, _), handler in zip(_CLOCKS, before, strict=True):
            signal.signal(number, handler)


def feed(target: Target, data: bytes, number: int = 0) -> Finding | None:
    """What is wrong with how a decoder takes an input; None where nothing is."""
    try:
        with limit_time(SECONDS):
            target(data)
    except (Exception, TooSlow):
        return Finding(target.name, number, data, traceback.format_exc(limit=-6))
    return None


def inputs(target: Target, numbers: range) -> Iterator[tuple[int, bytes]]:
    """The inputs of a decoder by their numbers."""
    for number in numbers:
        yield number, Mutator(number).make(target.seeds, target.form)


def peak() -> int:
    """The most memory that this process has had, since `calm` where that works; in bytes."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    told = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return told if sys.platform == "darwin" else told * 1024


def reset_peak() -> None:
    """Begin the peak anew, where the system lets us: what other tests took before hides nothing."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def shares(chosen: Sequence[Target], count: int) -> dict[str, int]:
    """How many inputs each decoder has, `count` or a few more in all: the quick ones more, none
    fewer than a hundredth."""
    parts = {each.name: 1 / each.cost + 0.02 for each in chosen}
    whole = sum(parts.values())
    return {name: ceil(count * part / whole) for name, part in parts.items()}


def run(chosen: Sequence[Target], count: int, first: int, told: float = 60.0) -> list[Finding]:
    """Feed them all, in turns; tells how far it is every `told` seconds."""
    findings: list[Finding] = []
    left = shares(chosen, count)
    done = {each.name: 0 for each in chosen}
    started = last = time.monotonic()
    for target in chosen:
        for seed in target.seeds:
            feed(target, seed)
    reset_peak()
    base = peak()
    while any(left.values()):
        for target in chosen:
            batch = min(WARMING, left[target.name])
            at = first + done[target.name]
            reset_peak()
            before = peak()
            for number, data in inputs(target, range(at, at + batch)):
                found = feed(target, data, number)
                if found is not None:
                    findings.append(found)
                    print(f"FOUND in {target.name}, number {number}:\n{found.error}", flush=True)
            left[target.name] -= batch
            done[target.name] += batch
            grown = max(peak() - before, before - base)
            if grown > GROWTH:
                error = f"{target.name}, {at} to {at + batch}: memory grew by {grown >> 20} MiB"
                findings.append(Finding(target.name, at, b"", error))
                print(f"FOUND: {error}", flush=True)
                base = before
        if time.monotonic() > last + told:
            last = time.monotonic()
            total, seconds = sum(done.values()), last - started
            print(
                f"{total} inputs, {total / seconds:.0f}/s, {len(findings)} findings, "
                f"memory {peak() >> 20} MiB (+{(peak() - base) >> 20})",
                flush=True,
            )
    total, seconds = sum(done.values()), time.monotonic() - started
    print(
        f"{total} inputs in {seconds:.0f} s, {len(findings)} findings, memory "
        f"+{(peak() - base) >> 20} MiB; {', '.join(f'{n} {c}' for n, c in done.items())}"
    )
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.soak", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--number", type=int, default=1, help="of the first input")
    parser.add_argument("--only", action="append", help="a decoder's name; repeatable")
    given = parser.parse_args(arguments)
    every = targets()
    names = [each.name for each in every]
    unknown = set(given.only or ()) - set(names)
    if unknown:
        parser.error(f"no decoder is named {', '.join(sorted(unknown))}; there are {names}")
    chosen = [each for each in every if not given.only or each.name in given.only]
    findings = run(chosen, given.inputs, given.number)
    for each in findings:
        print(f"kept {each.keep(REGRESSIONS)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
