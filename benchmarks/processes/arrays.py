"""Arrays that two processes hold, beside Dask and Ray: what people use these for without a model.

    python benchmarks/processes/arrays.py [--rounds 10] [--output results/arrays.json]

Each has two workers of one thread, and half of a matrix on each: one block with Dask, an actor's
array with Ray, a variable with graphflow. Dask and Ray are measured one after the other, each by
turns with graphflow, since their processes are not idle when they have nothing to do. All compute
the same numbers, which is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import graphflow as gf
from graphflow.placement.clusters.cluster import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import arguments, interleaved, report, write
from transport_peers import ray_store

ROWS, COLUMNS = 100_000, 64  # of each half: 51 MB
STEPS, RATE = 10, 0.5
HOPS = 10
COVARIANCE = f"mean and covariance of {2 * ROWS:,} x {COLUMNS}"
ELEMENTWISE = "mean of sin(2 x + 1)^2 over the same"
TRAINING = f"{STEPS} steps of logistic regression on the same"
ONE = "one addition to 8 numbers on a worker, and its answer"
CHAIN = f"{HOPS} additions to 8 numbers, to and fro"

Tasks = dict[str, Callable[[], Any]]


def half(which: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(which)
    x = rng.standard_normal((ROWS, COLUMNS))
    return x, (x @ np.linspace(-1, 1, COLUMNS) + rng.standard_normal(ROWS) > 0).astype(float)


def covariance_of(sums: Any, products: Any) -> tuple[Any, Any]:
    mean = sums / (2 * ROWS)
    return mean, products / (2 * ROWS) - mean[:, None] * mean


# graphflow -------------------------------------------------------------------------------------


@contextmanager
def ours() -> Iterator[Tasks]:
    sums, products, waves, slopes = [], [], [], []
    with gf.device("/worker:0"):
        weights = gf.variable(np.zeros(COLUMNS), name="weights")
    for which in (0, 1):
        with gf.device(f"/worker:{which}"):
            held, told = half(which)
            x, y = gf.variable(held, name=f"x{which}"), gf.variable(told, name=f"y{which}")
            sums.append(gf.sum(x, 0))
            products.append(x.T @ x)
            waves.append(gf.sum(gf.sin(2 * x + 1) ** 2))
            slopes.append((gf.nn.sigmoid(x @ weights) - y) @ x)
    with gf.device("/worker:0"):
        covariance = covariance_of(sums[0] + sums[1], products[0] + products[1])
        wave = (waves[0] + waves[1]) / (2 * ROWS * COLUMNS)
        train = gf.assign(weights, weights - RATE * (slopes[0] + slopes[1]) / (2 * ROWS))
    start = gf.placeholder("float64", (8,), name="start")
    moved = [start]
    for hop in range(HOPS):
        with gf.device(f"/worker:{hop % 2}"):
            moved.append(moved[-1] + 1.0)
    with gf.Session(Cluster.local(2, threads=1, deadline=300), trial=False) as session:

        def training() -> Any:
            session.set(weights, np.zeros(COLUMNS))
            for _ in range(STEPS):
                session.run(train)
            return session.get(weights)

        yield {
            COVARIANCE: lambda: session.run(covariance),
            ELEMENTWISE: lambda: session.run(wave),
            TRAINING: training,
            ONE: lambda: session.run(moved[1], {start: np.zeros(8)}),
            CHAIN: lambda: session.run(moved[-1], {start: np.zeros(8)}),
        }


# Dask ------------------------------------------------------------------------------------------


@contextmanager
def dask_tasks() -> Iterator[Tasks]:
    import dask.array as da
    from distributed import Client, LocalCluster

    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=40
    )
    with cluster, Client(cluster) as client:
        names = list(client.scheduler_info()["workers"])
        halves = [
            client.submit(half, which, workers=[name], pure=False)
            for which, name in enumerate(names)
        ]

        def joined(part: int, shape: tuple[int, ...]) -> Any:
            blocks = [
                da.from_delayed(
                    client.submit(lambda pair, part=part: pair[part], each), shape, float
                )
                for each in halves
            ]
            return client.persist(da.concatenate(blocks))

        x, y = joined(0, (ROWS, COLUMNS)), joined(1, (ROWS,))
        mean = x.mean(axis=0)
        covariance = (mean, x.T @ x / (2 * ROWS) - mean[:, None] * mean)
        wave = (da.sin(2 * x + 1) ** 2).mean()

        def training() -> Any:
            weights = np.zeros(COLUMNS)
            for _ in range(STEPS):
                slope = (1 / (1 + da.exp(-(x @ weights))) - y) @ x
                weights = weights - RATE * slope.compute() / (2 * ROWS)
            return weights

        def chain(hops: int) -> Any:
            moved: Any = np.zeros(8)
            for hop in range(hops):
                name = names[hop % 2]
                moved = client.submit(np.add, moved, 1.0, workers=[name], pure=False)
            return moved.result()

        yield {
            COVARIANCE: lambda: client.gather(client.compute(covariance)),
            ELEMENTWISE: wave.compute,
            TRAINING: training,
            ONE: lambda: chain(1),
            CHAIN: lambda: chain(HOPS),
        }


# Ray -------------------------------------------------------------------------------------------


class Half:
    """What an actor holds and does."""

    def __init__(self, which: int) -> None:
        self.x, self.y = half(which)

    def covariance(self) -> Any:
        return self.x.sum(0), self.x.T @ self.x

    def wave(self) -> Any:
        return (np.sin(2 * self.x + 1) ** 2).sum()

    def slope(self, weights: Any) -> Any:
        return (1 / (1 + np.exp(-(self.x @ weights))) - self.y) @ self.x

    def add(self, moved: Any) -> Any:
        return moved + 1.0


@contextmanager
def ray_tasks() -> Iterator[Tasks]:
    with ray_store(processors=2) as ray:
        actor = ray.remote(num_cpus=1)(Half)
        actors = [actor.remote(which) for which in (0, 1)]

        def covariance() -> Any:
            first, second = ray.get([each.covariance.remote() for each in actors])
            return covariance_of(first[0] + second[0], first[1] + second[1])

        def wave() -> Any:
            return sum(ray.get([each.wave.remote() for each in actors])) / (2 * ROWS * COLUMNS)

        def training() -> Any:
            weights = np.zeros(COLUMNS)
            for _ in range(STEPS):
                slopes = ray.get([each.slope.remote(weights) for each in actors])
                weights = weights - RATE * sum(slopes) / (2 * ROWS)
            return weights

        def chain(hops: int) -> Any:
            moved: Any = np.zeros(8)
            for hop in range(hops):
                moved = actors[hop % 2].add.remote(moved)
            return ray.get(moved)

        yield {
            COVARIANCE: covariance,
            ELEMENTWISE: wave,
            TRAINING: training,
            ONE: lambda: chain(1),
            CHAIN: lambda: chain(HOPS),
        }


# All -------------------------------------------------------------------------------------------

PEERS: dict[str, tuple[str, Callable[[], AbstractContextManager[Tasks]]]] = {
    "Dask": ("distributed", dask_tasks),
    "Ray": ("ray", ray_tasks),
}


def flat(found: Any) -> Any:
    """All numbers of one array, or of several, in one row."""
    several = found if isinstance(found, list | tuple) else [found]
    return np.concatenate([np.ravel(each) for each in several])


def measured(
    name: str, peer: Callable[[], AbstractContextManager[Tasks]], rounds: int
) -> list[dict[str, Any]]:
    results = []
    with ours() as mine, peer() as theirs:
        for title, task in mine.items():
            np.testing.assert_allclose(flat(task()), flat(theirs[title]()), rtol=1e-8, atol=1e-10)
            seconds = interleaved({"graphflow": task, name: theirs[title]}, rounds, 3)
            results.append(report(f"{title}, beside {name}", seconds, goal=1.0))
    return results


def compare_peers(rounds: int) -> list[dict[str, Any]]:
    """Time all tasks beside each peer that is installed, and return the figures."""
    results = []
    for name, (package, peer) in PEERS.items():
        if find_spec(package) is None:
            print(f"{name} is left out: {package} is not installed (pip install -e '.[bench]')")
            continue
        results += measured(name, peer, rounds)
    return results


def main() -> None:
    options = arguments((__doc__ or "").partition("\n\n")[0]).parse_args()
    write("arrays", compare_peers(options.rounds), options.output)


if __name__ == "__main__":
    main()
