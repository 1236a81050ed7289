"""Inputs that are chosen by the branches that they reach: `python -m tests.fuzz.guided --inputs N`.

Needs atheris (`pip install atheris`), which is no dependency: it is there for Linux and some
versions of Python only. The changes of structure are those of `soak`; what reaches something new is
kept in `tests/fuzz/corpus`, and the next run begins with it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["graphflow.runtime", "graphflow.placement"]):
    from tests.fuzz import soak
    from tests.fuzz.mutate import LONGEST, Mutator
    from tests.fuzz.targets import targets

CORPUS = Path(__file__).with_name("corpus")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs until all inputs are done, or one is found; atheris then ends the process."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.guided", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--number", type=int, default=1, help="of the first choice")
    given = parser.parse_args(arguments)
    chosen = targets()

    def run_input(data: bytes) -> None:
        """An input; its first byte says which decoder it is for."""
        if data:
            found = soak.feed(chosen[data[0] % len(chosen)], data[1:])
            if found is not None:
                print(f"kept {found.keep(soak.REGRESSIONS)}\n{found.error}", flush=True)
                raise SystemExit(1)

    def change(data: bytes, longest: int, number: int) -> bytes:
        mutator = Mutator(number)
        which = data[0] % len(chosen) if data else number % len(chosen)
        target = chosen[which]
        made = mutator.change(data[1:], target.form) if len(data) > 1 else target.seeds[0]
        return bytes([which]) + made[: longest - 1]

    CORPUS.mkdir(exist_ok=True)
    for at, target in enumerate(chosen):
        for number, seed in enumerate(target.seeds):
            (CORPUS / f"seed-{at}-{number}").write_bytes(bytes([at]) + seed)
    options = [f"-runs={given.inputs}", f"-seed={given.number}", f"-max_len={LONGEST}"]
    atheris.Setup([sys.argv[0], *options, "-rss_limit_mb=4096", str(CORPUS)], run_input,
                  custom_mutator=change)  # fmt: skip
    atheris.Fuzz()


if __name__ == "__main__":
    main()
