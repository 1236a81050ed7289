"""How long `import graphflow` takes, as a ratio to `import numpy` alone.

Fresh interpreters, the two imports interleaved, medians of many runs. Writes JSON beside the table:
    python benchmarks/runtime/import_time.py [--runs 21] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 0.3  # seconds
MEASURE = (
    "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
)


def seconds_to_import(module: str) -> float:
    """Seconds that the import statement takes in a fresh interpreter."""
    command = [sys.executable, "-c", MEASURE.format(module=module)]
    return float(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)


def measure(runs: int) -> dict[str, list[float]]:
    """Seconds of each run; a first round of each, which fills the caches, is thrown away."""
    seconds: dict[str, list[float]] = {"numpy": [], "graphflow": []}
    for turn in range(runs + 1):
        for module, taken in seconds.items():
            once = seconds_to_import(module)
            if turn:
                taken.append(once)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="import graphflow against import numpy")
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "import_time.json"
    )
    options = parser.parse_args()
    seconds = measure(options.runs)
    numpy, graphflow = median(seconds["numpy"]), median(seconds["graphflow"])
    verdict = "within" if graphflow <= BUDGET else "OVER"
    print(f"import numpy      {numpy:.3f} s")
    print(f"import graphflow  {graphflow:.3f} s, {graphflow / numpy:.2f} x numpy")
    print(f"                  {verdict} the budget of {BUDGET} s (medians of {options.runs} runs)")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "ratio": graphflow / numpy,
        "numpy_seconds": numpy,
        "graphflow_seconds": graphflow,
        "budget_seconds": BUDGET,
        "runs": seconds,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
