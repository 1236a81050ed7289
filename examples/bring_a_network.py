"""Run a network from an ONNX file on one worker and on two.

Prints predicted and measured step times, whether both results have the same bits, and how far they
are from ONNX's own reference.

    pip install '.[onnx]'
    python examples/bring_a_network.py [model.onnx] [--batch 1] [--runs 5]

Without a file it uses the SqueezeNet of the onnx package (with constant weights).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from command_line import positive_int, run_program
from rich.console import Console
from rich.table import Table

import graphflow as gf

BUNDLED = "backend/test/data/light/light_squeezenet.onnx"  # in the onnx package
Feed = dict[gf.Tensor, np.ndarray]


def make_feeds(model: gf.onnx.Model, batch: int) -> dict[str, np.ndarray]:
    """Return random numbers for every input; unknown sizes become the batch."""
    rng = np.random.default_rng(0)
    feeds = {}
    for name, x in model.inputs.items():
        shape = tuple(size if isinstance(size, int) else batch for size in x.shape)
        feeds[name] = rng.standard_normal(shape).astype(x.dtype)
    return feeds


def time_runs(session: gf.Session, outputs: list[gf.Tensor], feed: Feed, runs: int) -> list[float]:
    """Return the seconds of some runs after the first, which compiles."""
    session.run(outputs, feed)
    seconds = []
    for _ in range(runs):
        start = perf_counter()
        session.run(outputs, feed)
        seconds.append(perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="an .onnx file; default: SqueezeNet")
    parser.add_argument(
        "--batch", type=positive_int, default=1, help="size of dynamic dimensions; default: 1"
    )
    parser.add_argument(
        "--runs", type=positive_int, default=5, help="timed runs on each cluster; default: 5"
    )
    options = parser.parse_args()
    import onnx

    console = Console()
    path = options.model or Path(onnx.__file__).parent / BUNDLED
    try:
        model = gf.onnx.load(path)
    except (OSError, gf.errors.GraphflowError) as error:
        parser.exit(2, f"{str(error).partition(chr(10))[0]}\n")
    console.print(model)
    named = make_feeds(model, options.batch)
    outputs = [model.outputs[name] for name in model.output_names]
    feed = {model.inputs[name]: value for name, value in named.items()}

    table = Table("workers", "predicted", "measured", "transfers", title=path.name)
    results = []
    for workers in (1, 2):
        with gf.Session(gf.Cluster.local(workers=workers, threads=1)) as session:
            seconds = time_runs(session, outputs, feed, options.runs)
            results.append(session.run(outputs, feed))
            plan = session.plan()
        table.add_row(
            str(workers),
            f"{plan.makespan * 1e3:.1f} ms",
            f"{median(seconds) * 1e3:.1f} ms",
            str(sum(1 for interval in plan.timeline if interval.kind == "transfer")),
        )
    console.print(table)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))
    console.print(f"one worker and two: {'bit-equal' if same else 'different'}")
    compare(
        console,
        onnx.load(path),
        named,
        dict(zip(model.output_names, results[0], strict=True)),
    )


def compare(console: Console, proto: Any, feeds: dict[str, np.ndarray], found: dict) -> None:
    """Print how far results are from ONNX's reference, if that supports the file's opset."""
    from onnx.reference import ReferenceEvaluator

    opset = next(entry.version for entry in proto.opset_import if not entry.domain)
    if opset < 13:  # the reference computes old operators as their later versions
        console.print(f"opset {opset}: ONNX's reference does not support it, so not compared")
        return
    expected = ReferenceEvaluator(proto).run(list(found), feeds)
    for (name, ours), theirs in zip(found.items(), expected, strict=True):
        error = np.max(np.abs(ours - theirs)) / max(np.max(np.abs(theirs)), 1e-30)
        console.print(f"{name} {ours.shape}: {error:.1e} relative to ONNX's reference")


if __name__ == "__main__":
    run_program(main)
