"""Filter a picture that is too large for one device: each worker holds a band of its rows.

    python examples/image_filters.py
    python examples/image_filters.py --workers 3 --height 768 --width 1024 --out /tmp/filtered

The network is a chain of filters: smooth noise (Gauss, 7x7), find edges (Sobel, 3x3, both
directions), widen the lines (5x5), and sharpen the picture there (3x3). A 3x3 window at the edge of
a band reads one row of the neighbouring band, its halo. Nothing else travels.

    gf.parallel.Shard(mesh={"rows": 2}, rules={"picture": (None, None, "rows")})

is the only change; the network stays as it is. The program prints the bytes that travel for each
filter, and the formula 2 * floor(k/2) * W * C * itemsize for each cut between two bands. It prints
the error of the result and of each filter's gradient against one device (below 1e-6), and the step
times. It writes before.png, after.png and plan.html.
"""

from __future__ import annotations

import argparse
import struct
import time
import zlib
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from command_line import check_folder, positive_int, run_program

import graphflow as gf

Array = np.ndarray[Any, Any]
CLOSE = 1e-6
TRIES = 5


# The picture ------------------------------------------------------------------------------------


def draw_landscape(height: int, width: int) -> Array:
    """Return mountains, a sun and noise: (1, 1, height, width), from 0 to 1."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[0:height, 0:width] / np.array([height, width]).reshape(2, 1, 1)
    picture = 0.75 - 0.35 * y
    picture[(x - 0.75) ** 2 + (y - 0.25) ** 2 < 0.012] = 1.0
    for depth, tone in ((0.45, 0.5), (0.6, 0.35), (0.78, 0.15)):
        waves = sum(
            np.sin(2 * np.pi * (f * x[0] + random.random())) / f for f in (1, 2, 3, 5, 9, 17)
        )
        picture[y > depth + 0.07 * np.asarray(waves)] = tone
    noisy = picture + random.normal(scale=0.05, size=picture.shape)
    return noisy.clip(0, 1).astype("float32")[None, None]


def encode_png(picture: Array) -> bytes:
    """Return a grey picture of numbers from 0 to 1 as a PNG file."""
    grey = (picture.clip(0, 1) * 255).round().astype("uint8")
    lines = b"".join(b"\0" + row.tobytes() for row in grey)
    head = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(kind, data)
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    )


# The network ------------------------------------------------------------------------------------


def gauss_window(size: int) -> Array:
    """Return the weights of a smoothing window."""
    line = np.exp(-0.5 * (np.arange(size) - size // 2) ** 2 / (size / 5) ** 2)
    window = np.outer(line, line)
    return window / window.sum()


SOBEL = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]]) / 4
SHARPER = np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0]])
FILTERS: dict[str, Array] = {  # (output channels, input channels, k, k)
    "smooth": gauss_window(7)[None, None],
    "edges": np.stack([SOBEL, SOBEL.T])[:, None],
    "bold": np.tile(gauss_window(5), (1, 2, 1, 1)),
    "sharpen": SHARPER[None, None],
}


class Network:
    """The filters as a graph, with a loss and its gradient for each filter.

    Args:
        strategy: how the graph is partitioned; None for one device.
    """

    def __init__(self, height: int, width: int, strategy: Any = None) -> None:
        shape = (1, 1, height, width)
        self.picture = gf.placeholder("float32", shape, name="picture")
        self.weights = {
            name: gf.variable(w.astype("float32"), name=name) for name, w in FILTERS.items()
        }
        smooth = self._filter("smooth", self.picture)
        across = self._filter("edges", smooth)
        edges = gf.sqrt(gf.sum(across * across, axis=1, keepdims=True) + 1e-6)
        lines = self._filter("bold", gf.concat([edges, edges], axis=1))
        drawn = smooth * (1.0 - gf.tanh(4.0 * lines))
        self.result = self._filter("sharpen", drawn)
        # A loss from which the filters could learn: the result should equal the picture.
        self.loss = gf.mean(gf.square(self.result - self.picture))
        self.train = gf.optim.SGD(1.0).minimize(self.loss, strategy=strategy)

    def _filter(self, name: str, value: gf.Tensor) -> gf.Tensor:
        with gf.name_scope(name):
            return gf.nn.conv(value, self.weights[name], padding="same")

    def run(self, cluster: gf.Cluster, picture: Array) -> tuple[Array, dict[str, Array], float]:
        """Return the filtered picture, the gradient of each filter, and the seconds of a step."""
        feeds = {self.picture: picture}
        with gf.Session(cluster) as session:
            before = {name: session.get(w) for name, w in self.weights.items()}
            result, _ = session.run([self.result, self.train], feeds)
            # A step of SGD at rate 1 subtracts the gradient.
            gradients = {name: before[name] - session.get(w) for name, w in self.weights.items()}
            seconds = []
            for _ in range(TRIES):
                start = time.perf_counter()
                session.run(self.result, feeds)
                seconds.append(time.perf_counter() - start)
        return result[0, 0], gradients, median(seconds)


def reported_halo_bytes(
    network: Network, strategy: gf.parallel.Shard, cluster: gf.Cluster
) -> dict[str, int]:
    """Return the bytes of halos by filter, from the strategy's report."""
    found: dict[str, int] = {}
    for move in strategy.report(network.result, cluster).collectives:
        if move.kind == "halo":
            name = move.cause.partition("/")[0]
            found[name] = found.get(name, 0) + move.bytes
    return found


def expected_halo_bytes(name: str, width: int, workers: int) -> int:
    """Return the bytes that a filter's windows read beyond their bands, at all inner cuts."""
    _, channels, size, _ = FILTERS[name].shape
    return (workers - 1) * 2 * (size // 2) * width * channels * 4


# The program ------------------------------------------------------------------------------------


def main() -> None:
    options = parse_arguments()
    picture = draw_landscape(options.height, options.width)
    cluster = gf.Cluster.local(options.workers, threads=1)
    one = Network(options.height, options.width)
    whole, wanted, alone = one.run(gf.Cluster.here(devices=["cpu:0"], threads=1), picture)

    strategy = gf.parallel.Shard({"rows": options.workers}, {"picture": (None, None, "rows")})
    network = Network(options.height, options.width, strategy)
    result, gradients, together = network.run(cluster, picture)

    print(f"{options.height} x {options.width}, in {options.workers} bands of rows\n")
    print(f"{'filter':>8}  {'window':>6}  {'halo, bytes':>12}  {'formula':>12}  gradient off by")
    sent, right = reported_halo_bytes(network, strategy, cluster), True
    for name, weights in FILTERS.items():
        k, due = weights.shape[-1], expected_halo_bytes(name, options.width, options.workers)
        off = float(np.abs(gradients[name] - wanted[name]).max())
        print(f"{name:>8}  {k} x {k:<2}  {sent.get(name, 0):12,}  {due:12,}  {off:.1e}")
        right &= sent.get(name, 0) == due and off <= CLOSE
    apart = float(np.abs(result - whole).max())
    print(f"\nthe results on one device and on bands differ by at most {apart:.1e}")
    print(f"a pass over the picture: {alone * 1e3:.1f} ms on one worker, {together * 1e3:.1f} on "
          f"{options.workers}")  # fmt: skip

    pictures = {"before": encode_png(picture[0, 0]), "after": encode_png(result)}
    plan = gf.plan([network.result, network.train], cluster)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, each in pictures.items():
        (options.out / f"{name}.png").write_bytes(each)
    written = save_plan(plan, options.out)
    print(f"wrote {options.out / 'before.png'}, {options.out / 'after.png'} and {written}")
    if not right or apart > CLOSE:
        raise SystemExit("the partitioned network differs from the one on a single device")


def save_plan(plan: gf.Plan, folder: Path) -> Path:
    """Save the plan as a page, or as a drawing if bokeh is missing."""
    try:
        return plan.save(folder / "plan.html")
    except gf.errors.PlanError:
        return plan.save(folder / "plan.svg")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, told in (
        ("workers", 2, "worker processes; default: 2"),
        ("height", 512, "rows of the picture; default: 512"),
        ("width", 512, "columns; default: 512"),
    ):
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=told)
    parser.add_argument(
        "--out", type=Path, default=Path("filtered"), help="folder; default: filtered/"
    )
    options = parser.parse_args()
    tallest = max(w.shape[-1] for w in FILTERS.values())
    if options.height < tallest * options.workers or options.width < tallest:
        parser.error(
            f"--height {options.height} --width {options.width}: each of the {options.workers} "
            f"bands is at least {tallest} rows and columns, the largest window"
        )
    check_folder(parser, "--out", options.out)
    return options


if __name__ == "__main__":
    run_program(main)
