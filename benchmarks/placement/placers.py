"""Placers against known answers, and how long they take.

    python benchmarks/placement/placers.py [--instances DIR] [--placers heft,auto] [--large]
        [--output FILE]

Without instances: the two graphs of the papers. With them: `textbook.json` and `stg*.json` of the
folder as well (fields as in the Standard Task Graph Set: costs, edges, optimal lengths by number of
processors). `--large` times random graphs of up to 1,000,000 nodes on 64 devices. Makespans are the
simulator's; seconds are medians of warm runs. Writes JSON beside the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from graphflow.placement import (  # noqa: E402
    Assignment,
    Problem,
    get_placer,
    placer_names,
    simulate,
)

TEXTBOOK: list[dict[str, Any]] = [
    {
        "name": "topcuoglu2002",
        "w": [
            [14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10], [13, 16, 9],
            [7, 15, 11], [5, 11, 14], [18, 12, 20], [21, 7, 16],
        ],
        "edges": [
            [0, 1, 18], [0, 2, 12], [0, 3, 9], [0, 4, 11], [0, 5, 14], [1, 7, 19], [1, 8, 16],
            [2, 6, 23], [3, 7, 27], [3, 8, 23], [4, 8, 13], [5, 7, 15], [6, 9, 17], [7, 9, 11],
            [8, 9, 13],
        ],
        "published": {"HEFT": 80, "CPOP": 86},
        "optimal_exhaustive": 73,
    },
    {
        "name": "arabnejad2014",
        "w": [
            [22, 21, 36], [22, 18, 18], [32, 27, 43], [7, 10, 4], [29, 27, 35], [26, 17, 24],
            [14, 25, 30], [29, 23, 36], [15, 21, 8], [13, 16, 33],
        ],
        "edges": [
            [0, 1, 17], [0, 2, 31], [0, 3, 29], [0, 4, 13], [0, 5, 7], [1, 7, 3], [1, 8, 30],
            [2, 6, 16], [3, 7, 11], [3, 8, 7], [4, 8, 57], [5, 7, 5], [6, 9, 9], [7, 9, 42],
            [8, 9, 7],
        ],
        "published": {"HEFT": 133, "PEFT": 122},
        "optimal_exhaustive": 113,
    },
]  # fmt: skip
SIZES = ((1_000, 8), (100_000, 64), (1_000_000, 64))
PATIENCE = {"heft": 1_000_000, "cpop": 1_000_000, "peft": 1_000_000}
"""Nodes up to which a placer is timed; others up to 100,000, those not listed below too."""
SMALL_ONLY = ("greedy", "single", "round_robin", "exact", "local_search", "user")


def textbook(entry: dict[str, Any]) -> Problem:
    """A graph with costs by processor and transfer times on its edges."""
    edges = np.array(entry["edges"])
    return Problem(np.array(entry["w"], float), edges[:, :2], edges[:, 2].astype(float))


def standard(graph: dict[str, Any], processors: int) -> Problem:
    """A graph of the Standard Task Graph Set: equal processors, free transfers."""
    cost = np.array(graph["cost"], float)[:, None]
    edges = np.array(graph["edges"], dtype=np.int64)
    return Problem(np.repeat(cost, processors, axis=1), edges, np.zeros(len(edges)))


def layered(nodes: int, devices: int, seed: int = 0) -> Problem:
    """A random graph: three inputs a node from the 500 before it, uneven devices and links."""
    rng = np.random.default_rng(seed)
    target = np.repeat(np.arange(1, nodes), 3)
    source = np.maximum(0, target - 1 - rng.integers(0, min(500, nodes), len(target)))
    keys = np.unique(source * nodes + target)
    edges = np.stack([keys // nodes, keys % nodes], axis=1)
    compute = rng.uniform(1, 10, (nodes, 1)) * rng.uniform(0.5, 1.5, (nodes, devices))
    bandwidth = rng.uniform(0.5, 2.0, (devices, devices))
    return Problem(compute, edges, rng.uniform(0, 10, len(edges)), bandwidth=bandwidth)


def timed(name: str, problem: Problem) -> tuple[Assignment, float]:
    """A placer's answer, and its seconds."""
    start = perf_counter()
    return get_placer(name).place(problem), perf_counter() - start


def instances(folder: Path | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Textbook graphs and task graphs of a folder; without one the built-in textbook graphs."""
    books, tasks = TEXTBOOK, []
    if folder is not None:
        if not folder.is_dir():
            raise SystemExit(f"--instances {folder}: no such folder")
        if (folder / "textbook.json").exists():
            books = json.loads((folder / "textbook.json").read_text())
        for path in sorted(folder.glob("stg*.json")):
            tasks += json.loads(path.read_text())["graphs"]
    return books, tasks


def judge_textbook(books: list[dict[str, Any]], names: list[str]) -> Iterator[dict[str, Any]]:
    """Makespans on the graphs of the papers."""
    for entry in books:
        problem, published = textbook(entry), entry["published"]
        print(f"\n{entry['name']}: optimum {entry['optimal_exhaustive']}, published {published}")
        for name in names:
            answer, seconds = timed(name, problem)
            span = simulate(problem, answer).makespan
            print(f"  {name:14} {span:8.1f} {1e3 * seconds:9.1f} ms")
            yield {"graph": entry["name"], "placer": name, "makespan": span, "seconds": seconds}


def judge_tasks(tasks: list[dict[str, Any]], names: list[str]) -> Iterator[dict[str, Any]]:
    """Lengths over the optimum on task graphs without transfers."""
    print("\ntask graphs: length over the optimum; a negative least would be a wrong answer")
    for name in names:
        over, seconds = [], []
        for graph in tasks:
            for processors, optimum in graph["opt"].items():
                problem = standard(graph, int(processors))
                answer, taken = timed(name, problem)
                over.append(simulate(problem, answer).makespan / optimum - 1.0)
                seconds.append(taken)
        row = {"placer": name, "count": len(over), "mean": mean(over), "worst": max(over)}
        row |= {"least": min(over), "optimal": sum(o <= 1e-9 for o in over)}
        row["seconds"] = median(seconds)
        print(
            f"  {name:14} mean {row['mean']:8.3%}  worst {row['worst']:8.3%}  least "
            f"{row['least']:6.3%}  optimal {row['optimal']}/{row['count']}  "
            f"{1e3 * row['seconds']:8.1f} ms"
        )
        yield row


def judge_speed(names: list[str], runs: int) -> Iterator[dict[str, Any]]:
    """Seconds on large random graphs, compiled loops warm."""
    for name in names:
        if name not in SMALL_ONLY:
            get_placer(name).place(layered(20_000, 64))
    for nodes, devices in SIZES:
        problem = layered(nodes, devices)
        print(f"\n{nodes:,} nodes on {devices} devices")
        for name in names:
            if nodes > 1_000 and (name in SMALL_ONLY or nodes > PATIENCE.get(name, 100_000)):
                continue
            seconds = [timed(name, problem)[1] for _ in range(runs)]
            print(f"  {name:14} {median(seconds):9.4f} s")
            yield {"nodes": nodes, "devices": devices, "placer": name, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--instances", type=Path)
    parser.add_argument("--placers", default=",".join(placer_names()))
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/placers.json")
    options = parser.parse_args()
    names = options.placers.split(",")
    for name in names:
        get_placer(name)
    books, tasks = instances(options.instances)
    result: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    result["textbook"] = list(judge_textbook(books, names))
    if tasks:
        result["tasks"] = list(judge_tasks(tasks, [n for n in names if n != "exact"]))
    if options.large:
        result["speed"] = list(judge_speed(names, max(1, options.runs)))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1))
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    main()
