"""All benchmarks by one command: one JSON, and a table of our ratios to the best peer.

    python benchmarks/all.py [--threads 1] [--only mlp gpt …] [--quick] [--output results/all.json]

Each script runs in a process of its own, pinned to so many processors, one after the other. The
table says where a goal is missed; the JSON holds the profile of each model's step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
from peers import RESULTS

FOLDERS = ("models", "kernels", "placement", "processes", "runtime")
SCRIPTS = {
    path.stem: path
    for folder in FOLDERS
    for path in Path(__file__).resolve().parent.glob(f"{folder}/*.py")
}
PINNED = ("mlp", "logistic", "linear_models", "gpt", "autocast", "vision", "lstm", "sizes", "chain",
          "first_step", "memory", "data", "fused", "products", "conv", "onnx_networks")  # fmt: skip
OTHERS = ("large_graphs", "import_time", "prediction", "placers", "transport", "collectives",
          "arrays", "parallel", "local_sgd", "pipeline", "tables", "turns", "windows", "takeover",
          "block_methods", "auto", "checkpoints", "frameworks", "linear_random",
          "linear_threads", "little_memory", "comparison", "random_training")  # fmt: skip
FEW = {"import_time": ["--runs", "5"], "first_step": ["--runs", "1"], "large_graphs":
       ["--nodes", "10000"], "placers": [], "memory": [], "linear_models": ["--quick", "--rounds",
       "2"], "linear_random": ["--random", "1", "--rounds", "2"],
       "windows": ["--draws", "1", "--only", "bsp", "pool"],
       "random_training": ["--random", "4", "--rounds", "3"],
       "takeover": ["--sizes", "10M", "--kills", "1"]}  # fmt: skip


def results_of(name: str, threads: int, quick: bool) -> dict[str, Any] | None:
    """What a script wrote; None where it failed."""
    print(f"\n== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, str(SCRIPTS[name]), "--output", str(path)]
        if name in PINNED:
            command += ["--threads", str(threads)]
        if quick:
            command += FEW.get(name, ["--rounds", "3"])
        if subprocess.run(command, check=False).returncode:
            return None
        loaded: dict[str, Any] = json.loads(path.read_text())
        return loaded


def row(result: dict[str, Any]) -> str:
    """A line of the table: what was timed, our ratio to the best peer, and the goal."""
    ratio, goal = result["ratio_to_best"], result["goal"]
    verdict = "reached" if ratio <= goal else "MISSED"
    return f"{result['title']:<52} {ratio:5.2f} of {result['best_peer']:<20} {goal:4} {verdict}"


def main() -> None:
    names = [name for name in (*PINNED, *OTHERS) if name in SCRIPTS]
    parser = argparse.ArgumentParser(description="all benchmarks")
    parser.add_argument("--threads", type=int, default=1, help="processors for each contender")
    parser.add_argument("--only", nargs="*", default=names, choices=names, help="these scripts")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--output", type=Path, default=RESULTS / "all.json", help="JSON file")
    options = parser.parse_args()
    found = {name: results_of(name, options.threads, options.quick) for name in options.only}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"threads": options.threads, **found}, indent=2) + "\n")
    print()
    for name, loaded in found.items():
        for result in (loaded or {}).get("results", []):
            if isinstance(result, dict) and "ratio_to_best" in result:
                print(row(result))
        if loaded is None:
            print(f"{name}: FAILED")
    print(f"\nwrote {options.output}")
    sys.exit(any(loaded is None for loaded in found.values()))


if __name__ == "__main__":
    main()
