"""A GPT in a pipeline of two local workers of one thread each, against torch.distributed.pipelining
with gloo; and how long each worker is idle, against the closed form.

    python benchmarks/processes/pipeline.py [--rounds 8] [--idle] [--output results/pipeline.json]

Both run four GPT blocks (B 16, T 128, d 256, h 4) in two stages by 1F1B with four micro-batches,
and an SGD step at the end. The two take turns: while one computes, the other's processes wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

import graphflow as gf
from graphflow.parallel import Schedule, Task, gpipe, interleaved, one_f_one_b, run, zb_h1, zb_h2

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import gpt
from peers import Steps, arguments, report, write
from peers import interleaved as interleaved_steps

DEVICES, MICRO, BATCH, LAYERS, EACH, TRACED = 2, 4, 16, 4, 3, 16
SESSIONS = 5  # of each schedule, by turns: where memory lies makes one worker slower than the other
GOAL = 0.9
SCHEDULES = {
    "GPipe": gpipe(DEVICES, MICRO, recompute=False),
    "1F1B": one_f_one_b(DEVICES, MICRO),
    "interleaved": interleaved(2 * DEVICES, MICRO, chunks=2),
    "ZB-H1": zb_h1(DEVICES, MICRO),
    "ZB-H2": zb_h2(DEVICES, MICRO),
}

_PUT_OFF = {"ZB-H1": 1, "ZB-H2": 2}  # passes W that fill what would be idle


def feeds() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    first, second = (random.integers(0, gpt.VOCABULARY, (BATCH, gpt.TIME)) for _ in range(2))
    return first, second


# Ours -----------------------------------------------------------------------------------------


def gpt_of(p: dict[str, Any]) -> tuple[Any, dict[Any, np.ndarray]]:
    """The loss of the model of benchmarks/models/gpt.py, and what it is given."""
    ids, targets = (gf.placeholder("int64", (BATCH, gpt.TIME), name=n) for n in ("ids", "targets"))
    with gf.name_scope("block0"):
        h = gf.nn.embedding(ids, p["tokens"]) + p["places"]
    h = blocks(p, h)
    with gf.name_scope(f"block{LAYERS - 1}"):
        loss = gf.mean(gf.nn.cross_entropy(h @ p["head"], targets))
    return loss, dict(zip((ids, targets), feeds(), strict=True))


def alike(p: dict[str, Any]) -> tuple[Any, dict[Any, np.ndarray]]:
    """The same with its blocks alone: stages take the same time, as closed forms have it."""
    shape = (BATCH, gpt.TIME, gpt.WIDTH)
    x, y = (gf.placeholder("float32", shape, name=name) for name in "xy")
    with gf.name_scope("block0"):
        h = x + p["places"]  # which has a gradient, as what goes into every other stage has
    h = blocks(p, h)
    with gf.name_scope(f"block{LAYERS - 1}"):
        loss = gf.mean(gf.square(h - y))
    random = np.random.default_rng(1)
    return loss, {each: random.normal(size=shape).astype("float32") for each in (x, y)}


def blocks(p: dict[str, Any], h: Any) -> Any:
    """All blocks, each under its scope."""

    def heads(x: Any) -> Any:
        cut = gf.reshape(x, (BATCH, gpt.TIME, gpt.HEADS, gpt.HEAD))
        return gf.permute_dims(cut, (0, 2, 1, 3))

    for i in range(LAYERS):
        with gf.name_scope(f"block{i}"):
            n = gf.nn.layer_norm(h, p[f"first_scale{i}"], p[f"first_shift{i}"])
            q, k, v = gf.split(n @ p[f"qkv{i}"] + p[f"qkv_bias{i}"], 3, axis=-1)
            seen = gf.nn.attention(heads(q), heads(k), heads(v), causal=True)
            seen = gf.reshape(gf.permute_dims(seen, (0, 2, 1, 3)), (BATCH, gpt.TIME, gpt.WIDTH))
            h = h + seen @ p[f"out{i}"] + p[f"out_bias{i}"]
            n = gf.nn.layer_norm(h, p[f"second_scale{i}"], p[f"second_shift{i}"])
            n = gf.nn.gelu(n @ p[f"up{i}"] + p[f"up_bias{i}"])
            h = h + n @ p[f"down{i}"] + p[f"down_bias{i}"]
    return h


@contextmanager
def ours(
    name: str, model: Callable[..., tuple[Any, dict[Any, Any]]] = gpt_of
) -> Iterator[Pipeline]:
    gpt.LAYERS = LAYERS
    p = {name: gf.variable(value, name=name) for name, value in gpt.weights().items()}
    loss, given = model(p)
    schedule = SCHEDULES[name]
    scopes = np.array_split([f"block{i}" for i in range(LAYERS)], schedule.stages)
    strategy = gf.parallel.Pipeline([list(each) for each in scopes], schedule)
    train = gf.optim.SGD(0.01).minimize(loss, strategy=strategy)
    with gf.Session(gf.Cluster.local(DEVICES, threads=1)) as s:
        yield Pipeline(schedule, s, [loss, train], given)


@dataclass(frozen=True)
class Pipeline:
    """A training step, ready to run."""

    schedule: Schedule
    session: gf.Session
    fetches: list[Any]
    given: dict[Any, Any]

    def step(self) -> float:
        return float(self.session.run(self.fetches, self.given)[0])


# Idle time --------------------------------------------------------------------------------------

Spans = dict[Task, tuple[float, float, float]]
"""When each pass began and ended, and how long its device worked in between; seconds."""


@dataclass(frozen=True)
class Idle:
    """Seconds of a step, all in the mean over devices.

    Attributes:
        measured: what a device waits of the time from its first pass to its last (of the device
            where that is longest).
        form: (p-1)(f+b)/v, for ZB-H1 (p-1)(f+b-w) and for ZB-H2 (p-1)(f+b-2w), with these f, b, w.
        stages: what the schedule says for what each stage's passes took in the same step: the form,
            if stages were equal.
        schedule: the same with what a transfer took, of which the form knows nothing.
        textbook: the form with all of a backward pass for b, as if its gradient left at its end.
        f, b, w: of a micro-batch through all stages of a device: a forward pass; a backward pass
            until its gradient has left; what it computes after that, weights' gradients (both of
            stages that send one).
        period: from the first pass to the last.
    """

    measured: float
    form: float
    stages: float
    schedule: float
    textbook: float
    f: float
    b: float
    w: float
    period: float


def idle(pipeline: Pipeline) -> dict[str, float]:
    """The idle time by trace, in the median of the quicker half of the steps: a stranger's turn on
    one processor is another device's wait."""
    with pipeline.session.trace() as trace:
        for _ in range(TRACED):
            pipeline.step()
    plan = pipeline.session.plan(pipeline.fetches)
    every = [idle_of(each, plan, pipeline.schedule) for each in trace.steps[1:]]
    found = sorted(every, key=lambda each: each.period)[: TRACED // 2]
    return {
        field.name: median(getattr(each, field.name) for each in found) for field in fields(Idle)
    }


def idle_of(traced: Any, plan: Any, schedule: Schedule) -> Idle:
    """The idle time of one step."""
    spans: Spans = {}
    late: dict[Task, float] = {}
    periods = []
    for device, order in zip(plan.cluster.devices, schedule.orders, strict=True):
        own = [e for e in traced.events if e.track == device]
        found = passes(own, order, tasks_of(plan, schedule, device))
        assert len(found) == len(order), f"{device}: {len(order) - len(found)} passes are missing"
        spans |= found
        late |= {t: behind(own, span) for t, span in found.items() if t.phase == "B"}
        periods.append(max(e for _, e, _ in found.values()) - min(b for b, *_ in found.values()))
    took = {task: seconds for task, (*_, seconds) in spans.items()}
    f, b = (by_stage(took, phase, schedule) for phase in "FB")
    if schedule.splits_backward:
        whole, w = b, by_stage(took, "W", schedule)
    else:
        whole, w = b, by_stage(late, "B", schedule)
        b = [both - after for both, after in zip(b, w, strict=True)]
    p, v = schedule.devices, schedule.stages // schedule.devices
    forward = fmean(f) * v
    until, after, until_all = (fmean(each[1:]) * v for each in (b, w, whole))
    less = _PUT_OFF.get(schedule.name, 0) * after
    measured = max(periods) - sum(took.values()) / p
    at_once, sent = (run(divided(schedule), f, b, w, t) for t in (0.0, way(traced.events)))
    return Idle(
        measured,
        (p - 1) * (forward + until - less) / v,
        fmean(at_once.idle),
        fmean(sent.idle),
        (p - 1) * (forward + until_all - less) / v,
        forward,
        until,
        after,
        max(periods),
    )


def tasks_of(plan: Any, schedule: Schedule, device: str) -> dict[str, Task]:
    """The tasks that the nodes of a device are for."""
    labels = {}
    for task in schedule.orders[plan.cluster.devices.index(device)]:
        label = f"{task.phase}{task.microbatch}"
        labels[f"{label}/{task.stage}" if schedule.several else label] = task
    return {n.name: labels[n.task] for n in plan.nodes if n.device == device and n.task in labels}


def passes(events: Sequence[Any], order: Sequence[Task], told: Mapping[str, Task]) -> Spans:
    """The passes of a device: what it computes in them, and what it takes to hand that on.

    What adds up gradients of several micro-batches bears the name of one, and belongs to the pass
    that it runs in. Updates, after the last pass, do not count.
    """
    found: Spans = {}
    at = -1
    for e in events:
        task = told.get(e.name) if e.kind == "compute" else None
        if at + 1 < len(order) and task == order[at + 1]:
            at += 1
        if at < 0 or e.kind == "wait":
            continue
        if at + 1 == len(order) and e.kind == "compute" and task != order[at]:
            break
        start, end = e.start * 1e-9, e.end * 1e-9
        begun, _, took = found.get(order[at], (start, end, 0.0))
        found[order[at]] = (begun, end, took + end - start)
    return found


def behind(events: Sequence[Any], span: tuple[float, float, float]) -> float:
    """How long a pass computed after the last that it sent; 0 if it sent nothing."""
    begun, ended, _ = span
    inside = [e for e in events if begun <= e.start * 1e-9 < ended]
    sent = max((e.end for e in inside if e.kind == "send"), default=None)
    after = (e for e in inside if e.kind == "compute" and sent is not None and e.start >= sent)
    return float(sum(e.end - e.start for e in after)) * 1e-9


def way(events: Sequence[Any]) -> float:
    """The seconds from the end of a send to the arrival, in the median."""
    sent = {e.edge: e.end for e in events if e.kind == "send"}
    came = [(e.edge, e.end) for e in events if e.kind == "transfer" and e.edge in sent]
    return float(median(max(end - sent[edge], 0) for edge, end in came)) * 1e-9


def by_stage(seconds: Mapping[Task, float], phase: str, schedule: Schedule) -> list[float]:
    """The mean over micro-batches."""
    return [
        fmean(s for task, s in seconds.items() if (task.phase, task.stage) == (phase, stage))
        for stage in range(schedule.stages)
    ]


def divided(schedule: Schedule) -> Schedule:
    """A schedule with each backward pass in two: what other stages wait for, and the rest."""
    if schedule.splits_backward:
        return schedule
    orders = tuple(
        tuple(
            part
            for task in order
            for part in ((task,) if task.phase == "F" else (task, task._replace(phase="W")))
        )
        for order in schedule.orders
    )
    return replace(schedule, name=f"{schedule.name}, divided", orders=orders)


def told(found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Print the idle times, in ms, and their ratios: medians over sessions; of what counts, the
    closed form's, the least and the greatest, too."""
    columns = ("measured", "form", "stages", "schedule", "textbook", "f", "b", "w", "period")
    print(f"\n{'idle, ms a device':<20}" + "".join(f"{c:>10}" for c in columns) + "     measured /")
    for name, rows in found.items():
        ratios = {c: sorted(row["measured"] / row[c] for row in rows) for c in columns[1:5]}
        print(
            f"{name:<20}"
            + "".join(f"{median(row[c] for row in rows) * 1e3:10.2f}" for c in columns)
            + "".join(f"   {c} {median(each):.2f}" for c, each in ratios.items())
            + f"   form's range {ratios['form'][0]:.2f} to {ratios['form'][-1]:.2f}"
        )


# Theirs ---------------------------------------------------------------------------------------


def peer(rank: int, store: str) -> None:
    """One process of torch's pipeline: runs so many steps for each line that comes, and answers
    with the seconds."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=DEVICES
    )
    gpt.LAYERS, half = LAYERS, LAYERS // DEVICES

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mine = {str(i) for i in range(rank * half, (rank + 1) * half)}
            self.p = torch.nn.ParameterDict({
                name: torch.nn.Parameter(torch.from_numpy(value))
                for name, value in gpt.weights().items()
                if name[-1] in mine or (rank == 0 and name in ("tokens", "places"))
                or (rank == DEVICES - 1 and name == "head")
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
            return h @ p["head"] if rank == DEVICES - 1 else h

    def loss(scores: Any, targets: Any) -> Any:
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    module = Stage()
    stage = PipelineStage(module, rank, DEVICES, torch.device("cpu"))
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


def said(process: subprocess.Popen[str]) -> str:
    """The next line that a peer writes."""
    assert process.stdout is not None
    return process.stdout.readline()


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
            for rank in range(DEVICES)
        ]  # fmt: skip
        try:
            if any(said(each) != "ready\n" for each in peers):
                print("torch is left out (pip install -e '.[bench]')")
                yield {}
                return

            def step() -> None:
                for each in peers:
                    assert each.stdin is not None
                    each.stdin.write("1\n")
                    each.stdin.flush()
                for each in peers:
                    said(each)

            yield {"torch pipelining": step}
        finally:
            for each in peers:
                each.kill()
                each.wait()


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        peer(int(sys.argv[2]), sys.argv[3])
        return
    parser = arguments("GPT in a pipeline of two local workers")
    parser.add_argument("--idle", action="store_true", help="only the idle times")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    if not options.idle:
        with ours("1F1B") as pipeline, theirs() as others:
            steps = {"graphflow": pipeline.step, **others}
            seconds = interleaved_steps(steps, min(options.rounds, 10), each=EACH)
            title = f"GPT of {LAYERS} blocks in {DEVICES} stages, 1F1B, {MICRO} micro-batches"
            results.append(report(title, seconds, goal=GOAL))
    waits: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    for _ in range(SESSIONS):
        for name, rows in waits.items():
            with ours(name, alike) as pipeline:
                for _ in range(EACH):
                    pipeline.step()
                rows.append(idle(pipeline))
    told(waits)
    write(
        "pipeline", [*results, {"title": "idle seconds of a device", "idle": waits}], options.output
    )


if __name__ == "__main__":
    main()
