"""Initial values of special kinds: their distributions, and the same bits wherever they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ProtocolError, ShapeError
from graphflow.ir.spec import Span
from graphflow.runtime.wire.attribute_reader import _read_initializer


def test_truncated_normal_numbers_are_within_two_deviations() -> None:
    with gf.random.seed(1):
        first = gf.init.truncated_normal((100, 200), 1.0, 0.5, "float64")
    value = first()
    assert np.abs(value - 1).max() <= 1
    assert stats.kstest(value.ravel(), stats.truncnorm(-2, 2, 1, 0.5).cdf).pvalue > 0.001
    assert np.array_equal(first.with_dtype("float32")(), value.astype("float32"))


def test_lecun_numbers_have_the_inverse_of_the_inputs_as_variance() -> None:
    with gf.random.seed(1):
        value = gf.init.lecun((3, 40, 200), "float64")()
    assert stats.kstest(value.ravel(), stats.norm(0, 120**-0.5).cdf).pvalue > 0.001


@pytest.mark.parametrize("shape", [(5, 5), (12, 5), (5, 12), (3, 4, 7), (2, 3, 11), (0, 3), (1, 1)])
def test_an_orthogonal_matrix_has_orthonormal_rows_or_columns(shape: tuple[int, ...]) -> None:
    value = gf.init.orthogonal(shape, 3.0, "float64")()
    assert value.shape == shape
    matrix = value.reshape(-1, shape[-1]) / 3
    product = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
    if value.size:
        np.testing.assert_allclose(product, np.eye(len(product)), atol=1e-12)


def test_orthogonal_matrices_are_uniformly_distributed() -> None:
    """The first column is uniform on the sphere: in 3 dimensions each coordinate is uniform."""
    with gf.random.seed(2):
        drawn = np.array([gf.init.orthogonal((3, 3), dtype="float64")() for _ in range(2000)])
    for i, j in ((0, 0), (2, 1), (1, 2)):
        assert stats.kstest(drawn[:, i, j], stats.uniform(-1, 2).cdf).pvalue > 0.001
    assert (np.linalg.det(drawn) > 0).mean() == pytest.approx(0.5, abs=0.05)


def test_a_part_of_an_orthogonal_matrix_is_cut_from_the_whole() -> None:
    whole = gf.init.orthogonal((4096, 1024))
    assert not whole.is_large and gf.init.lecun((4096, 1024)).is_large
    small = gf.init.orthogonal((12, 5))
    part = small.part((Span(3, 7), Span(1, 4)))
    np.testing.assert_array_equal(part(), small()[3:7, 1:4])


@pytest.mark.parametrize("kind", ["truncated_normal", "lecun", "orthogonal"])
def test_shards_and_workers_have_the_values_of_one_device(kind: str) -> None:
    x = gf.placeholder("float32", (4, 6))
    weight = gf.variable(getattr(gf.init, kind)((6, 8)), name="w")
    want = weight.node.attrs["initial"]()
    loss = gf.mean(gf.square(x @ weight))
    shards = gf.parallel.Shard({"a": 2}, {"w": (None, "a")})
    train = gf.optim.SGD(0.0).minimize(loss, strategy=shards)
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"])) as s:
        s.run([loss, train], {x: np.ones((4, 6), "float32")})
        np.testing.assert_array_equal(s.get(weight), want)
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"])) as s, gf.device("cpu:1"):
        np.testing.assert_array_equal(s.run(weight + 0.0), want)


def test_rows_of_a_hash_table_may_begin_with_truncated_normal_numbers() -> None:
    table = gf.nn.HashTable(7, 3, initial=gf.init.truncated_normal((7,), 1.0, 2.0))
    with gf.Session() as s:
        rows = s.run(table(np.arange(2000)))
    assert stats.kstest(rows.ravel(), stats.truncnorm(-2, 2, 1, 2).cdf).pvalue > 0.001


@pytest.mark.parametrize(
    ("error", "make", "message"),
    [
        (ShapeError, lambda: gf.init.orthogonal((3,)), "2 axes or more"),
        (ShapeError, lambda: gf.init.lecun((None, 3)), "must be ints"),
        (ArgumentError, lambda: gf.init.orthogonal((3, 3), np.nan), "finite"),
        (ArgumentError, lambda: gf.init.truncated_normal((3,), std=-1), "negative"),
        (DTypeError, lambda: gf.init.truncated_normal((3,), dtype="int32"), "need a float dtype"),
        (DTypeError, lambda: gf.init.orthogonal((3, 3), dtype="int32"), "need a float dtype"),
    ],
)
def test_wrong_arguments_are_refused_with_the_line(
    error: type[Exception], make: Any, message: str
) -> None:
    with pytest.raises(error, match=rf"test_initializers\.py:\d+.*{message}"):
        make()


def test_a_vector_from_the_wire_is_not_orthogonal() -> None:
    with pytest.raises(ProtocolError, match="orthogonal"):
        _read_initializer("orthogonal", [3], "float32", 1.0, 0.0, [0, 0])
