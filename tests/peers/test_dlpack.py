"""Arrays of torch and JAX in feeds, constants and variables, and fetched arrays in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.array_conversion import array_of

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

DTYPES = ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_torch_are_viewed_and_come_back(dtype: str) -> None:
    given = torch.tensor([0, 1, 1]).to(getattr(torch, dtype))
    view: Any = array_of(given)
    given[0] = 1
    assert view.dtype.name == dtype
    assert view.astype("complex64").tolist() == [1, 1, 1]
    x = gf.placeholder(dtype, (None,))
    v = gf.variable(given)
    with gf.Session() as s:
        values = s.run([x, v, gf.constant(given)], {x: given})
    assert all(value.dtype == view.dtype and (value == view).all() for value in values)
    if dtype != "bfloat16":  # an extension type, which numpy does not export
        assert all(torch.equal(torch.from_dlpack(value), given) for value in values)


def test_operators_of_torch_leave_tensors_of_graphs_to_them() -> None:
    given = torch.tensor([1.0, 2.0])
    x = gf.placeholder("float32", (2,))
    with gf.Session() as s:
        left, right = s.run([given - x, x - given], {x: given * 3})
    assert left.tolist() == [-2, -4]
    assert right.tolist() == [2, 4]


def test_arrays_of_jax_are_viewed() -> None:
    numbers = pytest.importorskip("jax.numpy", reason="needs jax: pip install 'graphflow[bench]'")
    given = numbers.arange(4, dtype="bfloat16")
    assert np.shares_memory(array_of(given), np.asarray(given))
    x = gf.placeholder("bfloat16", (4,))
    with gf.Session() as s:
        assert s.run(x + given, {x: given}).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"requires_grad": True}, r"give value\.detach\(\)"),
        ({"dtype": torch.int64}, r"give np\.asarray\(value, 'float32'\)"),
        ({"device": "meta"}, r"Use Tensor\.cpu\(\)"),
    ],
)
def test_tensors_of_torch_that_do_not_convert_are_refused_with_a_remedy(
    made: dict[str, Any], told: str
) -> None:
    x = gf.placeholder("float32", (2,), name="p")
    with gf.Session() as s, pytest.raises(gf.errors.FeedError, match=f"'p' .*{told}"):
        s.run(x, {x: torch.ones(2, **made)})
