"""Pipeline splits against what others reach, on graphs with known answers.

    python benchmarks/placement/stages.py --instances DIR [--budget MOVES] [--splits DIR]
        [--output FILE]

The folder holds instances as in github.com/msr-fiddle/dnn-partitioning (layer and operator graphs,
`maxFPGAs` accelerators and `maxCPUs` hosts) and, if known, `reference.json` with the best values of
others. `--splits` takes a file per instance: `{node id: device}`. Writes JSON beside the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from graphflow.placement import Problem  # noqa: E402
from graphflow.placement.stages.splitting import Split, split_stages  # noqa: E402


def problem_of(graph: dict[str, Any]) -> tuple[Problem, list[int], np.ndarray]:
    """An instance as a problem, its node ids in the order of the problem, and backward flags."""
    nodes, k, cpus = graph["nodes"], graph["maxFPGAs"], graph["maxCPUs"]
    number = {node["id"]: i for i, node in enumerate(nodes)}
    compute = np.empty((len(nodes), k + cpus))
    for i, node in enumerate(nodes):
        compute[i, :k] = node["fpgaLatency"] if node["supportedOnFpga"] else np.inf
        compute[i, k:] = node["cpuLatency"]
    edges = {(number[e["sourceId"]], number[e["destId"]]): float(e["cost"]) for e in graph["edges"]}
    colours = [node.get("colorClass") for node in nodes]
    ids = {c: i for i, c in enumerate(dict.fromkeys(c for c in colours if c is not None))}
    problem = Problem(
        compute=compute,
        edges=list(edges),
        bytes=list(edges.values()),
        tensor=[source for source, _ in edges],
        memory=[node.get("size", 0.0) for node in nodes],
        capacity=[graph["maxSizePerFPGA"]] * k + [np.inf] * cpus,
        groups=[ids.get(c, -1) for c in colours],
    )
    backward = np.array([bool(node["isBackwardNode"]) for node in nodes])
    return problem, [node["id"] for node in nodes], backward


def placement_of(split: Split, ids: list[int], k: int) -> dict[str, str]:
    """Node id -> acc0, acc1, ..., cpu0, ..."""
    names = [f"acc{p}" if p < k else f"cpu{p - k}" for p in split.device.tolist()]
    return dict(zip(map(str, ids), names, strict=True))


def main() -> None:
    """Split every instance and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=Path)
    parser.add_argument("--budget", type=int, default=20_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="a clock, beside the budget")
    parser.add_argument("--splits", type=Path, help="folder for the placements")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/stages.json")
    options = parser.parse_args()
    if options.instances is None:
        print("no --instances: nothing to split")
        return
    known_file = options.instances / "reference.json"
    known = json.loads(known_file.read_text())["throughput"] if known_file.is_file() else {}
    rows = []
    print(f"{'instance':44} {'max load':>9} {'bound':>8} {'contig.':>8} {'best':>8} {'ratio':>6} "
          f"{'s':>5}")  # fmt: skip
    for file in sorted(options.instances.glob("*.json")):
        graph = json.loads(file.read_text())
        if "maxFPGAs" not in graph:
            continue
        problem, ids, backward = problem_of(graph)
        k, begin = graph["maxFPGAs"], perf_counter()
        hosts = range(k, problem.devices)
        split = split_stages(
            problem, k, hosts=hosts, backward=backward, budget=options.budget, seed=options.seed,
            seconds=options.seconds,
        )  # fmt: skip
        seconds = perf_counter() - begin
        best = known.get(file.name, {}).get("best_known_any") or float("nan")
        cuts = known.get(file.name, {}).get("dp_contiguous_optimum") or float("nan")
        print(f"{file.stem:44} {split.max_load:9.4f} {split.bound:8.3f} {cuts:8.3f} {best:8.3f} "
              f"{split.max_load / best:6.4f} {seconds:5.1f}")  # fmt: skip
        rows.append({
            "instance": file.name, "max_load": split.max_load, "bound": split.bound,
            "contiguous": split.contiguous, "tried": dict(split.tried), "seconds": seconds,
            "contiguous_optimum": cuts, "best_known": best,
        })  # fmt: skip
        if options.splits:
            options.splits.mkdir(parents=True, exist_ok=True)
            text = json.dumps(placement_of(split, ids, k))
            (options.splits / file.name).write_text(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows, indent=1).replace("NaN", "null") + "\n")


if __name__ == "__main__":
    main()
