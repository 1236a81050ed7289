"""From nothing to the first step's result: graphs of 10,000 and 100,000 nodes with gradients.

    python benchmarks/runtime/large_graphs.py [--nodes 10000 100000] [--output FILE]

Each kind and size in a process of its own with an empty cache of kernels; processor seconds of
building (with gradients and, of the MLP, Adam's updates), planning and compiling with the first
step, and a second step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import write

Case = tuple[list[Any], dict[Any, Any]]


def chain(nodes: int) -> Case:
    """Elementwise nodes on 4 floats, one after the other."""
    import graphflow as gf

    x = gf.placeholder("float32", (4,))
    v = gf.variable(np.ones(4, "float32"))
    y = x * v
    for i in range(nodes * 2 // 7):
        y = gf.tanh(y) * 0.5 if i % 2 else y + 1.0
    loss = gf.sum(y)
    return [loss, *gf.gradients(loss, [v])], {x: np.ones(4, "float32")}


def mlp(nodes: int) -> Case:
    """Layers of 8 × 8 with bias and tanh, and Adam."""
    import graphflow as gf

    x = gf.placeholder("float32", (8, 8))
    h = x
    for _ in range(nodes // 64):
        w = gf.variable(np.eye(8, dtype="float32"))
        h = gf.tanh(h @ w + gf.variable(np.zeros(8, "float32")))
    loss = gf.mean(h * h)
    return [loss, gf.optim.Adam(1e-3).minimize(loss)], {x: np.ones((8, 8), "float32")}


def wide(nodes: int) -> Case:
    """Independent branches into one sum."""
    import graphflow as gf

    x = gf.placeholder("float32", (4,))
    v = gf.variable(np.ones(4, "float32"))
    total = x * v
    for i in range(nodes // 8):
        total = total + gf.tanh(x * v + float(i))
    loss = gf.sum(total)
    return [loss, *gf.gradients(loss, [v])], {x: np.ones(4, "float32")}


def scalars(nodes: int) -> Case:
    """Numbers, one after the other."""
    import graphflow as gf

    x, v = gf.placeholder("float32", ()), gf.variable(np.float32(1))
    y = x * v
    for i in range(nodes // 4):
        y = gf.sin(y) + 0.1 * i if i % 2 else y * 0.99
    return [y, *gf.gradients(y, [v])], {x: np.float32(1)}


KINDS: dict[str, Callable[[int], Case]] = {
    "chain": chain, "mlp": mlp, "wide": wide, "scalars": scalars,
}  # fmt: skip


def measure(kind: str, nodes: int) -> dict[str, float]:
    """Processor seconds of each part, in this process."""
    import graphflow as gf
    from graphflow.ir.graph import Graph

    start = time.process_time()
    fetches, feeds = KINDS[kind](nodes)
    built = time.process_time()
    with gf.Session(devices=["cpu:0"]) as session:
        session.run(fetches, feeds)
        first = time.process_time()
        session.run(fetches, feeds)
        second = time.process_time()
    return {
        "nodes": len(Graph(fetches)),
        "build": built - start,
        "first_step": first - built,
        "second_step": second - first,
    }


def measured(kind: str, nodes: int) -> dict[str, Any]:
    """The same in a process of its own, printed too."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--measure", kind, "--nodes", str(nodes)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True,
            env={**os.environ, "GRAPHFLOW_CACHE": folder},
        )  # fmt: skip
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    total = told["build"] + told["first_step"]
    print(
        f"  {kind:<8} {told['nodes']:>8,.0f} nodes  build {told['build']:6.2f} s  first step "
        f"{told['first_step']:6.2f} s  together {total:6.2f} s  then {told['second_step']:.4f} s",
        flush=True,
    )
    return {"title": f"{kind} of {nodes}", "seconds": told}


def main() -> None:
    parser = argparse.ArgumentParser(description="large graphs to their first step")
    parser.add_argument("--nodes", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--output", type=Path, default=None, help="JSON file")
    parser.add_argument("--measure", choices=KINDS, help="one kind, in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.nodes[0])))
        return
    write("large_graphs", [measured(k, n) for n in options.nodes for k in KINDS], options.output)


if __name__ == "__main__":
    main()
