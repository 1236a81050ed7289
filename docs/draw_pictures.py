"""Draw the pictures of README.md and docs that real runs make, as images/NAME.svg.

    pip install '.[demo]'
    python docs/draw_pictures.py recovery training status trace
    python benchmarks/processes/comparison.py --parts steps --output comparison.json
    python docs/draw_pictures.py speed --figures comparison.json

- recovery: the loss over seconds without a fault, and with a worker that is killed three times.
- training: the curve of examples/digits_cnn.py.
- speed: training steps beside other libraries, of the files that the benchmark wrote.
- status: the tables of `graphflow status` while two workers train.
- trace: the table of edges of a traced training.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
EXAMPLES = DOCS.parent / "examples"
sys.path[:0] = [str(DOCS.parent), str(EXAMPLES)]

import graphflow as gf  # noqa: E402
from graphflow.placement.view.line_chart import LineChart, draw_lines  # noqa: E402

BOLD, NO_BREAK_SPACE = ' style="font-weight: 700"', "\N{NO-BREAK SPACE}"  # SVG joins other spaces
STEPS, KILLED_AT, EVERY = 200, (50, 100, 150), 10
COLOURS = {"graphflow": "#2f6fde", "torch": "#d9622b", "torch.compile": "#e8a37f",
           "jax": "#2c9a5b", "tensorflow": "#a23fb5"}  # fmt: skip
Curve = list[tuple[float, float]]


def draw_recovery(_: Sequence[Path]) -> str:
    """Train twice, and kill a worker three times in one of both."""
    with tempfile.TemporaryDirectory() as folder:
        unbroken = train_towers(())
        broken = train_towers(KILLED_AT, checkpoint=folder, every=EVERY)
    assert [loss for _, loss in unbroken] == [loss for _, loss in broken]
    title = f"A worker killed three times: all {STEPS} losses are bit-equal"
    curves = [("no fault", means(unbroken)), ("killed 3 times", means(broken))]
    return draw_lines(LineChart(title, "seconds of training", curves, log_y=True))


def means(curve: Curve, each: int = 10) -> Curve:
    """Return the mean loss of each ten steps, at the last one's end."""
    parts = [curve[i : i + each] for i in range(0, len(curve), each)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]


def train_towers(killed_at: Sequence[int], **options: Any) -> Curve:
    """Train the towers on two workers, and return (seconds, loss) of each step."""
    from digits_towers import Towers, batches, split_digits

    model = Towers(towers=4, width=128)
    images, _, labels, _ = split_digits()
    feeds = list(islice(batches(model, images, labels, 64, epochs=1000), STEPS))
    replicas = gf.parallel.Data(replicas=2)  # so that each worker has a part of each step
    train = gf.optim.SGD(0.1, momentum=0.9).minimize(model.loss, strategy=replicas)
    step, curve = [model.loss, train], []
    with gf.Session(gf.Cluster.local(workers=2, threads=1), **options) as session:
        session.warmup(step, {placeholder: rows.shape for placeholder, rows in feeds[0].items()})
        start = time.perf_counter()
        for number, feed in enumerate(feeds):
            if number in killed_at:
                pid = session.workers[1].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            loss, _ = session.run(step, feed)
            curve.append((time.perf_counter() - start, float(loss)))
    return curve


def draw_training(_: Sequence[Path]) -> str:
    """Run the example, and return its curve."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXAMPLES / "digits_cnn.py"), "--out", folder]
        environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
        subprocess.run(command, check=True, env=environment)
        return (Path(folder) / "digits_cnn.svg").read_text(encoding="utf-8")


def draw_speed(figures: Sequence[Path]) -> str:
    """Return bars of each library's step over graphflow's, for each model and number of threads."""
    found = [each for file in figures for each in json.loads(file.read_text())["results"]]
    found = sorted((each for each in found if "first_seconds" in each), key=itemgetter("title"))
    steps = {each["title"]: each["median_seconds"] for each in found}
    if not steps:
        raise SystemExit("speed: give files of benchmarks/processes/comparison.py by --figures")
    return bars("Seconds of a training step over graphflow's (less is better)", steps)


def bars(title: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """Return horizontal bars in groups, each over the first of its group."""
    parts, y = [f'<text class="h1" x="130" y="26">{escape(title)}</text>'], 44
    longest = max(max(group.values()) / group["graphflow"] for group in groups.values())
    for name, group in groups.items():
        middle = y + 7 * len(group) + 4
        parts.append(f'<text x="118" y="{middle}" text-anchor="end">{escape(name)}</text>')
        for library, seconds in group.items():
            ratio = seconds / group["graphflow"]
            width = 440 * ratio / longest
            told = escape(f"{library} {ratio:.2f}")
            parts.append(f'<rect x="130" y="{y}" width="{width:.1f}" height="12" '
                         f'fill="{COLOURS[library]}"/>')  # fmt: skip
            parts.append(f'<text class="small" x="{136 + width:.1f}" y="{y + 10}">{told}</text>')
            y += 14
        y += 12
    style = (
        "text { font: 12px Inter, Helvetica, Arial, 'DejaVu Sans', sans-serif; fill: #1c2733 } "
        ".h1 { font-size: 15px; font-weight: 650 } .small { font-size: 11px; fill: #5b6876 }"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{y}" '
        f'viewBox="0 0 760 {y}" role="img">\n<title>{escape(title)}</title>\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" rx="10" fill="#fff"/>\n'
        + "\n".join([*parts, "</svg>", ""])
    )


def draw_status(_: Sequence[Path]) -> str:
    """Ask two workers for their status while a thread trains on them."""
    with open_training() as (session, run_step):
        ends = threading.Event()

        def train() -> None:
            while not ends.is_set():
                run_step()

        thread = threading.Thread(target=train)
        thread.start()
        try:
            time.sleep(3.0)
            addresses = [str(worker.address) for worker in session.workers]
            command = [sys.executable, "-m", "graphflow", "status", *addresses]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        finally:
            ends.set()
            thread.join()
    return draw_text("graphflow status", done.stdout)


def draw_trace(_: Sequence[Path]) -> str:
    """Trace twenty training steps over two workers."""
    with open_training() as (session, run_step), session.trace() as trace:
        for _ in range(20):
            run_step()
    return draw_text("print(trace)", str(trace))


@contextmanager
def open_training() -> Iterator[tuple[gf.Session, Callable[[], object]]]:
    """Open a session on two workers that have every other layer; yield it and its step."""
    x = h = gf.placeholder("float32", (None, 256), name="x")
    for number in range(6):
        with gf.device(f"/worker:{number % 2}"):
            h = gf.tanh(h @ gf.variable(gf.init.glorot((256, 256)), name=f"w{number}"))
    loss = gf.mean(gf.square(h - x))
    train = gf.optim.SGD(0.1).minimize(loss)
    rows = np.random.default_rng(0).normal(size=(256, 256)).astype("float32")
    with gf.Session(gf.Cluster.local(workers=2, threads=1), trial=False) as session:
        yield session, lambda: session.run([loss, train], {x: rows})


def draw_text(title: str, text: str) -> str:
    """Return lines of text as a terminal shows them; headings, which are not indented, are bold."""
    lines = [line.rstrip().replace(" ", NO_BREAK_SPACE) for line in text.rstrip().splitlines()]
    width, height = 24 + 7.3 * max(map(len, lines)), 24 + 18 * len(lines)
    drawn = [
        f'<text x="12" y="{26 + 18 * number}"{BOLD * (line[0] != NO_BREAK_SPACE)}>'
        f"{escape(line)}</text>"
        for number, line in enumerate(lines)
        if line
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" role="img">\n<title>{escape(title)}</title>\n'
        "<style>text { font: 12px 'DejaVu Sans Mono', Menlo, Consolas, monospace; "
        "fill: #1c2733 }</style>\n"
        '<rect width="100%" height="100%" rx="10" fill="#fff"/>\n'
        + "\n".join([*drawn, "</svg>", ""])
    )


PICTURES: dict[str, Callable[[Sequence[Path]], str]] = {
    "recovery": draw_recovery, "training": draw_training, "speed": draw_speed,
    "status": draw_status, "trace": draw_trace,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pictures", nargs="+", choices=PICTURES)
    parser.add_argument("--figures", nargs="*", type=Path, default=[], help="JSON, for speed")
    options = parser.parse_args()
    for name in options.pictures:
        file = IMAGES / f"{name}.svg"
        file.write_text(PICTURES[name](options.figures), encoding="utf-8")
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
