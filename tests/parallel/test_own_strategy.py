"""A strategy is one new file: it divides, plans, reports and runs as those of the package do."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph
from tests.parallel.models import Model, difference, mlp, train_on_one_device

FILE = '''
"""Columns: the strategy that splits the last axis of every matrix, and nothing of the batch."""

from dataclasses import dataclass

from graphflow.parallel.mesh.axis_split import WHOLE, AxisSplit
from graphflow.parallel.mesh.layouts import Layout
from graphflow.parallel.report import report_of
from graphflow.parallel.sharding.partitioner import divide_over_mesh
from graphflow.parallel.sharding.propagation.replication import ReplicationConfig


@dataclass(frozen=True)
class Columns:
    count: int
    accumulate = 1
    devices = None
    examples = None
    replication = ReplicationConfig()

    @property
    def mesh(self):
        return {"columns": self.count}

    def layouts(self, graph, mesh, strict=True):
        """Matrices that are wide enough are split by columns."""
        tensors = [node.outputs[0] for node in graph.variables]
        wide = [t for t in tensors if t.ndim == 2 and t.shape[1] >= self.count]
        return {t: Layout((WHOLE, AxisSplit(("columns",)))) for t in wide}

    def divide(self, graph, cluster, known=None, fed=None):
        return divide_over_mesh(self, graph, cluster, known, fed)

    def report(self, fetches, cluster=None):
        return report_of(self, fetches, cluster)
'''


@pytest.fixture(name="columns")
def columns_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The strategy of a file that is in no package."""
    (tmp_path / "own_columns.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("own_columns").Columns(2)
    del sys.modules["own_columns"]


def _train(model: Model, cluster: gf.Cluster | None) -> list[bytes]:
    losses, variables = model.train(cluster)
    return [np.asarray(each).tobytes() for each in (*losses, *variables)]


def test_a_strategy_of_a_new_file_divides_and_reports(columns: Any) -> None:
    model = mlp(columns)
    graph = columns.divide(Graph([model.fetches[1]]), gf.Cluster.local(2)).graph
    split = {node.name: node.specs[0].shape for node in graph.variables if "w1" in node.name}
    assert split["w1@columns=0"] == split["w1@columns=1"] == (6, 4)
    report = columns.report(model.fetches, gf.Cluster.local(2))
    assert {m.axis for m in report.collectives} == {"columns"} and "w1" in str(report)


def test_a_strategy_of_a_new_file_is_planned(columns: Any) -> None:
    model = mlp(columns)
    x, t = (t.node.outputs[0] for t in model.feeds(np.random.default_rng(0), 4))
    plan = gf.plan(model.fetches, gf.Cluster.local(2), {x: (4, 6), t: (4, 3)})
    devices = {node.device for node in plan.nodes} - {"/client"}
    assert devices == set(gf.Cluster.local(2).devices)


def test_a_strategy_of_a_new_file_runs_on_two_workers_with_the_bits_of_one_device(
    columns: Any,
) -> None:
    assert _train(mlp(columns), gf.Cluster.local(2, threads=1)) == _train(mlp(columns), None)


def test_a_strategy_of_a_new_file_goes_into_a_product_with_a_pipeline(columns: Any) -> None:
    product = gf.parallel.Pipeline(2, microbatches=2) * columns
    assert difference(mlp(product).train(), train_on_one_device(mlp)) < 1e-12
