"""Composites: what they compute in, what they give, and that other dtypes see none of it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, Tensor
from tests.properties.calls import call_of, list_public_names

HALVES = ["bfloat16", "float16"]
COMPOSITES = {
    name: f
    for name, f in list_public_names().items()
    if getattr(f, "__code__", None) is not None and f.__code__.co_name == "wrapper"
    and f.__code__.co_filename.endswith("composite.py")
}  # fmt: skip


def run(f: Any, *arrays: Any) -> Any:
    xs = [gf.placeholder(str(a.dtype), a.shape) for a in arrays]
    (result,) = evaluate([f(*xs)], dict(zip(xs, arrays, strict=True)))
    return result


def fill_half(value: float, *shape: int) -> Any:
    return np.full(shape, value, "float16")


def ops_of(outputs: Any) -> list[str]:
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return [node.op.name for node in Graph([t for t in found if isinstance(t, Tensor)]).nodes]


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_of_float32_is_the_function_itself(name: str) -> None:
    args, kwargs = call_of(name, COMPOSITES[name])
    function: Any = COMPOSITES[name]
    assert ops_of(function(*args, **kwargs)) == ops_of(function.__wrapped__(*args, **kwargs))


def test_operators_and_methods_call_the_composite() -> None:
    assert FUNCTIONS["vecdot"] is gf.vecdot and FUNCTIONS["prod"] is gf.prod
    assert gf.vecdot in COMPOSITES.values()


def test_numbers_that_float16_cannot_hold_on_the_way() -> None:
    nn = gf.nn
    assert run(nn.cosine_similarity, fill_half(0, 1, 4), fill_half(1, 1, 4)) == 0
    assert run(nn.cosine_similarity, fill_half(1000, 1, 4), fill_half(1000, 1, 4)) == 1
    assert run(nn.cosine_similarity, fill_half(30, 1, 512), fill_half(30, 1, 512)) == 1
    far = run(
        lambda a, b: nn.triplet_margin_loss(a, b, a), fill_half(300, 1, 4), fill_half(0, 1, 4)
    )
    assert far == np.float16(601)
    wanted = np.float16(300 / (1 + 1e-4 / 3 * 2 * 9e4) ** 0.75)
    assert run(lambda x: nn.local_response_norm(x, 3), fill_half(300, 1, 4, 1))[0, 0] == wanted
    assert run(nn.global_lp_pool, fill_half(300, 1, 1, 4)).item() == 600
    assert run(lambda x: gf.linalg.matrix_power(x, 3) * 0 + 1, fill_half(50, 2, 2)).all()


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, t: gf.nn.cross_entropy(x, t, reduction="mean"),
        lambda x, t: gf.nn.cross_entropy(x, t, reduction="mean", ignore_index=-1),
        lambda x, t: gf.nn.cross_entropy(x, t, reduction="mean", weights=np.ones(2)),
        lambda x, t: gf.nn.cross_entropy(x, gf.one_hot(t, 2, "float16"), reduction="mean"),
        lambda x, t: gf.nn.nll_loss(gf.nn.log_softmax(x), t, reduction="mean", ignore_index=-1),
        lambda x, t: gf.mean(gf.nn.cross_entropy(x, t)),
    ],
)
def test_mean_losses_of_more_rows_than_float16_counts(loss: Any) -> None:
    rows = 70_000
    x, t = gf.placeholder("float16", (rows, 2)), gf.placeholder("int64", (rows,))
    y = loss(x, t)
    slopes = gf.gradients(y, [x], np.array(1024, "float16"))
    feeds = {x: np.zeros((rows, 2), "float16"), t: np.zeros(rows, "int64")}
    value, slope = evaluate([y, *slopes], feeds)
    assert value.dtype == np.float16 and abs(value - np.log(2)) < 1e-3
    np.testing.assert_allclose(slope[0].astype("f"), np.array([-512, 512]) / rows, rtol=1e-3)


@pytest.mark.every(5)
@pytest.mark.parametrize("known", [True, False], ids=["known", "fed"])
@pytest.mark.parametrize(
    "function",
    [
        gf.mean, gf.var, gf.std, gf.linalg.vector_norm, gf.median, gf.logsumexp,
        lambda x: gf.nn.avg_pool(x[None, None], x.shape[0])[0, 0, 0],
        lambda x: gf.nn.global_avg_pool(x[None, None]),
        lambda x: gf.nn.global_lp_pool(x[None, None]),
        lambda x: gf.nn.layer_norm(x)[0], lambda x: gf.nn.rms_norm(x)[0],
        lambda x: gf.nn.batch_norm(
            x[:, None], *(gf.constant(np.ones(1, "float16")) for _ in range(4)), training=True
        )[0][0, 0],
    ],
)  # fmt: skip
def test_slopes_over_more_elements_than_float16_counts(function: Any, known: bool) -> None:
    n = 2**19
    results = []
    for dtype in ("float16", "float64"):
        x = gf.placeholder(dtype, (n if known else None,))
        if "avg_pool" in str(function.__code__.co_names) and not known:
            pytest.skip("the window is known")
        y = gf.sum(function(x))
        first = gf.gradients(y, [x], np.array(16384, dtype))
        values = np.linspace(-1, 1, n).astype("float16")
        results.append(
            [a.astype("float64") for a in evaluate([y, *first], {x: values.astype(dtype)})]
        )
    for have, want in zip(*results, strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-3, atol=6e-8)


@pytest.mark.parametrize("half", HALVES)
def test_what_autocast_does_with_composites(half: str) -> None:
    x, y = gf.placeholder(half, (3, 4)), gf.placeholder(half, (3, 4))
    wide = gf.placeholder("float32", (4, 4))
    with gf.autocast(half):
        assert gf.nn.mse_loss(x, y).dtype == np.float32  # a loss is "high"
        assert gf.nn.glu(x).dtype == x.dtype
        assert gf.linalg.multi_dot([wide, wide, wide]).dtype == x.dtype  # products are "low"
        assert "astype" in ops_of(gf.nn.glu(x))
    assert gf.nn.mse_loss(x, y).dtype == x.dtype


def test_arguments_of_several_dtypes_promote() -> None:
    x, wide = gf.placeholder("float16", (3, 4)), gf.placeholder("float32", (3, 4))
    other = gf.placeholder("bfloat16", (3, 4))
    for y in (wide, other, [[0.5] * 4] * 3, np.ones((3, 4), "float32")):
        assert gf.nn.mse_loss(x, y).dtype == np.float32
    for y in (np.ones((3, 4), "float16"), x):
        assert gf.nn.mse_loss(x, target=y).dtype == np.float16
    assert gf.nn.mse_loss(prediction=x, target=np.ones((3, 4), ml_dtypes.bfloat16)).dtype == "f4"
    assert gf.prod(x, dtype="float32").dtype == np.float32
    assert gf.einsum("ij,ij,ij->", x, x, x).dtype == np.float16


def test_layers_keep_their_state_in_float32_along_a_sequence() -> None:
    layer = gf.nn.GRU(3, 4, dtype="float16")
    x = gf.placeholder("float16", (5, 2, 3))
    y, last = layer(x)
    assert {y.dtype.name, last.dtype.name} == {"float16"}
    (gru,) = (n for n in Graph([y]).nodes if n.op.name == "gru")
    assert {s.dtype.name for s in gru.specs} == {"float32"}
    cell = gf.nn.LSTMCell(3, 4, dtype="float16")
    assert [s.dtype.name for s in cell(x[0])] == ["float16"] * 2


def test_gradients_keep_an_input_or_a_result_but_not_both() -> None:
    x = gf.placeholder("float16", (3,))
    for f, again in ((gf.tanh, False), (gf.exp, False), (gf.logsumexp, True), (gf.std, True)):
        y = f(x)
        (slope,) = gf.gradients(y, [x])
        reads = {t for node in Graph([slope]).nodes for t in node.inputs if node is not y.node}
        assert (y in reads) != again


@pytest.mark.parametrize(
    "square",
    [
        lambda x: gf.square(gf.linalg.vector_norm(x)),
        lambda x: (y := gf.linalg.vector_norm(x)) * y,
        lambda x: gf.sum(gf.square(gf.hypot(x, x))),
        lambda x: gf.square(gf.std(x)),
    ],
)
def test_squares_of_roots_have_second_derivatives_at_0_in_16_bits(square: Any) -> None:
    found = []
    for dtype in ("float32", "float16"):
        x = gf.placeholder(dtype, (3,))
        first = gf.gradients(square(x), [x])
        second = gf.gradients(gf.sum(first[0]), [x])
        found.append(evaluate([*first, *second], {x: np.zeros(3, dtype)}))
    for want, have in zip(*found, strict=True):
        assert np.isfinite(want).all() and have.tolist() == want.tolist()
