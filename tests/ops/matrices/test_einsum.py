"""einsum and tensordot against numpy, with known and unknown sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import ArgumentError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS as G

CASES = [
    ("ij,jk->ik", (2, 3), (3, 4)), ("ij,jk", (2, 3), (3, 4)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)), ("...ij,...jk->...ik", (2, 3, 4), (4, 5)),
    ("ii->i", (3, 3)), ("ii", (3, 3)), ("iij->j", (3, 3, 2)), ("iii->i", (3, 3, 3)),
    ("ij->ji", (2, 3)), ("ij,kl->ijkl", (2, 3), (4, 5)), ("ij,ij->", (2, 3), (2, 3)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)), ("i,i", (3,), (3,)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bqhd,bkhd->bhqk", (2, 4, 3, 5), (2, 6, 3, 5)), ("ijk,k->ij", (2, 3, 4), (4,)),
    ("ik,jk,k->ij", (2, 3), (4, 3), (3,)), ("i...->...", (3, 2, 2)), ("ij,k->ij", (2, 3), (4,)),
    ("a...,...b->a...b", (2, 3), (3, 4)), ("->", ()),
    ("ij,jk,kl,lm->im", (2, 3), (3, 2), (2, 4), (4, 2)), (" i j , j -> i ", (2, 3), (3,)),
]  # fmt: skip


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_einsum_is_numpys(case: tuple, known: bool) -> None:
    subscripts, *shapes = case
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(s) for s in shapes]
    xs = [placeholder("float64", s if known else (None,) * len(s)) for s in shapes]
    (value,) = evaluate([G["einsum"](subscripts, *xs)], dict(zip(xs, values, strict=True)))
    np.testing.assert_allclose(value, np.einsum(subscripts, *values), atol=1e-12)


@given(st.data())
def test_random_contractions_of_two_operands_are_numpys(data: st.DataObject) -> None:
    sizes = {"a": 2, "b": 3, "c": 1, "d": 4}
    terms = [data.draw(st.text("abcd", max_size=4)) for _ in range(2)]
    letters = sorted(set("".join(terms)))
    output = "".join(data.draw(st.permutations(letters)))[: data.draw(st.integers(0, 4))]
    rng = np.random.default_rng(0)
    values = [rng.standard_normal([sizes[x] for x in term]) for term in terms]
    subscripts = f"{','.join(terms)}->{output}"
    (value,) = evaluate([G["einsum"](subscripts, *values)])
    np.testing.assert_allclose(value, np.einsum(subscripts, *values), atol=1e-12)


def test_a_matrix_product_needs_no_permutation() -> None:
    x, y = placeholder("float32", (4, 3)), placeholder("float32", (5, 3))
    ops = {node.op.name for node in Graph(G["einsum"]("ij,kj->ik", x, y)).nodes}
    assert ops == {"placeholder", "matmul"}


def test_axes_of_size_one_broadcast_against_summed_ones() -> None:
    a, b = np.ones((2, 1)), np.arange(3.0)
    np.testing.assert_array_equal(evaluate([G["einsum"]("ij,j->i", a, b)])[0], [3.0, 3.0])


@pytest.mark.parametrize("subscripts", ["ii", "ij->", "ij->i", "ii->i"])
def test_sums_of_ints_keep_their_dtype(subscripts: str) -> None:
    a = np.arange(9, dtype="int32").reshape(3, 3)
    value = evaluate([G["einsum"](subscripts, a)])[0]
    assert value.dtype == "int32"
    np.testing.assert_array_equal(value, np.einsum(subscripts, a))
    assert G["vecdot"](a, a).dtype == "int32"


@pytest.mark.parametrize("axes", [0, 1, 2, ([1], [0]), ([0, 1], [1, 0]), (1, -2)], ids=str)
def test_tensordot_is_numpys(axes: object) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((3, 3)), rng.standard_normal((3, 3))
    (value,) = evaluate([G["tensordot"](a, b, axes)])
    np.testing.assert_allclose(value, np.tensordot(a, b, axes), atol=1e-12)


@pytest.mark.parametrize(
    "subscripts, shapes, words",
    [
        ("ij,jk->ik", [(2, 3)], "2 operands"),
        ("ij->i", [(2, 3, 4)], "names 2 axes"),
        ("ij->ik", [(2, 3)], "no operand has"),
        ("ij->ii", [(2, 3)], "twice"),
        ("i1->i", [(2, 3)], "letters"),
        ("i.j->i", [(2, 3)], "letters"),
    ],
)
def test_malformed_subscripts_are_refused(subscripts: str, shapes: list, words: str) -> None:
    with pytest.raises(ArgumentError, match=rf"einsum at .*test_einsum\.py:\d+.*{words}"):
        G["einsum"](subscripts, *(placeholder("float32", s) for s in shapes))


def test_a_letter_of_two_sizes_is_refused_with_both() -> None:
    with pytest.raises(ShapeError, match=r"'j' stands for two sizes: 3 != 4"):
        G["einsum"]("ij,jk->ik", placeholder("float32", (2, 3)), placeholder("float32", (4, 5)))
