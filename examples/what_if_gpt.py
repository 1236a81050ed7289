"""Predict how a GPT would train on a cluster that you do not have; nothing runs.

Answers three questions, or yours:

    python examples/what_if_gpt.py
    python examples/what_if_gpt.py --billions 30 --devices 256

Sizes are rounded to the nearest known GPT.
"""

from __future__ import annotations

import argparse

from command_line import positive_int, run_program

import graphflow as gf
from graphflow.errors import GraphflowError

SIZES = {1: (24, 2048, 16), 8: (36, 4096, 32), 18: (40, 6144, 48), 39: (48, 8192, 64),
         76: (60, 10240, 80), 101: (80, 10240, 80), 146: (80, 12288, 96)}  # fmt: skip
"""Layers, width and heads of GPTs, by billions of weights."""


def nearest_model(billions: float) -> gf.parallel.GPT:
    """Return the GPT of the nearest size."""
    nearest = min(SIZES, key=lambda size: abs(size - billions))
    return gf.parallel.GPT(*SIZES[nearest])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--billions", type=float, help="approximate number of weights; default: 18")
    parser.add_argument("--devices", type=positive_int, help="GPUs; default: 64")
    parser.add_argument(
        "--hardware", default="a100+half", help="a product, see docs/deployment/clusters.md"
    )
    parser.add_argument("--batch", type=positive_int, default=1024, help="samples in a step")
    given = parser.parse_args()
    questions = [(1, 8), (18, 64), (101, 1024)]
    if given.billions is not None and not 0 < given.billions < 2 * max(SIZES):
        known = ", ".join(map(str, SIZES))
        parser.error(f"--billions must be near one of {known}, not {given.billions:g}")
    if given.billions is not None or given.devices is not None:
        billions = 18 if given.billions is None else given.billions
        questions = [(billions, 64 if given.devices is None else given.devices)]
    for billions, devices in questions:
        try:
            found = gf.parallel.what_if(
                nearest_model(billions), given.hardware, devices=devices, batch=given.batch
            )
        except GraphflowError as error:
            parser.error(str(error))
        print(f"\n{devices} × {given.hardware}, batch {given.batch}\n{found}")
        best = found.best
        days = 300e9 / found.model.sequence / given.batch * best.seconds / 86400
        print(f"  300 billion tokens would take {days:,.0f} days")


if __name__ == "__main__":
    run_program(main)
