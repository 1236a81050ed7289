"""Warming up: what is prepared ahead is not done again, and nothing happens before its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import FeedError, FetchError
from graphflow.ops.kernels.jit.compiler import compiler
from graphflow.planning import deployment
from graphflow.runtime.host import session_state


class Work:
    """Counts what the first step of a signature takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)
        self.placed = self.programs = 0
        place, program = deployment.partition, session_state.Program

        def count_placement(*args: Any) -> Any:
            self.placed += 1
            return place(*args)

        def count_program(*args: Any) -> Any:
            self.programs += 1
            return program(*args)

        monkeypatch.setattr(deployment, "partition", count_placement)
        monkeypatch.setattr(session_state, "Program", count_program)

    def count_work(self) -> tuple[int, int, int]:
        return self.placed, self.programs, compiler().compiled


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def model() -> tuple[Any, Any, Any, Any]:
    x = gf.placeholder("float32", ("batch", 5), name="x")
    y = gf.placeholder("float32", ("batch",), name="y")
    w = gf.variable(np.ones((5, 1), "float32"), name="w")
    loss = gf.mean((gf.squeeze(gf.tanh(x @ w), 1) - y) ** 2)
    return x, y, loss, gf.optim.SGD(0.1).minimize(loss)


def feeds(x: Any, y: Any, batch: int) -> dict[Any, Any]:
    return {x: np.ones((batch, 5), "float32"), y: np.zeros(batch, "float32")}


def test_the_first_step_after_a_warmup_compiles_and_places_nothing(work: Work) -> None:
    x, y, loss, train = model()
    with gf.Session() as s:
        s.warmup([loss, train], {x: [(4, 5), (7, 5)], y: [(4,), np.zeros(7)]})
        before = work.count_work()
        assert before[:2] == (1, 2)
        for batch in (4, 7, 4):
            s.run([loss, train], feeds(x, y, batch))
        assert work.count_work() == before
        s.run([loss, train], feeds(x, y, 9))
        assert work.count_work()[:2] == (1, 3)


def test_a_warmup_computes_nothing_and_the_steps_after_it_give_the_same_bits() -> None:
    x, y, loss, train = model()
    results = []
    for warm in (False, True):
        with gf.Session() as s:
            if warm:
                s.warmup([loss, train], {x: (4, 5), y: (4,)})
                s.warmup([loss, train], {x: (4, 5), y: (4,)})
            values = [s.run([loss, train], feeds(x, y, 4))[0] for _ in range(3)]
            w = next(n for n in gf.Graph([loss]).nodes if n.op.name == "variable").outputs[0]
            results.append((values, s.get(w).tolist()))
    assert results[0] == results[1]


def test_what_has_known_shapes_needs_none(work: Work) -> None:
    x = gf.placeholder("float32", (3,), name="x")
    y = gf.tanh(x)
    with gf.Session() as s:
        s.warmup({"y": y})
        before = work.count_work()
        s.run({"y": y}, {x: np.ones(3, "float32")})
        assert work.count_work() == before
        s.warmup(gf.constant(2.0) * 1.0)


def test_a_list_goes_with_one_shape_for_all_and_a_list_of_sizes_is_a_shape(work: Work) -> None:
    x = gf.placeholder("float32", (None, 2), name="x")
    z = gf.placeholder("float32", (None,), name="z")
    y = gf.sum(x, axis=0) + gf.sum(z)
    with gf.Session() as s:
        s.warmup(y, {x: [(3, 2), [4, 2], np.zeros((5, 2))], z: [6]})
        before = work.count_work()
        for rows in (3, 4, 5):
            s.run(y, {x: np.ones((rows, 2), "float32"), z: np.ones(6, "float32")})
        assert work.count_work() == before


MISTAKES = [
    "missing", "rank", "size", "shared", "unknown", "string", "tensor", "lists", "text",
    "negative", "many", "mapping", "array", "empty",
]  # fmt: skip


@pytest.mark.parametrize("how", MISTAKES)
def test_a_mistake_is_told_and_the_session_goes_on(how: str) -> None:
    x, y, loss, _ = model()
    other = gf.placeholder("float32", (None,), name="other")
    shapes: dict[str, tuple[Any, str]] = {
        "missing": ({x: (4, 5)}, r"placeholder 'y' \(made at .*\) is missing"),
        "rank": ({x: (4, 5, 1), y: (4,)}, "rank 2, not 3"),
        "size": ({x: (4, 6), y: (4,)}, "axis 1 must be 5, not 6"),
        "shared": ({x: (4, 5), y: (3,)}, "size 'batch' is 3 here, but 4"),
        "unknown": ({x: (4, 5), y: (4,), other: (1,)}, "'other' .*nothing fetched depends on it"),
        "string": ({"x": (4, 5)}, "'x' is not a placeholder"),
        "tensor": ({x: x, y: (4,)}, "symbolic tensor 'x'"),
        "lists": ({x: [(4, 5), (5, 5)], y: [(4,), (5,), (6,)]}, "'x' .* has 2, 'y' .* has 3"),
        "text": ({x: "4,5", y: (4,)}, "takes float32.*not '4,5'"),
        "negative": ({x: (-4, 5), y: (4,)}, r"not \(-4, 5\)"),
        "many": ({x: [(n, 5) for n in range(1, 1027)], y: [(n,) for n in range(1, 1027)]},
                 "1026 combinations of shapes.*at most 1024"),
        "mapping": ([(4, 5)], "a dict from placeholders"),
        "array": ({x: np.zeros((4, 5)), y: 3}, "not 3"),
        "empty": ({x: [], y: []}, r"'x' \(made at .*\) is given an empty list of shapes"),
    }  # fmt: skip
    given, text = shapes[how]
    with gf.Session() as s:
        with pytest.raises(FeedError, match=text):
            s.warmup(loss, given)
        assert s.run(loss, feeds(x, y, 4)) > 0


def test_kernels_that_compile_when_they_first_run_have_run(work: Work) -> None:
    x = gf.placeholder("float32", (None, 3, 9, 11), name="x")
    m = gf.placeholder("float32", (4, 4), name="m")
    w = gf.variable(np.ones((5, 3, 3, 3), "float32") * 0.1)
    y = gf.nn.max_pool(gf.nn.conv(x, w), 2)

    def body(h: Any, _: Any) -> Any:
        return h + gf.sum(gf.nn.avg_pool(x, 3)), None

    total, _ = gf.scan(body, gf.sum(y), length=2)
    fetches = [total, gf.linalg.inv(m), *gf.gradients(total, [w])]
    feeds = {x: np.ones((2, 3, 9, 11), "float32"), m: np.eye(4, dtype="float32")}
    with gf.Session() as s:
        s.warmup(fetches, {x: (2, 3, 9, 11)})  # zeros have no inverse, which is no error yet
        before = work.count_work()
        s.run(fetches, feeds)
        assert work.count_work() == before


def test_what_is_not_fetched_is_told() -> None:
    with gf.Session() as s, pytest.raises(FetchError, match="fetch the tensor itself"):
        s.warmup("loss")


def test_local_workers_prepare_ahead(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)
    x = gf.placeholder("float32", ("batch", 5), name="x")
    with gf.device("/worker:0"):
        y = gf.tanh(x) * 1.25
    with gf.device("/worker:1"):
        z = gf.exp(gf.sin(y)) + 0.375

    def list_kernels() -> set[str]:
        return {path.name for path in (own_cache / "kernels").iterdir()}

    with gf.Session(gf.Cluster.local(workers=2, threads=1)) as s:
        s.warmup([y, z], {x: [(4, 5), (8, 5)]})
        before = list_kernels()
        assert len(before) >= 2
        for rows in (4, 8):
            value = np.full((rows, 5), 0.5, "float32")
            have = s.run([y, z], {x: value})
            np.testing.assert_allclose(have[0], np.tanh(value) * 1.25, rtol=1e-6)
        assert list_kernels() == before
        with pytest.raises(FeedError, match="axis 1 must be 5"):
            s.warmup(z, {x: (4, 6)})
