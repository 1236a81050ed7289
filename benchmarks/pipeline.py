"""A GPT in a pipeline of two local workers of one thread each, against torch.distributed.pipelining
with gloo; and how long each worker is idle, against the closed form.

    python benchmarks/pipeline.py [--rounds 8] [--output results/pipeline.json]

Both run four GPT blocks (B 16, T 128, d 256, h 4) in two stages by 1F1B with four micro-batches,
and an SGD step at the end. The two take turns: while one computes, the other's processes wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import gpt
import numpy as np
from peers import Steps, arguments, interleaved, report, write

import graphflow as gf
from graphflow.parallel import Schedule, one_f_one_b, run

STAGES, MICRO, BATCH, LAYERS, EACH = 2, 4, 16, 4, 3
GOAL = 0.9


def feeds() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    first, second = (random.integers(0, gpt.VOCABULARY, (BATCH, gpt.TIME)) for _ in range(2))
    return first, second


# Ours -----------------------------------------------------------------------------------------


def loss_of(p: dict[str, Any], ids: Any, targets: Any) -> Any:
    """The model of benchmarks/gpt.py, its two halves under scopes."""

    def heads(x: Any) -> Any:
        cut = gf.reshape(x, (BATCH, gpt.TIME, gpt.HEADS, gpt.HEAD))
        return gf.permute_dims(cut, (0, 2, 1, 3))

    for stage in range(STAGES):
        with gf.name_scope(f"stage{stage}"):
            if stage == 0:
                h = gf.nn.embedding(ids, p["tokens"]) + p["places"]
            half = LAYERS // STAGES
            for i in range(stage * half, (stage + 1) * half):
                n = gf.nn.layer_norm(h, p[f"first_scale{i}"], p[f"first_shift{i}"])
                q, k, v = gf.split(n @ p[f"qkv{i}"] + p[f"qkv_bias{i}"], 3, axis=-1)
                seen = gf.nn.attention(heads(q), heads(k), heads(v), causal=True)
                seen = gf.reshape(gf.permute_dims(seen, (0, 2, 1, 3)), (BATCH, gpt.TIME, gpt.WIDTH))
                h = h + seen @ p[f"out{i}"] + p[f"out_bias{i}"]
                n = gf.nn.layer_norm(h, p[f"second_scale{i}"], p[f"second_shift{i}"])
                n = gf.nn.gelu(n @ p[f"up{i}"] + p[f"up_bias{i}"])
                h = h + n @ p[f"down{i}"] + p[f"down_bias{i}"]
            if stage == STAGES - 1:
                return gf.mean(gf.nn.cross_entropy(h @ p["head"], targets))
    return None


@contextmanager
def ours() -> Iterator[tuple[gf.Session, Callable[[], float]]]:
    gpt.LAYERS = LAYERS
    p = {name: gf.variable(value, name=name) for name, value in gpt.weights().items()}
    ids, targets = (gf.placeholder("int64", (BATCH, gpt.TIME), name=n) for n in ("ids", "targets"))
    loss = loss_of(p, ids, targets)
    strategy = gf.parallel.Pipeline([f"stage{s}" for s in range(STAGES)], "1f1b", MICRO)
    train = gf.optim.SGD(0.01).minimize(loss, strategy=strategy)
    given = dict(zip((ids, targets), feeds(), strict=True))
    with gf.Session(gf.Cluster.local(STAGES, threads=1)) as s:
        yield s, lambda: float(s.run([loss, train], given)[0])


Pass = tuple[str, int, int]
"""F or B, the stage, the micro-batch."""


def passes(events: Iterable[Any], stage: int) -> dict[Pass, tuple[float, float, float]]:
    """When each pass of a stage began and ended, and how long it computed in between.

    A node tells its pass by its name, but for what adds to the sums of gradients, which is named
    after the first micro-batch, and what gradients share; these belong to the pass that they run
    in. Passes come in the schedule's order; the updates after the last one do not count.
    """
    order = [(t.phase, t.microbatch) for t in one_f_one_b(STAGES, MICRO).orders[stage]]
    found: dict[Pass, tuple[float, float, float]] = {}
    at = -1
    for e in sorted(events, key=lambda e: e.start):
        micro, _, rest = e.name.partition("/")
        if not micro.startswith("micro="):
            if at == len(order) - 1:
                break
            continue
        scope = rest.partition("/")[0]
        told = {f"stage{stage}": "F", "gradients": "B"}.get(scope)
        if at + 1 < len(order) and (told, int(micro[6:])) == order[at + 1]:
            at += 1
        if at >= 0:
            phase, microbatch = order[at]
            key = (phase, stage, microbatch)
            begun, _, took = found.get(key, (e.start, e.end, 0.0))
            found[key] = (begun, e.end, took + e.end - e.start)
    return found


def idle(s: gf.Session, step: Callable[[], float]) -> dict[str, float]:
    """The share of all passes' time in which a worker computes none, as traced; what the schedule
    says for the times that the stages' passes and transfers took in the same step; and the closed
    form of passes that all take the same time.

    A stage's gradient leaves as soon as it is made, before the last weights' gradients of its pass:
    in the schedule these are a part of their own, right behind the other (W, where the form has
    one backward pass that is read at its end).
    """
    with s.trace() as trace:
        for _ in range(9):
            step()
    shares: list[float] = []
    planned: list[float] = []
    for each in trace.steps[1:]:
        spans: dict[Pass, tuple[float, float, float]] = {}
        late: dict[Pass, float] = {}
        for stage in range(STAGES):
            own = [e for e in each.events if e.track.startswith(f"/worker:{stage}/")]
            found = passes([e for e in own if e.kind == "compute"], stage)
            spans |= found
            late |= {name: behind(own, span) for name, span in found.items() if name[0] == "B"}
        begun, ended = (
            pick(span[i] for span in spans.values()) for i, pick in ((0, min), (1, max))
        )
        took = {name: seconds for name, (*_, seconds) in spans.items()}
        shares.append(1 - sum(took.values()) / (ended - begun) / STAGES)
        f, b, w = by_stage(took, "F"), by_stage(took, "B"), by_stage(late, "B")
        first = [whole - part for whole, part in zip(b, w, strict=True)]
        way = fmean(e.end - e.start for e in each.events if e.kind == "transfer")
        planned.append(run(divided(), f, first, w, way).bubble)
    even = (STAGES - 1) / (MICRO + STAGES - 1)
    result = {"measured": median(shares), "by the schedule": median(planned), "equal passes": even}
    print("\nidle share of the two workers")
    for name, share in result.items():
        print(f"  {name:<20} {share:6.1%}")
    return result


def by_stage(seconds: dict[Pass, float], phase: str) -> list[float]:
    return [fmean(seconds[phase, s, m] for m in range(MICRO)) for s in range(STAGES)]


def behind(events: Iterable[Any], span: tuple[float, float, float]) -> float:
    """How long a pass computed after the last that it sent; 0 if it sent nothing."""
    begun, ended, _ = span
    sends = [e.end for e in events if e.kind == "send" and begun < e.end <= ended]
    sent = max(sends, default=ended)
    return sum(e.end - e.start for e in events if e.kind == "compute" and sent <= e.start < ended)


def divided() -> Schedule:
    """1F1B with each backward pass in two: what other stages wait for, and the rest."""
    whole = one_f_one_b(STAGES, MICRO)
    orders = tuple(
        tuple(
            part
            for task in order
            for part in ((task,) if task.phase == "F" else (task, task._replace(phase="W")))
        )
        for order in whole.orders
    )
    return replace(whole, name="1f1b, divided", orders=orders)


# Theirs ---------------------------------------------------------------------------------------


def peer(rank: int, store: str) -> None:
    """One process of torch's pipeline: runs so many steps for each line that comes, and answers
    with the seconds."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=STAGES
    )
    gpt.LAYERS, half = LAYERS, LAYERS // STAGES

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mine = {str(i) for i in range(rank * half, (rank + 1) * half)}
            self.p = torch.nn.ParameterDict({
                name: torch.nn.Parameter(torch.from_numpy(value))
                for name, value in gpt.weights().items()
                if name[-1] in mine or (rank == 0 and name in ("tokens", "places"))
                or (rank == STAGES - 1 and name == "head")
            })  # fmt: skip

        def forward(self, h: Any) -> Any:
            p, w = self.p, gpt.WIDTH
            if rank == 0:
                h = functional.embedding(h, p["tokens"]) + p["places"]
            for i in range(rank * half, (rank + 1) * half):
                n = functional.layer_norm(h, (w,), p[f"first_scale{i}"], p[f"first_shift{i}"])
                q, k, v = (n @ p[f"qkv{i}"] + p[f"qkv_bias{i}"]).split(w, -1)
                q, k, v = (t.unflatten(-1, (gpt.HEADS, -1)).transpose(1, 2) for t in (q, k, v))
                seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                seen = seen.transpose(1, 2).flatten(2)
                h = h + seen @ p[f"out{i}"] + p[f"out_bias{i}"]
                n = functional.layer_norm(h, (w,), p[f"second_scale{i}"], p[f"second_shift{i}"])
                n = functional.gelu(n @ p[f"up{i}"] + p[f"up_bias{i}"])
                h = h + n @ p[f"down{i}"] + p[f"down_bias{i}"]
            return h @ p["head"] if rank == STAGES - 1 else h

    def loss(scores: Any, targets: Any) -> Any:
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    module = Stage()
    stage = PipelineStage(module, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    ids, targets = map(torch.from_numpy, feeds())
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(ids)
            else:
                schedule.step(target=targets, losses=[])
            optimizer.step()
        print(time.perf_counter() - start, flush=True)


@contextmanager
def theirs() -> Iterator[Steps]:
    """Torch's two processes as one contender; nothing where torch is missing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--peer"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        peers = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/store"], text=True, env=env,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
            for rank in range(STAGES)
        ]  # fmt: skip
        try:
            if any(each.stdout.readline() != "ready\n" for each in peers):
                print("torch is left out (pip install -e '.[bench]')")
                yield {}
                return

            def step() -> None:
                for each in peers:
                    each.stdin.write("1\n")
                    each.stdin.flush()
                for each in peers:
                    each.stdout.readline()

            yield {"torch pipelining": step}
        finally:
            for each in peers:
                each.kill()
                each.wait()


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        peer(int(sys.argv[2]), sys.argv[3])
        return
    options = arguments("GPT in a pipeline of two local workers").parse_args()
    with ours() as (s, step), theirs() as others:
        seconds = interleaved({"graphflow": step, **others}, min(options.rounds, 10), each=EACH)
        title = f"GPT of {LAYERS} blocks in {STAGES} stages, 1F1B, {MICRO} micro-batches"
        result = report(title, seconds, goal=GOAL)
        result["idle"] = idle(s, step)
    write("pipeline", [result], options.output)


if __name__ == "__main__":
    main()
