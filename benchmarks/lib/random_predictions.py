"""Predict and measure random models on one worker and on two, beside other placements.

For each model these take turns: one worker; two workers as placed; layers dealt out in turn to the
two workers; the plan of the placer `auto`; and, if asked for, the strategy that `gf.parallel.auto`
finds. All but the second are the alternatives with which regret compares the placement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import graphflow as gf
from benchmarks.lib.prediction_summary import Prediction, summary_lines
from benchmarks.lib.regret import Regret, regret_lines
from benchmarks.lib.step_timing import StepTime, time_by_turns
from benchmarks.lib.worker_pairs import Workers
from benchmarks.random_models import RandomModel, Step

TRACED = 8
"""Traced steps that refine predictions."""
WARM_STEPS, WARM_SECONDS = 22, 5.0
"""Steps before a placement is measured: the least number that comes first.

A session times 9 steps of a new placement, and perhaps 9 of another one, before it has settled.
"""


@dataclass
class Measurements:
    """What a run measured.

    Attributes:
        failed: models that did not run, each with its error.
    """

    predictions: list[Prediction] = field(default_factory=list)
    regrets: list[Regret] = field(default_factory=list)
    failed: list[tuple[RandomModel, str]] = field(default_factory=list)


class Calibration:
    """What is known of this machine before any model has run.

    Measured once, by a step that computes next to nothing; `restore` forgets what was learned
    since, so that the prediction of a model does not depend on the models before it.
    """

    def __init__(self, folder: Path, workers: Workers) -> None:
        self._folder = folder
        x = gf.placeholder("float32", ())
        for count in (2, 1):
            with workers.session(count, trial=False) as session:
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


@dataclass(frozen=True)
class Alternative:
    """Another placement of a step: how it runs, and its plan."""

    run: Callable[[], object]
    plan: gf.Plan


def measure_model(
    model: RandomModel, rounds: int, workers: Workers, searches: bool = False
) -> tuple[list[Prediction], list[Regret]]:
    """Return predictions of a model beside measurements, and regrets, before and after traces.

    Args:
        searches: run the best strategy of `gf.parallel.auto`, too.

    Raises:
        GraphflowError: the model does not run.
    """
    step = model.build()
    predictions: list[Prediction] = []
    regrets: list[Regret] = []
    with ExitStack() as stack:
        sessions = {count: stack.enter_context(workers.session(count)) for count in (1, 2)}
        for session in sessions.values():  # plans before alternatives can teach anything
            warm_up(session, step)
        alternatives = open_alternatives(model, step, stack, workers)
        found = search(model, step, sessions[2].cluster) if searches else None
        if found is not None:
            alternatives["search"] = open_alternative(stack, workers, found)
        for refined in (False, True):
            for session in sessions.values():
                if refined:
                    refine(session, step)
                warm_up(session, step)
            rows, regret = measure_placements(model, step, sessions, alternatives, refined, rounds)
            predictions += rows
            regrets.append(regret)
    return predictions, regrets


def measure_placements(
    model: RandomModel,
    step: Step,
    sessions: Mapping[int, gf.Session],
    alternatives: Mapping[str, Alternative],
    refined: bool,
    rounds: int,
) -> tuple[list[Prediction], Regret]:
    """Return a row for each session, by its number of workers, and the regret on two workers."""
    plans = {count: session.plan(step.fetches) for count, session in sessions.items()}
    runs = {
        "one worker": as_alternative(sessions[1], step).run,
        "placed": as_alternative(sessions[2], step).run,
        "floor": fixed_loop(),
    }
    others = {
        name: each.run
        for name, each in alternatives.items()
        if placement_of(each.plan) != placement_of(plans[2])
    }
    times = time_by_turns({**runs, **others}, rounds)
    rows = [
        compare(model, count, refined, plans[count], times[name], times["floor"])
        for count, name in ((1, "one worker"), (2, "placed"))
    ]
    rest = {name: times[name] for name in ("one worker", *others)}
    regret = Regret.of(model.index, str(model), refined, rows[1].used, times["placed"], rest)
    return rows, regret


def open_alternatives(
    model: RandomModel, step: Step, stack: ExitStack, workers: Workers
) -> dict[str, Alternative]:
    """Return other placements on two workers by name: how they run, and their plans.

    One session serves both. It profiles nothing: its plan by `auto` rests on calibration.
    """
    session = stack.enter_context(workers.session(2, placer="auto", trial=False))
    dealt = model.build(lambda number: f"/worker:{number % 2}")
    found = {}
    for name, each in (("auto", step), ("round robin", dealt)):
        warm_up(session, each)
        found[name] = as_alternative(session, each)
    return found


def open_alternative(stack: ExitStack, workers: Workers, step: Step) -> Alternative:
    """Return a step that runs in a session of its own, on two workers."""
    session = stack.enter_context(workers.session(2))
    warm_up(session, step)
    return as_alternative(session, step)


def as_alternative(session: gf.Session, step: Step) -> Alternative:
    """Return how a step runs in a session, and its plan."""
    return Alternative(lambda: session.run(step.fetches, step.feeds), session.plan(step.fetches))


def search(model: RandomModel, step: Step, cluster: gf.Cluster) -> Step | None:
    """Return the step by the best strategy of `gf.parallel.auto`.

    None if that is one device, or if the model does not train or cannot be divided.
    """
    if step.loss is None:
        return None
    shapes = {tensor: array.shape for tensor, array in step.feeds.items()}
    optimizer = model.choices.make_optimizer()
    try:
        found = gf.parallel.auto(step.loss, cluster, shapes=shapes, optimizer=optimizer, quiet=True)
        strategy = found.best.strategy
        if strategy is None:
            return None
        train = model.choices.minimize(step.loss, strategy)
        return replace(step, fetches=[step.loss, train, *step.fetches[2:]])
    except gf.errors.GraphflowError as error:
        print(f"     no strategy is found: {str(error).splitlines()[0]}", flush=True)
        return None


def placement_of(plan: gf.Plan) -> dict[str, str]:
    """Return the device of each node of a plan."""
    return {node.name: node.device for node in plan.nodes}


def refine(session: gf.Session, step: Step) -> None:
    """Trace some steps and plan again."""
    with session.trace():
        for _ in range(TRACED):
            session.run(step.fetches, step.feeds)
    session.replan()


def compare(
    model: RandomModel,
    workers: int,
    refined: bool,
    plan: gf.Plan,
    measured: StepTime,
    floor: StepTime,
) -> Prediction:
    """Return the row of a plan and of what was measured."""
    return Prediction(
        model.index,
        model.choices.family,
        str(model),
        workers,
        len({node.device for node in plan.nodes if node.finish > node.start}),
        refined,
        plan.makespan,
        measured.seconds,
        measured.noise,
        floor.noise,
    )


def measure_models(
    models: Sequence[RandomModel],
    rounds: int,
    folder: Path,
    workers: Workers,
    searches: bool = False,
) -> Measurements:
    """Measure models one after the other, and print a line for each.

    Args:
        folder: the empty folder that `GRAPHFLOW_CACHE` names.
        searches: run the best strategy of `gf.parallel.auto`, too.
    """
    done = Measurements()
    calibration = Calibration(folder, workers)
    print("predicted / measured step, ± half of the interquartile range of the measured steps;")
    print("regret: as placed on two workers / best alternative, before and after traces")
    print(f"{'':3} {'one worker':^28} {'two workers':^14} {'one, traced':^14} "
          f"{'two, traced':^14} {'regret':^11} {'floor':^7} {'s':>4}")  # fmt: skip
    for model in models:
        calibration.restore()
        start = time.perf_counter()
        try:
            predictions, regrets = measure_model(model, rounds, workers, searches)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            done.failed.append((model, why))
            print(f"{model.index:3}  FAILED  {model}\n     {why}", flush=True)
            continue
        done.predictions += predictions
        done.regrets += regrets
        print(show_model(predictions, regrets, time.perf_counter() - start), flush=True)
    return done


def show_model(predictions: Sequence[Prediction], regrets: Sequence[Regret], seconds: float) -> str:
    """Return the line of a model: ratios, regrets, the noise floor, the seconds that it took."""
    ratios = " ".join(
        f"{row.ratio:5.2f} ± {row.noise / 2:.2f}" + ("* " if row.used > 1 else "  ")
        for row in predictions
    )
    lost = " ".join(f"{row.ratio:5.2f}" for row in regrets)
    first = predictions[0]
    return (
        f"{first.model:3} {first.measured * 1e3:10.2f} ms {ratios} {lost} ± {first.floor / 2:.2f} "
        f"{seconds:5.1f}  {first.description}"
    )


def report(done: Measurements) -> None:
    """Print the summary of a run."""
    print("\n* both workers compute\n")
    for line in (*summary_lines(done.predictions), *regret_lines(done.regrets)):
        print(line)
    for model, why in done.failed:
        print(f"FAILED #{model.index} of seed {model.seed}: {model}\n    {why}")
