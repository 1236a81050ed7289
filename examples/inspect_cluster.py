"""Look into a cluster while it works: status, traces, metrics and logs of two workers.

The script starts two workers, trains a model whose halves are pinned to them, and shows what each
tool reports. The same commands work on your own cluster; see docs/operations/observability.md.

    pip install '.[metrics]'
    python examples/inspect_cluster.py [--steps 300] [--width 256] [--metrics 127.0.0.1:9109]

It writes trace.json to the current folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from command_line import check_folder, positive_int, run_program

import graphflow as gf
from graphflow.cli.main import main as graphflow

INPUTS, CLASSES, BATCH = 64, 10, 128


@contextmanager
def start_worker(log: Path) -> Iterator[str]:
    """Start a worker process with `graphflow worker`, and yield its address."""
    command = [sys.executable, "-m", "graphflow", "worker", "--listen", "tcp://127.0.0.1:*"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--threads", "1", "--log-format", "json"],
            stdout=subprocess.PIPE, stderr=file, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            address, *_ = process.stdout.readline().partition(" listening on ")[2].split() or [""]
            if not address:
                raise SystemExit(f"a worker did not start: {log.read_text().strip()}")
            yield address
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def build_model(width: int) -> tuple[gf.Tensor, gf.Tensor, gf.Tensor, gf.Tensor]:
    """Return inputs, labels, loss and training step of a network on two workers."""
    x = gf.placeholder("float32", (None, INPUTS), name="x")
    labels = gf.placeholder("int64", (None,), name="labels")

    def dense(value: gf.Tensor, inputs: int, outputs: int, name: str) -> gf.Tensor:
        return value @ gf.variable(gf.init.glorot((inputs, outputs)), name=name)

    with gf.random.seed(0):
        with gf.device("/worker:0"):
            hidden = gf.nn.relu(dense(x, INPUTS, width, "first"))
            hidden = gf.nn.relu(dense(hidden, width, width, "second"))
        with gf.device("/worker:1"):
            hidden = gf.nn.relu(dense(hidden, width, width, "third"))
            logits = dense(hidden, width, CLASSES, "fourth")
            loss = gf.mean(gf.nn.cross_entropy(logits, labels))
    return x, labels, loss, gf.optim.SGD(0.1).minimize(loss)


def print_title(text: str) -> None:
    print(f"\n--- {text}\n", flush=True)


def train_and_inspect(cluster: Path, log: Path, steps: int, width: int, metrics: str) -> None:
    """Train, and print what each tool reports."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH, INPUTS)).astype("float32")
    labels = rng.integers(0, CLASSES, BATCH)
    x, y, loss, train = build_model(width)
    feed = {x: images, y: labels}
    with gf.Session(cluster, metrics=metrics) as session:
        before = float(session.run(loss, feed))
        for _ in range(steps):
            session.run([loss, train], feed)
        print(f"{steps} steps: loss {before:.3f} → {float(session.run(loss, feed)):.3f}")

        print_title(f"graphflow status {cluster.name}")
        graphflow(["status", str(cluster)])

        print_title("with session.trace('trace.json') as trace: …; print(trace)")
        with session.trace("trace.json") as trace:
            for _ in range(20):
                session.run([loss, train], feed)
        print(trace)
        print("\ntrace.json: open it at https://ui.perfetto.dev")

        print_title(f"curl http://{metrics}/metrics")
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        wanted = ("graphflow_steps", "graphflow_workers", "graphflow_round", "graphflow_feed")
        print("\n".join(line for line in lines if line.startswith(wanted)))
    print_title("what the first worker logged")
    print(log.read_text(), end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive_int, default=300)
    parser.add_argument("--width", type=positive_int, default=256)
    parser.add_argument("--metrics", default="127.0.0.1:9109", help="address to serve metrics at")
    given = parser.parse_args()
    check_folder(parser, "trace.json", Path())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = [folder / f"worker{i}.log" for i in range(2)]
        with start_worker(logs[0]) as first, start_worker(logs[1]) as second:
            cluster = folder / "cluster.toml"
            cluster.write_text(
                "".join(f'[[workers]]\naddress = "{each}"\n' for each in (first, second))
                + '[defaults]\ndevices = ["cpu:0"]\nthreads = 1\n'
            )
            train_and_inspect(cluster, logs[0], given.steps, given.width, given.metrics)


if __name__ == "__main__":
    run_program(main)
