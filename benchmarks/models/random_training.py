"""Training steps that nobody tuned for, drawn from a seed, against torch on one and two threads.

    python benchmarks/models/random_training.py --random 30 --seed 7          # some 3 minutes
    python benchmarks/models/random_training.py --random 30 --seed 7 --list   # only describes them
    python benchmarks/models/random_training.py --seed 7 --only 3 12          # two of them again
    python benchmarks/models/random_training.py --random 40 --family recurrent tables
    python benchmarks/models/random_training.py --seed 7 --only 3 --profile   # where its time goes

A model is a description (benchmarks/twins), which graphflow and torch both build: MLPs, CNNs,
autoencoders, transformers, recurrent networks, lookups in tables, with drawn sizes, norms,
activations, dropout, losses and optimisers. The same seed and index give the same model everywhere.
Weights are copied. Before the race, gradients, running moments and the losses of three steps must
agree (dropout aside), and graphflow's losses must have the same bits on all numbers of threads.

All contenders then run by turns in this process: numpy arrays in, the loss as a Python float out.
A line shows graphflow's milliseconds, its time over torch's, ± half of the interquartile range of
the noisiest contender. First steps are not in the ratios; their seconds are in the column "first"
(placement and compilation, with kernels that the check has left on disk). The exit status is 1 if
models failed or differ.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import arguments, pinned, write

TRACED = 5  # steps of a profile
LIMIT = 1.5  # seconds of timed steps of a model


def parse() -> argparse.Namespace:
    """Read the options."""
    from benchmarks.twins import FAMILIES

    options = arguments("random training steps")
    options.description, options.epilog = __doc__.split("\n")[0], __doc__.split("\n\n", 1)[1]
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.set_defaults(rounds=7)
    options.add_argument("--random", type=int, default=20, metavar="N", help="draw N models (20)")
    options.add_argument("--seed", type=int, default=0, help="of the models; default: 0")
    options.add_argument("--only", type=int, nargs="+", metavar="I", help="models of these indices")
    options.add_argument("--family", nargs="+", metavar="F", choices=list(FAMILIES),
                         help=f"models of these families: {', '.join(FAMILIES)}")  # fmt: skip
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="T",
                         help="numbers of threads to compare; default: 1 2")  # fmt: skip
    options.add_argument("--list", action="store_true", help="describe the models, run nothing")
    options.add_argument("--check", action="store_true", help="compare numbers, time nothing")
    options.add_argument("--compile", action="store_true",
                         help="time torch.compile, too (10 to 60 s more a model)")  # fmt: skip
    options.add_argument("--profile", action="store_true",
                         help="show where graphflow's step spends its time")  # fmt: skip
    chosen = options.parse_args()
    if chosen.random < 0 or chosen.seed < 0 or min(chosen.only or [0]) < 0:
        options.error("--random, --seed and --only take numbers from 0 on")
    if min(chosen.threads) < 1:
        options.error("--threads takes numbers from 1 on")
    chosen.threads = sorted(set(chosen.threads))
    return chosen


def profile_lines(step: object, most: int = 12) -> list[str]:
    """Return milliseconds of a step by kind of node, the longest first."""
    session = step.session  # type: ignore[attr-defined]
    with session.trace() as trace:
        for _ in range(TRACED):
            step()  # type: ignore[operator]
    spent: Counter[str] = Counter()
    for each in trace.steps:
        for event in each.events:
            spent[re.sub(r"_\d+$", "", event.name.rsplit("/", 1)[-1])] += event.end - event.start
        spent["around the program"] += each.end - each.start
        spent["around the program"] -= sum(e.end - e.start for e in each.events)
    return [f"{ns / len(trace.steps) / 1e6:9.3f} ms  {k}" for k, ns in spent.most_common(most)]


def show_profiles(twin: object, threads: Sequence[int]) -> None:
    """Print the profile of a model on each number of threads."""
    from benchmarks.twins import GraphflowStep
    from benchmarks.twins.torch_step import TorchStep

    state = TorchStep(twin).state()  # type: ignore[arg-type]
    for count in threads:
        step = GraphflowStep(twin, state, count)  # type: ignore[arg-type]
        for _ in range(20):
            step()
        print(f"       on {count} thread{'s' * (count > 1)}:")
        print("\n".join(f"       {line}" for line in profile_lines(step)), flush=True)
        step.close()


def main() -> None:
    chosen = parse()
    from benchmarks.twins import draw

    models = [draw(chosen.seed, index) for index in chosen.only or range(chosen.random)]
    models = [m for m in models if not chosen.family or m.family in chosen.family]
    if chosen.list:
        for model in models:
            print(f"{model.index:3} {model}")
        return
    if find_spec("torch") is None:
        sys.exit("torch is not installed, and nothing else can be compared with: "
                 "pip install -e '.[bench]'")  # fmt: skip
    pinned(max(chosen.threads))
    from benchmarks.lib.twin_races import Race, check_twins, race, summary_lines

    races: list[Race] = []
    failed: list[str] = []
    columns = " ".join(f"{f'ours {n}':>8} {'/torch':>6}" for n in chosen.threads)
    print(f"  #  {columns} {'1 / n':>6} {'noise':>6} {'first':>6} {'s':>5}  model", flush=True)
    for number, model in enumerate(models):
        start = time.perf_counter()
        if sys.stderr.isatty():
            print(f"\r{number} of {len(models)} … ", end="", file=sys.stderr, flush=True)
        try:
            check_twins(model, chosen.threads)
            if chosen.check:
                print(f"{model.index:3}  agrees  {model}", flush=True)
                continue
            done = race(model, chosen.threads, chosen.rounds, LIMIT, chosen.compile)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            failed.append(f"FAILED #{model.index} of seed {model.seed}: {model}\n    {why}")
            print(f"{model.index:3}  FAILED  {model}\n     {why}", flush=True)
            continue
        races.append(done)
        figures = " ".join(
            f"{done.times[f'graphflow {n}'].seconds * 1e3:8.2f} {done.ratio(n):6.2f}"
            for n in chosen.threads
        )
        speedup = done.speedup(chosen.threads[-1]) if 1 in chosen.threads else float("nan")
        print(f"{model.index:3}  {figures} {speedup:6.2f} {done.noise / 2:6.2f} {done.first:6.2f} "
              f"{time.perf_counter() - start:5.1f}  {model}", flush=True)  # fmt: skip
        if chosen.profile:
            show_profiles(model, chosen.threads)
    if not chosen.check:
        print("\n" + "\n".join(summary_lines(races, chosen.threads)))
        write("random-training", [each.as_json() for each in races], chosen.output)
    print("\n".join(failed), end="\n" if failed else "")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
