"""The search over strategies: what it tries, what it chooses, and that the choice trains."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, MemoryLimitError, PlanError, ShardingError
from graphflow.op import Tensor
from graphflow.parallel import Pipeline, auto
from graphflow.parallel.search import tensor_rules

X = np.random.default_rng(1).normal(size=(64, 16)).astype("float32")


def network(width: int = 16, layers: int = 4) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    x = gf.placeholder("float32", ("B", width), name="x")
    h = x
    for i in range(layers):
        with gf.name_scope(f"layer{i}"):
            w = gf.variable(rng.normal(size=(width, width)).astype("float32") / 8, name=f"w{i}")
            h = gf.tanh(h @ w + gf.variable(np.zeros(width, "float32"), name=f"b{i}"))
    return x, gf.mean(gf.square(h - x))


def test_layers_are_cut_by_columns_and_rows_in_turns() -> None:
    _, loss = network()
    named = {t.name.rpartition("/")[2]: axes for t, axes in tensor_rules(loss).items()}
    assert named == {
        "w0": (None, "model"), "b0": ("model",), "w1": ("model", None),
        "w2": (None, "model"), "b2": ("model",), "w3": ("model", None),
    }  # fmt: skip


TWO, FAST = (
    gf.Cluster.hypothetical(
        n, flops=1e12, bandwidth=1e11, memory=1 << 30, launch=1e-6, link_latency=1e-6,
        link_bandwidth=1e12,
    )
    for n in (2, 4)
)  # fmt: skip


@pytest.mark.slow  # plans thirty strategies for four devices
def test_every_mesh_is_tried_and_the_best_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    x, loss = network(256)
    found = auto(loss, FAST, shapes={x: (4096, 256)})
    names = [each.name for each in found.tried]
    for part in ("one device", "data 4", "model 4", "data 2 × model 2", "data 2 × 2 stages",
                 "model 2 × 2 stages", "4 stages 1f1b of 8", "4 stages zb-h1 of 4"):  # fmt: skip
        assert any(name.startswith(part) for name in names), part
    seconds = [each.seconds for each in found.tried]
    assert seconds == sorted(seconds)
    assert found.best.name != "one device"  # links are free: four devices are faster than one
    told = capsys.readouterr().out
    assert f"chosen: {found.best.name}" in told and "times as fast as" in told


def test_what_does_not_fit_is_said_and_recomputation_is_tried() -> None:
    x, loss = network(64)
    shapes = {x: (2048, 64)}
    free = auto(loss, TWO, shapes=shapes, quiet=True)
    pipes = {t.name: t.memory for t in free.tried if isinstance(t.strategy, Pipeline)}
    name = "2 stages 1f1b of 2"
    tight = auto(loss, TWO, shapes=shapes, quiet=True, memory=pipes[name] - 1)
    again = {t.name: t for t in tight.tried}
    assert again[name].why_not.startswith("memory")
    assert f"{name}, recomputing" in again
    assert tight.best.memory < pipes[name]


def test_the_choice_is_a_strategy() -> None:
    def losses(strategy: object) -> list[float]:
        x, loss = network()
        train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            return [float(s.run([loss, train], {x: X})[0]) for _ in range(3)]

    x, loss = network()
    for cluster, memory in ((gf.Cluster.here(), None), (TWO, None)):
        found = auto(loss, cluster, shapes={x: X.shape}, memory=memory, quiet=True)
        np.testing.assert_allclose(losses(found), losses(None), rtol=1e-5)


def test_the_choice_has_a_report_and_goes_into_no_product() -> None:
    x, loss = network()
    found = auto(loss, TWO, shapes={x: X.shape}, quiet=True)
    assert repr(found) == f"<auto: {found.best.name}, the best of {len(found.tried)}>"
    train = gf.optim.SGD(0.1).minimize(loss, strategy=found)
    assert str(found.report([loss, train], TWO)).startswith("mesh ")
    for product in (lambda: found * 2, lambda: gf.parallel.Data(2) * found):
        with pytest.raises(ShardingError, match="auto has tried products, too"):
            product()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda loss: auto(loss, FAST), PlanError, "give its sizes"),
        (lambda loss: auto(loss, FAST, shapes={loss.node.inputs[0]: (1,)}), PlanError, "give its"),
        (lambda loss: auto(loss, 2), ArgumentError, r"auto at .*gf\.Cluster, not 2"),
        (lambda loss: auto(loss, optimizer="adam"), ArgumentError, "optim.*not 'adam'"),
        (lambda loss: auto(loss, memory="1GB"), ArgumentError, "number of bytes.*not '1GB'"),
        (lambda loss: auto(loss, memory=-1), ArgumentError, "number of bytes.*not -1"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    make: Callable[[Tensor], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(network()[1])


def test_if_nothing_fits_all_that_was_tried_is_listed() -> None:
    x, loss = network()
    with pytest.raises(MemoryLimitError, match=r"no strategy fits\n.*one device.*memory"):
        auto(loss, gf.Cluster.here(), shapes={x: X.shape}, memory=1, quiet=True)
