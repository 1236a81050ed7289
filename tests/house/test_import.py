"""The cost of `import graphflow` for a program that may never run a graph."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

import graphflow as gf
from tests.house.sources import ROOT

# Libraries that load only where they are first needed.
HEAVY = {
    "bokeh",
    "cupy",
    "llvmlite",
    "msgpack",
    "multiprocessing",
    "networkx",
    "highspy",
    "onnx",
    "prometheus_client",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "torch",
    "typer",
    "zmq",
}

# numpy comes first, so that its own threads and modules are not counted as graphflow's.
SURVEY = """
import json, os, sys, threading
import numpy

modules, tasks, acts = set(sys.modules), os.listdir("/proc/self/task"), []

def watch(event, args):
    if event == "open":
        writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        acts.extend([f"writes {args[0]}"] if writes else [])
    elif event in {"subprocess.Popen", "os.fork", "socket.__new__"}:
        acts.append(event)

def start(thread, started=threading.Thread.start):
    acts.append(f"starts {thread.name}")
    started(thread)

sys.addaudithook(watch)
threading.Thread.start = start
import graphflow

print(json.dumps({
    "loaded": sorted({name.split(".")[0] for name in set(sys.modules) - modules}),
    "threads": [len(tasks), len(os.listdir("/proc/self/task")), threading.active_count()],
    "acts": acts,
}))
"""


@cache
def _survey() -> dict[str, list[object]]:
    done = subprocess.run(
        [sys.executable, "-B", "-c", SURVEY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    survey: dict[str, list[object]] = json.loads(done.stdout)
    return survey


def test_importing_graphflow_loads_nothing_heavy() -> None:
    assert HEAVY.intersection(_survey()["loaded"]) == set()


def test_importing_graphflow_loads_nothing_that_only_some_calls_need() -> None:
    rarely = {"difflib", "hashlib", "html", "tempfile"}
    assert rarely.intersection(_survey()["loaded"]) == set()


def test_importing_graphflow_starts_no_thread_and_writes_nothing() -> None:
    survey = _survey()
    before, after, python_threads = survey["threads"]
    assert (after, python_threads) == (before, 1)
    assert survey["acts"] == []


def test_a_worker_loads_nothing_that_only_others_need() -> None:
    code = "import sys, graphflow.runtime.worker.serving; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert (HEAVY - {"msgpack", "zmq"} | {"asyncio", "ssl"}) & loaded == set()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("relu", "it is gf.nn.relu"),
        ("normal", "it is gf.random.normal or gf.init.normal"),
        ("concatenate", "it is gf.concat"),
        ("reduce_mean", "it is gf.mean"),
        ("Variable", "it is gf.variable"),
        ("float32", 'it is the word "float32"'),
        ("mattmul", "'mattmul'; did you mean 'matmul'"),  # Python itself suggests similar names
    ],
)
def test_a_name_that_lives_in_a_module_is_told_with_it(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=meant) as caught:
        getattr(gf, name)
    assert (caught.value.name, caught.value.obj) == (name, gf)
