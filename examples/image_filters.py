"""Filter a picture too large for one device: each worker has a band of its rows, and no more.

    python examples/image_filters.py
    python examples/image_filters.py --workers 3 --height 768 --width 1024 --out /tmp/filtered

The network is a chain of filters: noise is smoothed away (Gauss, 7x7), edges are found (Sobel, 3x3,
both directions), lines are made bold (5x5), and the picture is sharpened where they are (3x3). A
3x3 window at the edge of a band sees a row of the neighbour's: a halo. Nothing else travels.

    gf.parallel.Shard(mesh={"rows": 2}, rules={"picture": (None, None, "rows")})

is all that is said; the network does not know. The program prints what travels, filter by filter,
against the formula 2 * floor(k/2) * W * C * itemsize for each cut between two bands; how far the
result, and the gradient of a loss for each filter, are from those of the undivided picture (below
1e-6); the step times; and it writes the pictures and the plan: before.png, after.png, plan.html.
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
from command_line import check_folder, positive, run

import graphflow as gf

Array = np.ndarray[Any, Any]
CLOSE = 1e-6
TRIES = 5


# The picture ------------------------------------------------------------------------------------


def landscape(height: int, width: int) -> Array:
    """Mountains, a sun and noise: (1, 1, height, width), from 0 to 1."""
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


def png(picture: Array) -> bytes:
    """A grey picture of numbers from 0 to 1 as a file."""
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


def gauss(size: int) -> Array:
    """Weights of a window that smooths."""
    line = np.exp(-0.5 * (np.arange(size) - size // 2) ** 2 / (size / 5) ** 2)
    window = np.outer(line, line)
    return window / window.sum()


SOBEL = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]]) / 4
SHARPER = np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0]])
FILTERS: dict[str, Array] = {  # (channels that it makes, channels that it reads, k, k)
    "smooth": gauss(7)[None, None],
    "edges": np.stack([SOBEL, SOBEL.T])[:, None],
    "bold": np.tile(gauss(5), (1, 2, 1, 1)),
    "sharpen": SHARPER[None, None],
}


class Network:
    """The filters as a graph, with a loss and the gradient of it for each filter.

    Args:
        strategy: how it is divided; None: on one device.
    """

    def __init__(self, height: int, width: int, strategy: Any = None) -> None:
        shape = (1, 1, height, width)
        self.picture = gf.placeholder("float32", shape, name="picture")
        self.weights = {
            name: gf.variable(w.astype("float32"), name=name) for name, w in FILTERS.items()
        }
        smooth = self._filtered("smooth", self.picture)
        across = self._filtered("edges", smooth)
        edges = gf.sqrt(gf.sum(across * across, axis=1, keepdims=True) + 1e-6)
        lines = self._filtered("bold", gf.concat([edges, edges], axis=1))
        drawn = smooth * (1.0 - gf.tanh(4.0 * lines))
        self.result = self._filtered("sharpen", drawn)
        # What the filters would learn from: the result is to be as the picture.
        self.loss = gf.mean(gf.square(self.result - self.picture))
        self.train = gf.optim.SGD(1.0).minimize(self.loss, strategy=strategy)

    def _filtered(self, name: str, value: gf.Tensor) -> gf.Tensor:
        with gf.name_scope(name):
            return gf.nn.conv(value, self.weights[name], padding="same")

    def run(self, cluster: gf.Cluster, picture: Array) -> tuple[Array, dict[str, Array], float]:
        """The picture filtered, the gradient for each filter, and seconds of a step."""
        feeds = {self.picture: picture}
        with gf.Session(cluster) as session:
            before = {name: session.get(w) for name, w in self.weights.items()}
            result, _ = session.run([self.result, self.train], feeds)
            # a step of SGD at rate 1 takes the gradient away
            gradients = {name: before[name] - session.get(w) for name, w in self.weights.items()}
            seconds = []
            for _ in range(TRIES):
                start = time.perf_counter()
                session.run(self.result, feeds)
                seconds.append(time.perf_counter() - start)
        return result[0, 0], gradients, median(seconds)


def halos(network: Network, strategy: gf.parallel.Shard, cluster: gf.Cluster) -> dict[str, int]:
    """Bytes of halos by filter, as the strategy's report has them."""
    found: dict[str, int] = {}
    for move in strategy.report(network.result, cluster).collectives:
        if move.kind == "halo":
            name = move.cause.partition("/")[0]
            found[name] = found.get(name, 0) + move.bytes
    return found


def formula(name: str, width: int, workers: int) -> int:
    """Bytes that the windows of a filter see beyond their bands, at all inner cuts."""
    _, channels, size, _ = FILTERS[name].shape
    return (workers - 1) * 2 * (size // 2) * width * channels * 4


# The program ------------------------------------------------------------------------------------


def main() -> None:
    options = arguments()
    picture = landscape(options.height, options.width)
    cluster = gf.Cluster.local(options.workers, threads=1)
    one = Network(options.height, options.width)
    whole, wanted, alone = one.run(gf.Cluster.here(threads=1), picture)

    strategy = gf.parallel.Shard({"rows": options.workers}, {"picture": (None, None, "rows")})
    network = Network(options.height, options.width, strategy)
    result, gradients, together = network.run(cluster, picture)

    print(f"{options.height} x {options.width}, in {options.workers} bands of rows\n")
    print(f"{'filter':>8}  {'window':>6}  {'halo, bytes':>12}  {'formula':>12}  gradient off by")
    sent, right = halos(network, strategy, cluster), True
    for name, weights in FILTERS.items():
        k, due = weights.shape[-1], formula(name, options.width, options.workers)
        off = float(np.abs(gradients[name] - wanted[name]).max())
        print(f"{name:>8}  {k} x {k:<2}  {sent.get(name, 0):12,}  {due:12,}  {off:.1e}")
        right &= sent.get(name, 0) == due and off <= CLOSE
    apart = float(np.abs(result - whole).max())
    print(f"\ndivided and undivided results differ by {apart:.1e} at most")
    print(f"a pass over the picture: {alone * 1e3:.1f} ms on one worker, {together * 1e3:.1f} on "
          f"{options.workers}")  # fmt: skip

    pictures = {"before": png(picture[0, 0]), "after": png(result)}
    plan = gf.plan([network.result, network.train], cluster)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, each in pictures.items():
        (options.out / f"{name}.png").write_bytes(each)
    written = saved(plan, options.out)
    print(f"wrote {options.out / 'before.png'}, {options.out / 'after.png'} and {written}")
    if not right or apart > CLOSE:
        raise SystemExit("the divided network does other than the undivided one")


def saved(plan: gf.Plan, folder: Path) -> Path:
    """The plan as a page, or without bokeh as a drawing."""
    try:
        return plan.save(folder / "plan.html")
    except gf.errors.PlanError:
        return plan.save(folder / "plan.svg")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, told in (
        ("workers", 2, "worker processes; 2"),
        ("height", 512, "rows of the picture; 512"),
        ("width", 512, "columns; 512"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=told)
    parser.add_argument("--out", type=Path, default=Path("filtered"), help="folder; filtered/")
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
    run(main)
