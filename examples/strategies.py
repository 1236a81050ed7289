"""Train one small GPT with each strategy: the same model and losses, different communication.

    python examples/strategies.py                 # two worker processes (products: four)
    python examples/strategies.py --here          # all shards in this process
    python examples/strategies.py --only data "zero bubble" --steps 30 --out /tmp/compared

Prints the loss curves side by side; then for each strategy the step time (predicted and measured),
the bytes that it sends in a step, and its files. The folder strategies/ gets for each strategy a
page with its plan (with bokeh: pip install 'graphflow[viz]'; else a drawing) and a trace for
https://ui.perfetto.dev. Its index.html shows all of them side by side.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from command_line import check_folder, positive_int, run_program

import graphflow as gf

TEXT = (
    "a graph is cut along a mesh of devices, the pieces are computed where they are, and what one "
    "needs of another travels between them. "
) * 8
BATCH, TIME, WIDTH, HEADS, LAYERS = 8, 32, 32, 2, 2
TRACED_STEPS = 3

ONE = "one device"
TENSOR = {
    "*linear1/weight": ("model",),
    "*linear1/bias": ("model",),
    "*linear2/weight": (None, "model"),
}
P = gf.parallel
STRATEGIES: dict[str, Any] = {
    ONE: None,
    "data": P.Data(2),
    "data, state": P.Data(2, shard_state=True),
    "data, 2 turns": P.Data(2, accumulate=2),
    "tensor": P.Shard({"model": 2}, TENSOR),
    "vocabulary": P.Shard({"model": 2}, {"*head": (None, "model")}),
    "sequence": P.Shard({"time": 2}, {"letters": (None, "time")}),
    "data x tensor": P.Data(2) * P.Shard({"model": 2}, TENSOR),
    "pipeline": P.Pipeline(2, "1f1b", microbatches=4),
    "by names": P.Pipeline([["input", "block0"], ["block1", "output"]], "gpipe", microbatches=4),
    "zero bubble": P.Pipeline(2, "zb-h1", microbatches=4),
    "in a V": P.Pipeline(4, "zb-v", microbatches=4),
    "interleaved": P.Pipeline(4, "interleaved", microbatches=4),
    "two ways": P.Pipeline(2, "chimera", microbatches=4),
    "pipe x data": P.Pipeline(2, "1f1b", microbatches=2) * P.Data(2),
}


class Trainer:
    """The model, its training step and its data."""

    def __init__(self, strategy: Any) -> None:
        gf.random.seed(0)
        letters = sorted(set(TEXT))
        self._codes = np.array([letters.index(c) for c in TEXT])
        random = np.random.default_rng(0)
        self.ids = gf.placeholder("int64", (BATCH, TIME), name="letters")
        self.targets = gf.placeholder("int64", (BATCH, TIME), name="next")
        with gf.name_scope("input"):
            table = gf.variable(random.normal(size=(len(letters), WIDTH)) * 0.1, name="embedding")
            places = gf.variable(random.normal(size=(TIME, WIDTH)) * 0.1, name="places")
            h = gf.nn.embedding(self.ids, table) + places
        for i in range(LAYERS):
            block = gf.nn.TransformerBlock(WIDTH, HEADS, dtype="float64", name=f"block{i}")
            h = block(h, causal=True)
        with gf.name_scope("output"):
            head = gf.variable(random.normal(size=(WIDTH, len(letters))) * 0.1, name="head")
            logits = gf.nn.layer_norm(h) @ head
            self.loss = gf.mean(gf.nn.cross_entropy(logits, self.targets))
        self.train = gf.optim.Adam(3e-3).minimize(self.loss, strategy=strategy)

    @property
    def step(self) -> list[gf.Tensor]:
        """The fetches of a training step."""
        return [self.loss, self.train]

    def feeds(self, steps: int) -> list[dict[gf.Tensor, np.ndarray]]:
        """Return a batch of pieces of the text for each step, the same for all strategies."""
        random = np.random.default_rng(1)
        found = []
        for _ in range(steps):
            starts = random.integers(0, len(self._codes) - TIME - 1, BATCH)
            rows = self._codes[starts[:, None] + np.arange(TIME + 1)]
            found.append({self.ids: rows[:, :-1], self.targets: rows[:, 1:]})
        return found


@dataclass(frozen=True)
class Result:
    """Losses, plan, seconds of a step, bytes sent in a step, report, and files of a strategy."""

    losses: list[float]
    plan: gf.Plan
    seconds: float
    bytes: int
    report: Any
    files: tuple[str, str]

    @property
    def summary(self) -> str:
        """Step time and bytes in a few words."""
        return (
            f"{self.plan.makespan * 1e3:7.2f} ms predicted, {self.seconds * 1e3:7.2f} measured, "
            f"{self.bytes:>9,} bytes a step"
        )


def train(name: str, cluster: gf.Cluster, steps: int, out: Path) -> Result:
    """Train with a strategy, trace the last steps, and write trace and plan."""
    strategy, trainer = STRATEGIES[name], Trainer(STRATEGIES[name])
    stem = name.replace(", ", "-").replace(" ", "-")
    losses, seconds = [], []
    feeds = trainer.feeds(steps)
    plain = max(1, steps - TRACED_STEPS)
    with gf.Session(gf.Cluster.here(devices=["cpu:0"]) if strategy is None else cluster) as session:
        for feed in feeds[:plain]:
            start = time.perf_counter()
            losses.append(float(session.run(trainer.step, feed)[0]))
            seconds.append(time.perf_counter() - start)
        with session.trace(out / f"{stem}.trace.json"):
            for feed in feeds[plain:]:
                losses.append(float(session.run(trainer.step, feed)[0]))
        plan = session.plan(trainer.step)
    drawn = save_plan(plan, out / f"{stem}.plan")
    report = None if strategy is None else strategy.report(trainer.step, cluster)
    sent = 0 if report is None else report.bytes
    files = (drawn.name, f"{stem}.trace.json")
    return Result(losses, plan, median(seconds[1:] or seconds), sent, report, files)


def save_plan(plan: gf.Plan, path: Path) -> Path:
    """Save the plan as a page, or as a drawing if bokeh is missing."""
    try:
        return plan.save(path.with_suffix(".plan.html"))
    except gf.errors.PlanError:
        return plan.save(path.with_suffix(".plan.svg"))


# The page ---------------------------------------------------------------------------------------

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Strategies</title>
<style>body {{ font: 14px/1.5 system-ui, sans-serif; margin: 24px; color: #1c2430; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(270px, 1fr)); gap: 14px; }}
section {{ border: 1px solid #e1e6ec; border-radius: 10px; padding: 10px 14px; }}
h2 {{ font-size: 15px; margin: 0; }} p {{ margin: 4px 0; }} .faint {{ color: #5c6877; }}</style>
<h1>One GPT, trained by each strategy</h1>
<p class="faint">{told} Blue: the loss, step by step; grey and dashed: on one device. Traces open at
<a href="https://ui.perfetto.dev">ui.perfetto.dev</a>.</p>
<main>{panels}</main></html>
"""


def draw_panel(name: str, result: Result, whole: Sequence[float]) -> str:
    """Return the part of the page about a strategy: its curve, times and files."""
    plan, trace = result.files
    top, low = max(whole), min(whole)
    curves = (
        f'<polyline points="{curve_points(result.losses, low, top)}" fill="none" stroke="#3a6fb8" '
        'stroke-width="3"/>'
        f'<polyline points="{curve_points(whole, low, top)}" fill="none" stroke="#a3adba" '
        'stroke-width="1.5" stroke-dasharray="4 3"/>'
    )
    scale = (
        f'<text x="4" y="14">{top:.3f}</text><text x="4" y="116">{low:.3f}</text>'
        f'<text x="256" y="116" text-anchor="end">{len(whole)} steps</text>'
    )
    return (
        f"<section><h2>{escape(name)}</h2>"
        f'<svg viewBox="0 0 260 120" font-size="11" fill="#5c6877" role="img" '
        f'aria-label="losses">{curves}{scale}</svg>'
        f"<p>{result.seconds * 1e3:.2f} ms a step, {result.plan.makespan * 1e3:.2f} predicted</p>"
        f"<p>{result.bytes:,} bytes travel</p>"
        f'<p><a href="{escape(plan)}">plan</a> · <a href="{escape(trace)}">trace</a></p></section>'
    )


def curve_points(losses: Sequence[float], low: float, top: float) -> str:
    """Return the points of a curve in a panel of 260 by 120."""
    span, last = max(top - low, 1e-12), max(len(losses) - 1, 1)
    return " ".join(
        f"{40 + 210 * i / last:.1f},{8 + 96 * (top - loss) / span:.1f}"
        for i, loss in enumerate(losses)
    )


# The program ------------------------------------------------------------------------------------


def main() -> None:
    options = parse_arguments()
    names = dict.fromkeys([ONE, *(options.only or STRATEGIES)])
    here = gf.Cluster.here(devices=["cpu:0"])
    two, four = (here, here) if options.here else (gf.Cluster.local(2), gf.Cluster.local(4))
    with tempfile.TemporaryDirectory() as scratch:  # an interrupted run leaves no files
        results = {
            name: train(name, four if " x " in name else two, options.steps, Path(scratch))
            for name in names
        }
        shutil.copytree(scratch, options.out, dirs_exist_ok=True)
    apart = print_curves(results)
    print(f"largest difference between any two strategies' losses: {apart:.1e}\n")
    for name, result in results.items():
        print(f"{name:>13}: {result.summary}  {' '.join(result.files)}")
    whole = results[ONE].losses
    told = f"The curves differ by {apart:.1e} at most."
    panels = "".join(draw_panel(name, result, whole) for name, result in results.items())
    index = options.out / "index.html"
    index.write_text(PAGE.format(told=told, panels=panels), encoding="utf-8")
    for name in ("tensor", "pipeline"):
        if name in results:
            print(f"\n{name}, in full:\n{results[name].report}")
    print(f"\nWrote {index} (open it in a browser): all strategies side by side.")
    if apart > 1e-9:
        raise SystemExit(f"the curves differ by {apart:.1e}, more than rounding does")


def print_curves(results: Mapping[str, Result]) -> float:
    """Print the losses side by side; return the largest difference in any step."""
    rows = list(zip(*(result.losses for result in results.values()), strict=True))
    each = max(1, (shutil.get_terminal_size().columns - 4) // 15)
    for some in (slice(first, first + each) for first in range(0, len(results), each)):
        print("step" + "".join(f"  {name:>13}" for name in list(results)[some]))
        for step, losses in enumerate(rows):
            print(f"{step:4}" + "".join(f"  {loss:13.9f}" for loss in losses[some]))
        print()
    return max(max(row) - min(row) for row in rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=positive_int, default=12, help="training steps; default: 12"
    )
    parser.add_argument("--here", action="store_true", help="all shards in this process")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=list(STRATEGIES),
        help=f"only some strategies: {', '.join(map(repr, STRATEGIES))}",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("strategies"), help="folder; default: strategies/"
    )
    options = parser.parse_args()
    check_folder(parser, "--out", options.out)
    return options


if __name__ == "__main__":
    run_program(main)
