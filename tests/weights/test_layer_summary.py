"""The table of a model's layers: shapes, parameters, bytes and predicted times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow import nn
from graphflow.errors import ArgumentError, ShapeError


class Model(nn.Layer):
    """A convolution, a norm, a shared layer, and two outputs."""

    def __init__(self) -> None:
        self.conv = nn.Conv2d(1, 4, 3, padding=1, name="conv")
        self.norm = nn.BatchNorm2d(4, name="norm")
        self.same = nn.Linear(4, 4, name="same")
        self.head = nn.Sequential(nn.relu, nn.Linear(4, 3, name="head"))

    def __call__(self, x: Any) -> Any:
        y = self.norm(self.conv(x))
        y = self.same(self.same(gf.mean(y, (2, 3))))
        return self.head(y), y


def test_a_summary_has_shapes_parameters_and_bytes() -> None:
    found = Model().summary((None, 1, 8, 8))
    rows = {each.path: each for each in found.layers}
    paths = [each.path for each in found.layers]
    assert paths == ["", "conv", "norm", "same", "same", "head", "head.1"]
    assert rows[""].outputs == ("(batch, 3)", "(batch, 4)")
    assert rows["conv"].outputs == ("(batch, 4, 8, 8)",)
    assert (rows["conv"].parameters, rows["conv"].nbytes) == (40, 160)
    assert (rows["norm"].parameters, rows["norm"].nbytes) == (8, 64)
    assert found.parameters == 40 + 8 + 20 + 15 and found.buffers == 8
    assert found.nbytes == 4 * (found.parameters + found.buffers)


def test_times_are_those_of_the_plan() -> None:
    cluster = gf.Cluster.here(devices=["cpu:0"])
    model = Model()
    small, large = (model.summary((None, 1, 8, 8), batch=n, cluster=cluster) for n in (1, 512))
    assert 0 < small.seconds < large.seconds
    within = [each.seconds for each in large.layers if each.path and "." not in each.path]
    assert sum(within) <= large.seconds * 1.001
    x = gf.placeholder("float32", (512, 1, 8, 8))
    plan = gf.plan(list(model(x)), cluster)
    assert large.seconds == pytest.approx(plan.makespan - plan.overhead, rel=0.2)


def test_it_prints_a_table_and_html() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.LSTM(4, 5, batch_first=True))
    found = model.summary(gf.spec("int64", (None, None)), batch=3)
    text = str(found)
    assert text.startswith("Sequential: 260 parameters, 1.02 KiB, ")
    assert "predicted for batches of 3 on /worker:0/cpu:0" in text
    assert len(text.splitlines()) == 4 and "Embedding" in text
    assert found._repr_html_().count("<tr>") == 3


def test_a_summary_takes_tensors_and_counts_nothing_afterwards() -> None:
    model, x = nn.Linear(3, 2), gf.constant(np.ones((4, 3), "float32"))
    assert model.summary(x).layers[0].outputs == ("(4, 2)",)
    assert "Linear: 8 parameters" in str(model.summary(x))


def test_wrong_arguments_say_what_is_right() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: Model().summary(), "give the shapes of the inputs"),
        (lambda: Model().summary(3), "each input is a tuple of sizes"),
        (lambda: Model().summary((1, 1, 8, 8), batch=0), "batch must be an int above 0"),
        (lambda: Model().summary((1, 1, 8, 8), cluster=2), "cluster must be a gf.Cluster"),
    ]
    for call, told in wrong:
        with pytest.raises(ArgumentError, match=told):
            call()
    with pytest.raises(ShapeError, match="channels differ"):
        Model().summary((None, 3, 8, 8))
