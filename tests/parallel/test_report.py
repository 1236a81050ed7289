"""What a report says travels is what a trace saw travel, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf

AsyncModel, Data = gf.parallel.AsyncModel, gf.parallel.Data
Pipeline, Shard = gf.parallel.Pipeline, gf.parallel.Shard
BATCH, WIDTH, CLASSES = 12, 16, 22


class Step:
    """A classifier's step of training, and what it is fed."""

    def __init__(
        self, strategy: Any, tied: bool = False, dropout: float = 0.0, size: Any = BATCH
    ) -> None:
        random = np.random.default_rng(0)
        mask = gf.random.bernoulli(1 - dropout, (BATCH, 1)) if dropout else None

        def weight(*shape: int, name: str) -> gf.Tensor:
            return gf.variable(random.normal(size=shape), name=name)

        self.strategy = strategy
        ids = gf.placeholder("int64", (size,), name="ids")
        labels = gf.placeholder("int64", (size,), name="labels")
        table = weight(CLASSES, WIDTH, name="table")
        with gf.name_scope("first"):
            h = gf.nn.embedding(ids, table)
            h = gf.tanh(h @ weight(WIDTH, 2 * WIDTH, name="up"))
            h = h if mask is None else gf.where(mask, h, 0.0)
        with gf.name_scope("second"):
            h = gf.nn.layer_norm(h @ weight(2 * WIDTH, WIDTH, name="down"))
            h = h if mask is None else gf.where(mask, h, 1.0)
            self.scores = h @ (table.T if tied else weight(WIDTH, CLASSES, name="head"))
            self.loss = gf.mean(gf.nn.cross_entropy(self.scores, labels))
        self.train = gf.optim.Adam(0.01).minimize(self.loss, strategy=strategy)
        fed = np.arange(BATCH if size == BATCH else 64) % CLASSES  # what an open size counts as
        self.feeds = {ids: fed, labels: fed}

    def report(self, *fetches: gf.Tensor, cluster: Any = None) -> Any:
        return self.strategy.report([*fetches, self.train], cluster)

    def count_traced_bytes(self, cluster: gf.Cluster, *fetches: gf.Tensor) -> int:
        """Bytes between the workers in a step."""
        with gf.Session(cluster) as s:
            s.run([*fetches, self.train], self.feeds)
            with s.trace() as trace:
                s.run([*fetches, self.train], self.feeds)
        sent = sum(e.bytes * e.count for e in trace.edges if "client" not in e.source + e.target)
        turns = {"all_reduce": 2, "all_gather": 2, "reduce_scatter": 1}  # of two workers
        return sent + sum(e.bytes * e.count * turns[e.kind] for e in trace.exchanges)


VOCABULARY = {"*table": ("model",), "*head": (None, "model")}
UP = {"*up": (None, "model")}
CASES: dict[str, Callable[[], Step]] = {
    "vocabulary": lambda: Step(Shard({"model": 2}, VOCABULARY)),
    "columns of a table that is the head, too": lambda: Step(
        Shard({"model": 2}, {"table": (None, "model")}), tied=True
    ),
    "data": lambda: Step(Data(2)),
    "turns": lambda: Step(Data(2, accumulate=2)),
    "sharded state": lambda: Step(Data(2, shard_state=True)),
    "everything in columns": lambda: Step(
        Shard({"model": 2}, {"*up": (None, "model"), "*down": (None, "model")})
    ),
    "stale sums": lambda: Step(AsyncModel("model", 3) * Shard({"model": 2}, UP)),
    "pipeline": lambda: Step(Pipeline(2, "1f1b", 3)),
    "a table that two stages share": lambda: Step(Pipeline(2, "zb-h1", 3), tied=True),
    "two stages each": lambda: Step(Pipeline(4, "zb-v", 3), tied=True),
    "a mask drawn in another stage": lambda: Step(Pipeline(2, "1f1b", 3), dropout=0.5),
    "two directions": lambda: Step(Pipeline(2, "chimera", 4)),
    "without flush": lambda: Step(Pipeline(2, "pipedream", 3), size="B"),
}
QUICK = ("vocabulary", "stale sums")


@pytest.mark.every(13)
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES],
)  # slow: each starts four processes, three seconds
def test_the_bytes_of_a_report_are_those_of_a_trace(name: str) -> None:
    step = CASES[name]()
    cluster = gf.Cluster.local(2, threads=1)
    assert step.report(step.loss, cluster=cluster).bytes == step.count_traced_bytes(
        cluster, step.loss
    )
    fetches = (step.loss, step.scores)
    assert step.report(*fetches, cluster=cluster).bytes == step.count_traced_bytes(
        cluster, *fetches
    )


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_a_report_tells_what_each_device_is_fed(replicas: int) -> None:
    step, cluster = Step(Data(replicas)), gf.Cluster.local(replicas)
    report = step.report(step.loss, cluster=cluster)
    shares = [2 * 8 * len(share) for share in np.array_split(range(BATCH), replicas)]
    assert list(report.fed.values()) == shares
    arrays = {t.node: a for t, a in step.feeds.items()}
    fed = dict.fromkeys(report.fed, 0)
    for node, array in report.division.feeds(arrays, {}).items():
        fed[str(node.device)] += array.nbytes
    assert fed == report.fed
    assert f"fed a step: {shares[0]} bytes to" in str(report)


def test_stages_are_fed_what_they_read() -> None:
    step = Step(Pipeline(2, "1f1b", 3))
    report = step.report(step.loss, cluster=gf.Cluster.local(2))
    assert list(report.fed.values()) == [8 * BATCH, 8 * BATCH]  # ids, and labels
    assert f"fed a step: {8 * BATCH} bytes to each of 2 devices" in str(report)


@pytest.mark.parametrize("pipeline", [False, True], ids=["alone", "in stages"])
def test_a_loss_over_a_vocabulary_in_pieces_takes_two_exchanges(pipeline: bool) -> None:
    """Of maxima; of sums and picked scores, which the gradient has no need to send again. Megatron
    has three: Shoeybi et al. 2019, section 3."""
    shard = Shard({"model": 2}, VOCABULARY)
    step = Step(Pipeline(2, "1f1b", 3) * shard if pipeline else shard)
    report = step.report(step.loss, cluster=gf.Cluster.local(4))
    made = [m for m in report.division.records if "cross_entropy" in m.cause]
    assert [move.kind for move in made] == ["all-reduce"] * 2
    row = 2 * BATCH * 8  # a number of each sample, to each of two places
    assert [move.bytes for move in made] == [row, 2 * row]
    assert [m.bytes for m in report.collectives if "cross_entropy" in m.cause] == [row, 2 * row]


def test_what_is_fetched_is_listed_apart() -> None:
    step = Step(Data(3, bucket=0))
    report = step.report(step.loss, step.scores)
    rows = BATCH - BATCH // 3
    assert [(move.kind, move.bytes) for move in report.fetched] == [
        ("fetch", 2 * 8), ("fetch", rows * CLASSES * 8),
    ]  # fmt: skip
    assert report.bytes == sum(move.bytes for move in (*report.collectives, *report.fetched))
    assert f"and {report.fetched[0].bytes + report.fetched[1].bytes:,} bytes to the first" in str(
        report
    )
    assert not {move.kind for move in report.collectives} & {"fetch"}


@pytest.mark.parametrize("strategy", [Data(3), Data(3, accumulate=2)], ids=["whole", "turns"])
def test_a_loss_goes_with_a_bucket_of_gradients(strategy: Any) -> None:
    step, cluster = Step(strategy), gf.Cluster.local(3)
    report = step.report(step.loss, cluster=cluster)
    assert not report.fetched
    (alone,) = step.report(cluster=cluster).collectives
    (both,) = report.collectives
    assert (alone.tensor, both.tensor) == ("4 gradients", "4 gradients and second/mean")
    assert both.bytes == alone.bytes + 2 * (3 - 1) * 8
    (result,) = strategy.report([step.loss], cluster).fetched  # no gradients, and so no bucket
    assert result.bytes == 2 * 8


def test_of_a_value_that_other_places_have_too_one_piece_each_is_fetched() -> None:
    """Over data × model, a result that is cut along the batch only is at both places of a pair."""
    strategy = Shard({"data": 2, "model": 2}, {"*up": (None, "model")}, batch="data")
    step = Step(strategy)
    (scores,) = step.report(step.scores).fetched
    assert scores.bytes == BATCH // 2 * CLASSES * 8


def test_what_the_client_feeds_to_both_is_not_sent_from_one_to_the_other() -> None:
    """A windowed op that sees all of its neighbour's piece reads the placeholder of that."""
    x = gf.placeholder("float64", (4, 6), name="x")
    joined = gf.concat([x, gf.tanh(x)], axis=1)
    strategy = Shard({"model": 2}, {"x": (None, "model")})
    (halo,) = strategy.report([joined * 2.0]).division.records[:1]
    assert halo.kind == "halo" and halo.bytes == 4 * 3 * 8
    left = strategy.report([joined * 2.0]).collectives
    assert [move.tensor for move in left] == ["tanh"]
