"""How far the memory of a process grows by a session, beside what the session predicts.

    python benchmarks/runtime/memory_growth.py [--threads 2] [--output results/memory_growth.json]

Each step runs in a process of its own. A first session compiles the kernels and is closed, so the
growth is that of a second one: variables, arena, scratch memory, layouts, and Python objects. Feeds
are there before, and do not count. The last column is the prediction without the scratch memory of
kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
from memory import forget, most_resident, resident
from peers import pinned, write

Case = tuple[list[Any], dict[Any, np.ndarray]]
STEPS = 3


def convolution(shape: tuple[int, ...], w: tuple[int, ...], dtype: str, **attrs: int) -> Case:
    """Return a training step of one convolution."""
    import graphflow as gf

    random = np.random.default_rng(0)
    x = gf.placeholder(dtype, shape)
    weight = gf.variable((random.normal(size=w) * 0.05).astype(dtype))
    loss = gf.mean(gf.square(gf.nn.conv2d(x, weight, **attrs)))
    feeds = {x: random.normal(size=shape).astype(dtype)}
    return [loss, gf.optim.SGD(0.1).minimize(loss)], feeds


def network(name: str) -> Case:
    """Return a training step of a model of `benchmarks/models`."""
    import gpt
    import vision

    import graphflow as gf

    model = gpt.model() if name == "gpt" else vision.models()[name]
    variables = {k: gf.variable(v) for k, v in model.parameters.items()}
    inputs = [gf.placeholder(a.dtype, a.shape) for a in model.feeds]
    loss = model.ours(variables, *inputs)
    feeds = dict(zip(inputs, model.feeds, strict=True))
    return [loss, gf.optim.SGD(0.1).minimize(loss)], feeds


def draw_case(index: int) -> Case:
    """Return a step of a model that is drawn from seed 1."""
    from benchmarks.random_models import draw

    step = draw(1, index).build()
    return step.fetches, step.feeds


CASES: dict[str, Callable[[], Case]] = {
    "ResNet-18": lambda: network("resnet"),
    "LeNet-5": lambda: network("lenet"),
    "GPT": lambda: network("gpt"),
    "3×3": lambda: convolution((16, 64, 32, 32), (64, 64, 3, 3), "float32", padding=1),
    "3×3 float64": lambda: convolution((16, 64, 32, 32), (64, 64, 3, 3), "float64", padding=1),
    "5×5, stride 2": lambda: convolution(
        (2, 32, 256, 256), (32, 32, 5, 5), "float32", padding=2, stride=2
    ),
    "patches": lambda: convolution((8, 3, 224, 224), (384, 3, 16, 16), "float32", stride=16),
    **{f"drawn {i}": (lambda i=i: draw_case(i)) for i in (5, 7, 17, 26, 31)},
}


def measure(name: str, threads: int) -> dict[str, float]:
    """Return bytes of growth, of the prediction and of its scratch memory, in this process."""
    import graphflow as gf
    from graphflow.ops.kernels.jit import scratch_memory
    from graphflow.ops.kernels.jit.array_address import empty_aligned
    from graphflow.runtime.memory.malloc_tuning import trim_heap

    fetches, given = CASES[name]()
    feeds = {}
    for tensor, array in given.items():  # an aligned feed is not copied
        feeds[tensor] = empty_aligned(array.nbytes).view(array.dtype).reshape(array.shape)
        feeds[tensor][...] = array
    cluster = gf.Cluster.here(["cpu:0"], threads=threads)
    with gf.Session(cluster) as first:
        first.run(fetches, feeds)
    scratch_memory._local.__dict__.clear()
    del first
    gc.collect()
    trim_heap()
    forget()
    before = resident()
    with gf.Session(cluster) as session:
        for _ in range(STEPS):
            session.run(fetches, feeds)
        growth = most_resident() - before
        (use,) = (each.use for each in session.memory().values())
    return {"growth": growth, "predicted": use.peak - use.feeds, "scratch": use.scratch}


def main() -> None:
    parser = argparse.ArgumentParser(description="growth of memory against its prediction")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None, help="JSON file")
    parser.add_argument("--measure", choices=CASES, help="one step, in this process")
    options = parser.parse_args()
    if options.measure:
        pinned(options.threads)
        print(json.dumps(measure(options.measure, options.threads)))
        return
    results = []
    for name in CASES:
        flags = ["--measure", name, "--threads", str(options.threads)]
        done = subprocess.run(
            [sys.executable, __file__, *flags], capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        ratio = found["predicted"] / found["growth"]
        plain = (found["predicted"] - found["scratch"]) / found["growth"]
        print(
            f"{name:<16}{found['growth'] / 2**20:8.1f} MiB   predicted / growth {ratio:.2f}   "
            f"without scratch {plain:.2f}",
            flush=True,
        )
        results.append({"step": name, **found, "ratio": ratio, "ratio_without_scratch": plain})
    write("memory_growth", results, options.output)


if __name__ == "__main__":
    main()
