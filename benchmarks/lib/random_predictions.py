"""Predict and measure random models on one local worker and on two."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import graphflow as gf
from benchmarks.lib.prediction_summary import Prediction, summary_lines
from benchmarks.lib.step_timing import StepTime, time_by_turns
from benchmarks.random_models import RandomModel, Step

TRACED = 8
"""Traced steps that refine predictions."""
WARM_STEPS, WARM_SECONDS = 10, 0.5
"""Steps before a placement is measured: the least number that comes first."""
DEADLINE = 60.0


def local_session(workers: int, trial: bool = True) -> gf.Session:
    """Return a session of local workers of one thread each."""
    return gf.Session(gf.Cluster.local(workers=workers, threads=1), trial=trial, deadline=DEADLINE)


class Calibration:
    """What is known of this machine before any model has run.

    Measured once, by a step that computes next to nothing; `restore` forgets what was learned
    since, so that the prediction of a model does not depend on the models before it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        x = gf.placeholder("float32", ())
        for workers in (2, 1):
            with local_session(workers, trial=False) as session:
                session.run(x + 1.0, {x: np.float32(0)})
        self._files = {path: path.read_bytes() for path in folder.glob("*.json")}

    def restore(self) -> None:
        """Make the folder's files those of the calibration."""
        for path in self._folder.glob("*.json"):
            if path not in self._files:
                path.unlink()
        for path, content in self._files.items():
            path.write_bytes(content)


def fixed_loop() -> Callable[[], object]:
    """Return a function of about a millisecond of numpy, whose scatter is the machine's."""
    a, out = np.ones((256, 256), "float32"), np.empty((256, 256), "float32")

    def loop() -> None:
        for _ in range(4):
            np.matmul(a, a, out=out)
            np.tanh(out, out=out)

    return loop


def warm_up(session: gf.Session, step: Step) -> None:
    """Run steps until the session has settled on a placement and caches are warm."""
    until = time.perf_counter() + WARM_SECONDS
    for _ in range(WARM_STEPS):
        session.run(step.fetches, step.feeds)
        if time.perf_counter() > until:
            return


def measure_model(model: RandomModel, rounds: int) -> list[Prediction]:
    """Return the predictions of a model beside measurements: by workers, before and after traces.

    Raises:
        GraphflowError: the model does not run.
    """
    step = model.build()
    rows: list[Prediction] = []
    with local_session(1) as one, local_session(2) as two:
        sessions = {1: one, 2: two}
        for refined in (False, True):
            plans = {}
            for workers, session in sessions.items():
                if refined:
                    refine(session, step)
                warm_up(session, step)
                plans[workers] = session.plan(step.fetches)
            runs: dict[str, Callable[[], object]] = {
                str(workers): lambda s=session: s.run(step.fetches, step.feeds)
                for workers, session in sessions.items()
            }
            times = time_by_turns({**runs, "floor": fixed_loop()}, rounds)
            rows += [
                compare(model, workers, refined, plan, times) for workers, plan in plans.items()
            ]
    return rows


def refine(session: gf.Session, step: Step) -> None:
    """Trace some steps and plan again."""
    with session.trace():
        for _ in range(TRACED):
            session.run(step.fetches, step.feeds)
    session.replan()


def compare(
    model: RandomModel, workers: int, refined: bool, plan: gf.Plan, times: dict[str, StepTime]
) -> Prediction:
    """Return the row of a plan and of what was measured."""
    measured = times[str(workers)]
    return Prediction(
        model.index,
        str(model),
        workers,
        len({node.device for node in plan.nodes if node.finish > node.start}),
        refined,
        plan.makespan,
        measured.seconds,
        measured.noise,
        times["floor"].noise,
    )


def measure_models(
    models: Sequence[RandomModel], rounds: int, folder: Path
) -> tuple[list[Prediction], list[tuple[RandomModel, str]]]:
    """Measure models one after the other, and print a line for each.

    Args:
        folder: the empty folder that `GRAPHFLOW_CACHE` names.

    Returns:
        The rows of all that ran, and the models that failed, each with its error.
    """
    rows: list[Prediction] = []
    failed: list[tuple[RandomModel, str]] = []
    calibration = Calibration(folder)
    print("predicted / measured step, ± half of the interquartile range of the measured steps")
    print(f"{'':3} {'one worker':^28} {'two workers':^14} {'one, traced':^14} "
          f"{'two, traced':^14} {'floor':^7} {'s':>4}")  # fmt: skip
    for model in models:
        calibration.restore()
        start = time.perf_counter()
        try:
            found = measure_model(model, rounds)
        except Exception as error:
            failed.append((model, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
            print(f"{model.index:3}  FAILED  {model}\n     {failed[-1][1]}", flush=True)
            continue
        rows += found
        print(show_model(found, time.perf_counter() - start), flush=True)
    return rows, failed


def show_model(found: Sequence[Prediction], seconds: float) -> str:
    """Return the line of a model: four ratios, the noise floor, the seconds that it took."""
    ratios = " ".join(
        f"{row.ratio:5.2f} ± {row.noise / 2:.2f}" + ("* " if row.used > 1 else "  ")
        for row in found
    )
    first = found[0]
    return (
        f"{first.model:3} {first.measured * 1e3:10.2f} ms {ratios} ± {first.floor / 2:.2f} "
        f"{seconds:5.1f}  {first.description}"
    )


def report(rows: Sequence[Prediction], failed: Sequence[tuple[RandomModel, str]]) -> None:
    """Print the summary of a run."""
    print("\n* both workers compute\n")
    for line in summary_lines(rows):
        print(line)
    for model, why in failed:
        print(f"FAILED #{model.index} of seed {model.seed}: {model}\n    {why}")
