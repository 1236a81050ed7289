"""A training that tests of faults run in a process of its own: the towers of
examples/digits_towers.py, on images of noise, since to load the digits takes more than to train; or
a few large products that take their time.

    training.py CLUSTER STEPS [option=value …]

It prints a line at each event: `ready`, `step N LOSS` (in hexadecimal: all bits), `error CLASS
SECONDS TEXT`, and at the end `done DIGEST` of all variables.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import graphflow as gf
from graphflow.errors import GraphflowError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "digits_towers.py"


def main(cluster: str, steps: int, **options: Any) -> None:
    example = _example()
    width, towers = options.pop("width", 32), options.pop("towers", 3)
    pause, pinned = options.pop("pause", 0.0), options.pop("pinned", True)
    if options.pop("quiet", True):
        logging.disable(logging.CRITICAL)
    where = _cluster(cluster)
    model = (
        _build_pinned_towers(example, towers, width, len(where.workers))
        if pinned
        else example.Towers(towers, width)
    )
    feeds = _feeds(example, model, steps)
    with gf.Session(where, **options) as session:
        say("ready", json.dumps(getattr(session._life.hosts, "pids", [])))
        for number in range(session.step + 1, steps + 1):  # on from a checkpoint, if there is one
            feed = feeds[number - 1]
            start = time.monotonic()
            try:
                loss, _ = session.run([model.loss, model.train], feed)
            except GraphflowError as error:
                took = time.monotonic() - start
                say("error", type(error).__name__, f"{took:.2f}", " ".join(str(error).split()))
                raise SystemExit(3) from None
            say("step", str(number), float(loss).hex())
            time.sleep(pause)
        state = [v.outputs[0] for v in gf.Graph(model.train).variables]
        digest = hashlib.sha256(b"".join(session.get(v).tobytes() for v in state)).hexdigest()
        homes = {
            device for name, device in session.plan([model.loss, model.train]).placement.items()
            if "weight2" in name
        } if len(where.workers) > 1 else set()  # fmt: skip
    say("done", digest, json.dumps(sorted(homes)))


def _build_pinned_towers(example: Any, towers: int, width: int, workers: int) -> Any:
    """Tower i on worker i: whatever is measured, tensors cross."""

    class Spread(example.Towers):  # type: ignore[misc,name-defined]
        def _tower(self, number: int, width: int) -> gf.Tensor:
            with gf.device(f"/worker:{number % workers}"):
                tower: gf.Tensor = super()._tower(number, width)
            return tower

    return Spread(towers, width)


def _feeds(example: Any, model: Any, steps: int) -> list[Any]:
    draw = np.random.default_rng(0)
    images, labels = draw.random((1437, 64), "float32"), draw.integers(10, size=1437)
    return list(islice(example.batches(model, images, labels, 64, 1000), steps))


def _example() -> Any:
    sys.path.append(str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("digits_towers", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cluster(text: str) -> gf.Cluster:
    if text == "here":
        return gf.Cluster.here(threads=1)
    if text.startswith("local:"):
        return gf.Cluster.local(workers=int(text.partition(":")[2]), threads=1)
    return gf.Cluster.load(text)


def say(*words: str) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[3:])
    main(sys.argv[1], int(sys.argv[2]), **{name: json.loads(v) for name, v in given.items()})
