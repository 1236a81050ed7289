"""A pass is one new file: it registers itself, and nothing else is touched."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow import passes
from graphflow.ir.graph import Graph
from graphflow.passes import Phase, base

DROP_POSITIVE = '''
"""Drop the op `positive`, which gives its input."""

from typing import ClassVar

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.passes.base import Pass, Phase, register_pass


@dataclass(frozen=True)
class DropPositive(Pass):
    """Replace +x by x."""

    phase: ClassVar[Phase] = Phase.SIMPLIFY

    def __call__(self, graph: Graph) -> Graph:
        return graph.rewrite(lambda node, inputs: inputs, ("positive",))


register_pass(DropPositive())
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that counts as part of `graphflow/passes/` during the test."""
    monkeypatch.setattr(passes, "__path__", [*passes.__path__, str(tmp_path)])
    monkeypatch.setattr(base, "_passes", dict(base._passes))
    yield tmp_path
    sys.modules.pop("graphflow.passes.drop_positive", None)
    vars(passes).pop("drop_positive", None)


def test_a_new_file_in_the_folder_is_a_pass_that_runs(folder: Path) -> None:
    (folder / "drop_positive.py").write_text(DROP_POSITIVE)
    x = gf.placeholder("float32", (2,), name="x")
    doubled = gf.positive(x) + gf.positive(x)
    optimised = passes.optimize(Graph(doubled))
    assert [node.op.name for node in optimised.nodes] == ["placeholder", "add"]
    with gf.Session() as session:
        assert np.array_equal(session.run(doubled, {x: [1, 2]}), [2, 4])


def test_passes_run_in_the_order_of_their_phases_and_then_of_their_names() -> None:
    order = [(each.phase, type(each).__name__) for each in passes.default_passes()]
    assert order == sorted(order)
    assert {phase for phase, _ in order} == set(Phase)


def test_a_pass_whose_file_is_away_does_not_run() -> None:
    x = gf.placeholder("float32", (2,), name="x")
    assert "positive" in passes.optimize(Graph(gf.positive(x))).op_names
