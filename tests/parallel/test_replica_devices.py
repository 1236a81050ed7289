"""Devices that are named for replicas and places, in products where each takes several; and
accumulation beside a pipeline, which has its own micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

import graphflow as gf
from tests.parallel.models import difference, mlp, train_on_one_device

Data, Shard, Pipeline = gf.parallel.Data, gf.parallel.Shard, gf.parallel.Pipeline
COLUMNS = Shard({"model": 2}, {"w1": (None, "model")})
FOUR, EIGHT = (gf.Cluster.local(n) for n in (4, 8))


def name_devices(*numbers: Any) -> list[Any]:
    """Devices by numbers, in lists as these are."""
    return [name_devices(*n) if isinstance(n, tuple) else f"/worker:{n}/cpu:0" for n in numbers]


@pytest.mark.parametrize("strategy, places", [
    (Data(2, devices=name_devices((3, 1), (2, 0))) * COLUMNS, [3, 1, 2, 0]),
    (Pipeline(2, microbatches=2) * Data(2, devices=name_devices((3, 1), (2, 0))), [3, 2, 1, 0]),
    (Shard({"model": 2}, {"w1": (None, "model")}, devices=name_devices((3, 1), (2, 0)))
     * Pipeline(2),
     [3, 2, 1, 0]),
    (Data(2, devices=name_devices((7, 6, 5, 4), (3, 2, 1, 0))) * COLUMNS * Pipeline(2),
     [7, 6, 3, 2, 5, 4, 1, 0]),
    (Pipeline(2, devices=name_devices(0, 2, 1, 3)) * Data(2), [0, 2, 1, 3]),
], ids=["shards", "stages", "places", "both", "of the pipeline"])  # fmt: skip
def test_devices_are_those_of_each_replica(strategy: Any, places: list[int]) -> None:
    """By mesh: of stages the outermost, of replicas next."""
    cluster = FOUR if len(places) == 4 else EIGHT
    report = strategy.report(mlp(strategy).fetches, cluster)
    staged = report.division.pipeline
    teams = [report.division.mesh.devices] if staged is None else staged.devices
    found = [device.worker for team in teams for device in team]
    assert found == places


@pytest.mark.parametrize("make, told", [
    (lambda: Pipeline(2) * Data(2, devices=name_devices(0, 1)),
     r"each of the 2 replicas takes 2 devices here: give devices= a list of 2 for each, such as "
     r"\[\['/worker:0/cpu:0', '/worker:1"),
    (lambda: Pipeline(2) * Data(2, devices=name_devices((0, 1, 2), (3,))), r"takes 2 devices here"),
    (lambda: Pipeline(2, devices=name_devices(0, 1, 2, 3))
     * Data(2, devices=name_devices((0, 1), (2, 3))),
     r"the Pipeline and the Data both say devices=; say them in one"),
    (lambda: Data(2, devices=name_devices((0, 1), (2, 3))),
     r"a list with a name for each of the 2"),
])  # fmt: skip
def test_other_lists_are_refused_with_what_to_write(make: Any, told: str) -> None:
    with pytest.raises(gf.errors.ShardingError, match=told):
        strategy = make()
        strategy.report(mlp(strategy).fetches, FOUR)


@pytest.mark.parametrize("strategy", [
    Pipeline(2, microbatches=2) * Data(1, accumulate=3),
    Pipeline(2, "zb-h1", 1) * Data(2, accumulate=3, shard_state=True),
    Data(2, accumulate=3) * COLUMNS * Pipeline(2, "gpipe", 1),
], ids=["one", "shares", "tensor"])  # fmt: skip
def test_accumulation_makes_a_pipeline_of_as_many_times_the_micro_batches(strategy: Any) -> None:
    model = mlp(strategy)
    staged = strategy.report(model.fetches).division.pipeline
    assert staged.schedule.microbatches == 3 * strategy.microbatches
    assert difference(model.train(), train_on_one_device(mlp)) < 1e-12
