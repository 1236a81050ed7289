"""What mechanisms of programs gain: steps with each of them, and without it, by turns.

    python benchmarks/runtime/mechanisms.py [--rounds 10] [--output results/mechanisms.json]

Each row takes one mechanism away while a session compiles, and prints the step's time with it over
the time without it: below 1, the mechanism pays. Both sessions compute the same losses.
`docs/design/mechanisms.md` holds the figures.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import gpt
from peers import interleaved, write

import graphflow as gf
from graphflow import passes
from graphflow.ops.kernels.fusion.multi_tensor_updates import MultiTensorUpdate
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_table_driver import WORDS
from graphflow.runtime.memory import memory_layout
from graphflow.runtime.native_calls import native_segments
from graphflow.runtime.native_calls.gemm_epilogues import BlockCall
from graphflow.runtime.program import kernel_emitter, program_part
from graphflow.runtime.program.bodies import body_routines

# Models -------------------------------------------------------------------------------------------


def dense(batch: int, width: int = 512, adam: bool = False) -> tuple[list[Any], dict[Any, Any]]:
    random = np.random.default_rng(0)
    x = gf.placeholder("float32", (batch, 784))
    y = gf.placeholder("int64", (batch,))
    h: Any = x
    sizes = [784, width, 256, 10]
    for i, (rows, columns) in enumerate(pairwise(sizes)):
        w = (random.normal(size=(rows, columns)) / 30).astype("float32")
        h = h @ gf.variable(w) + gf.variable(np.zeros(columns, "float32"))
        h = gf.nn.relu(h) if i < 2 else h
    loss = gf.mean(gf.nn.cross_entropy(h, y))
    optimiser: Any = gf.optim.Adam(1e-3) if adam else gf.optim.SGD(0.05, momentum=0.9)
    feeds = {x: random.normal(size=(batch, 784)).astype("float32"),
             y: random.integers(0, 10, batch)}  # fmt: skip
    return [loss, optimiser.minimize(loss)], feeds


def blocks() -> tuple[list[Any], dict[Any, Any]]:
    random = np.random.default_rng(1)
    shape = (gpt.BATCH, gpt.TIME)
    ids, targets = gf.placeholder("int64", shape), gf.placeholder("int64", shape)
    loss = gpt.graphflow_loss(
        {name: gf.variable(value, name=name) for name, value in gpt.weights().items()}, ids, targets
    )
    feeds = {each: random.integers(0, gpt.VOCABULARY, shape) for each in (ids, targets)}
    return [loss, gf.optim.SGD(0.05, momentum=0.9).minimize(loss)], feeds


def chain() -> tuple[list[Any], dict[Any, Any]]:
    x = gf.placeholder("float32", (8, 8))
    w = gf.variable((np.eye(8) * 0.999).astype("float32"))
    h: Any = x
    for _ in range(500):
        h = gf.tanh(h @ w)
    return [gf.sum(h)], {x: np.ones((8, 8), "float32")}


def recurrent() -> tuple[list[Any], dict[Any, Any]]:
    random = np.random.default_rng(2)
    xs = gf.placeholder("float32", (64, 32, 64))
    w = gf.variable((random.normal(size=(64, 64)) / 8).astype("float32"))

    def cell(state: Any, row: Any) -> tuple[Any, Any]:
        state = gf.tanh(state @ w + row)
        return state, state

    last, _ = gf.scan(cell, gf.zeros((32, 64)), xs)
    loss = gf.mean(last * last)
    feeds = {xs: random.normal(size=(64, 32, 64)).astype("float32")}
    return [loss, gf.optim.SGD(0.1).minimize(loss)], feeds


def many_variables() -> tuple[list[Any], dict[Any, Any]]:
    loss: Any = 0.0
    for i in range(200):
        loss = loss + gf.sum(gf.variable(np.full(256, 1.0 + i, "float32")) ** 2)
    return [loss, gf.optim.Adam(1e-3).minimize(loss)], {}


def towers() -> tuple[list[Any], dict[Any, Any]]:
    random = np.random.default_rng(3)
    x = gf.placeholder("float32", (64, 64))
    heads = []
    for _ in range(4):
        h: Any = x
        for _ in range(6):
            h = gf.nn.relu(h @ gf.variable((random.normal(size=(64, 64)) / 8).astype("float32")))
        heads.append(gf.sum(h))
    return [sum(heads[1:], heads[0])], {x: random.normal(size=(64, 64)).astype("float32")}


# Mechanisms ---------------------------------------------------------------------------------------


def whole_calls(works: Any) -> list[BlockCall]:
    return [BlockCall(i, 0, work.task.rows) for i, work in enumerate(works)]


def one_by_one(self: Any, calls: Any) -> None:
    for call in calls:
        self.calls.append(call)
        self.flush()


class OneCallAVariable(MultiTensorUpdate):
    """The same updates, each by a native call of its own."""

    def __call__(self) -> None:
        for table in self.tables:
            for call in range(table.size // WORDS):
                self._walk(ctypes.c_void_p(address(table)), None, call, call + 1)


@contextmanager
def without(name: str) -> Iterator[None]:
    """Take a mechanism away while a session compiles."""
    with ExitStack() as stack:
        if name == "epilogues":
            stack.enter_context(patch.object(native_segments, "interleave_epilogues", whole_calls))
        elif name == "call tables":
            section = program_part.ProgramSection
            stack.enter_context(patch.object(section, "add_calls", one_by_one))
        elif name == "native loops":
            stack.enter_context(patch.object(body_routines, "LOOP_OPS", frozenset()))
        elif name == "parallel branches":
            stack.enter_context(patch.object(memory_layout, "find_parallel_sections", lambda _: ()))
            stack.enter_context(
                patch.object(program_part, "schedule_branches", lambda calls, _: [[calls]])
            )
        elif name == "one call for all updates":
            stack.enter_context(patch.object(kernel_emitter, "MultiTensorUpdate", OneCallAVariable))
        else:
            rest = [each for each in passes.default_passes() if type(each).__name__ != name]
            stack.enter_context(patch.object(passes, "default_passes", lambda: rest))
        yield


ROWS: list[tuple[str, str, Callable[[], tuple[list[Any], dict[Any, Any]]], int]] = [
    ("epilogues", "MLP, batch 128", lambda: dense(128), 1),
    ("epilogues", "MLP of width 2048, batch 512", lambda: dense(512, 2048), 1),
    ("epilogues", "two GPT blocks", blocks, 1),
    ("call tables", "chain of 1,000 small nodes", chain, 1),
    ("call tables", "MLP, batch 16", lambda: dense(16), 1),
    ("native loops", "recurrent network by scan, 64 steps", recurrent, 1),
    ("one call for all updates", "Adam on 200 variables", many_variables, 1),
    ("one call for all updates", "MLP with Adam, batch 16", lambda: dense(16, adam=True), 1),
    ("parallel branches", "four towers, two threads", towers, 2),
    ("AccumulateProducts", "two GPT blocks", blocks, 1),
    ("FoldTransposes", "two GPT blocks", blocks, 1),
    ("MergeDuplicates", "two GPT blocks", blocks, 1),
    ("UseSyrk", "two GPT blocks", blocks, 1),
]
"""Mechanism, model, how to build it, threads."""


def contest(
    name: str, build: Callable[[], tuple[list[Any], dict[Any, Any]]], threads: int, rounds: int
) -> dict[str, Any]:
    sessions: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack:
        for side in ("with", "without"):
            fetches, feeds = build()
            cluster = gf.Cluster.here(devices=["cpu:0"], threads=threads)
            session = stack.enter_context(gf.Session(cluster, trial=False))

            def step(session: Any = session, fetches: Any = fetches, feeds: Any = feeds) -> Any:
                return session.run(fetches, feeds)[0]

            if side == "without":
                with without(name):
                    step()
            sessions[side] = step
        first, second = (sessions[side]() for side in ("with", "without"))
        assert np.isfinite(first) and np.isfinite(second)
        seconds = interleaved(sessions, rounds, each=5)
    pairs = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    low, middle, high = quantiles(pairs, n=4)
    return {"with": median(seconds["with"]), "without": median(seconds["without"]),
            "ratio": middle, "quartiles": [low, high]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="*", help="mechanisms, all by default")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    results = []
    for name, model, build, threads in ROWS:
        if given.only and name not in given.only:
            continue
        found = contest(name, build, threads, given.rounds)
        low, high = found["quartiles"]
        print(f"{name:<26} {model:<38} {found['ratio']:.2f} ({low:.2f} to {high:.2f})", flush=True)
        results.append({"mechanism": name, "model": model, "threads": threads, **found})
    write("mechanisms", results, given.output)


if __name__ == "__main__":
    main()
