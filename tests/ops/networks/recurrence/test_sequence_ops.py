"""LSTM and GRU as ops for whole sequences: native kernels, threads, empty sequences, choice."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY
from graphflow.ops import nn
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from tests.ops.kernels.sharing import HAS_PRODUCTS


class Form(NamedTuple):
    """An op, its attributes but the direction, and how many gates and states it has."""

    name: str
    gates: str
    more: dict[str, Any]
    states: int = 1

    def draw(self, steps: int, batch: int, size: int, dtype: str = "float32") -> list[Any]:
        """z, r, the bias and the states."""
        rng, many = np.random.default_rng(steps), len(self.gates) * size
        shapes = ((steps, batch, many), (many, size), (many,), *[(batch, size)] * self.states)
        return [rng.normal(size=s).astype(dtype) * 0.5 for s in shapes]

    def run(self, inputs: list[Any], reverse: bool = False) -> list[Any]:
        """The results of the op, and of its gradient for the cotangents cos(y) and the states."""
        attrs = {"gates": self.gates, "reverse": reverse, **self.more}
        y, *rest = REGISTRY[self.name].run(np, inputs, attrs)
        r, states, kept = inputs[1], inputs[3:], rest[self.states :]
        given = [np.cos(y), *states, r, *states, y, *kept]
        return [y, *rest, *REGISTRY[f"{self.name}_grad"].run(np, given, attrs)]


FORMS = {
    "lstm": Form("lstm", "iofg", {}, 2),
    "gru": Form("gru", "zrn", {"linear_before_reset": True}),
    "gru that resets first": Form("gru", "rzn", {"linear_before_reset": False}),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@each_form
@pytest.mark.parametrize("size", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("reverse", [False, True])
def test_native_steps_are_those_of_the_formulas(
    form: Form, size: int, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = form.draw(5, 3, size, "float64")
    native = form.run(inputs, reverse)
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    for have, wanted in zip(native, form.run(inputs, reverse), strict=True):
        np.testing.assert_allclose(have, wanted, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(native[1], native[0][0 if reverse else -1])


@each_form
def test_a_sequence_has_the_same_bits_for_any_number_of_threads(form: Form) -> None:
    inputs, found = form.draw(20, 37, 48), []
    for threads in (1, 2, 4):
        with use_pool(Pool(threads)):
            found.append([x.tobytes() for x in form.run(inputs)])
    assert found[0] == found[1] == found[2]


@pytest.mark.skipif(not HAS_PRODUCTS, reason="numpy computes recurrent networks here")
@each_form
@pytest.mark.parametrize("steps", [1, 7, 1030])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_session_computes_the_same_bits_as_the_kernel(
    form: Form, steps: int, threads: int
) -> None:
    inputs = form.draw(steps, 33, 32)
    want = form.run(inputs)
    attrs = {"gates": form.gates, "reverse": False, **form.more}
    arrays = [*inputs, np.cos(want[0])]
    fed = [gf.placeholder("float32", x.shape) for x in arrays]
    r, states, gy = fed[1], fed[3:-1], fed[-1]
    y, *rest = REGISTRY[form.name](*fed[:-1], **attrs)
    given = [gy, *states, r, *states, y, *rest[form.states :]]
    tensors = [y, *rest, *REGISTRY[f"{form.name}_grad"](*given, **attrs)]
    with gf.Session(gf.Cluster.here(threads=threads)) as s:
        for _ in range(2):
            found = s.run(tensors, dict(zip(fed, arrays, strict=True)))
            for have, wanted in zip(found, want, strict=True):
                np.testing.assert_array_equal(have, wanted)


@each_form
@pytest.mark.parametrize("steps, batch", [(0, 2), (3, 0)])
def test_a_sequence_of_no_steps_or_no_rows_keeps_its_state(
    form: Form, steps: int, batch: int
) -> None:
    inputs = form.draw(steps, batch, 4)
    y, *rest = form.run(inputs)
    assert y.shape == (steps, batch, 4)
    for last, first in zip(rest, inputs[3:], strict=False):
        np.testing.assert_array_equal(last, first)
    dr = next(x for x in rest if x.shape == inputs[1].shape)
    assert not dr.any()


@pytest.mark.parametrize("function, gates", [(nn.lstm, 4), (nn.gru, 3)])
def test_a_layer_of_examples_is_the_layer_of_each(function: Any, gates: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3, 2, 5)).astype("float32")
    w, r = (rng.normal(size=(1, gates * 3, n)).astype("float32") for n in (5, 3))
    each = gf.vmap(lambda v: function(v, w, r)[0])(gf.constant(x))
    (found,) = evaluate([each])
    assert "scan" not in {n.op.name for n in gf.Graph([each]).nodes}
    for row, one in zip(found, x, strict=True):
        np.testing.assert_allclose(row, evaluate([function(one, w, r)[0]])[0], rtol=1e-5)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("lengths", [None, [4, 2]])
def test_a_plain_gru_is_one_op_for_each_direction(before: bool, lengths: Any) -> None:
    rng = np.random.default_rng(0)
    x, w, r, b = (rng.normal(size=s) for s in ((4, 2, 5), (2, 9, 5), (2, 9, 3), (2, 18)))

    def ops(w: Any, r: Any, b: Any, **options: Any) -> tuple[list[str], list[Any]]:
        y, h = nn.gru(
            x, w, r, b, lengths=lengths, direction="bidirectional", linear_before_reset=before,
            **options,
        )  # fmt: skip
        return [n.op.name for n in gf.Graph([y, h]).nodes], evaluate([y, h])

    names, found = ops(w, r, b)
    assert names.count("gru") == 2 and "scan" not in names
    turned = [6, 7, 8, 3, 4, 5, 0, 1, 2]  # the same gates with the candidates first
    biases = b.reshape(2, 2, 9)[..., turned].reshape(2, 18)
    names, same = ops(w[:, turned], r[:, turned], biases, gates="nzr")
    assert names.count("scan") == 2 and "gru" not in names
    for a, b in zip(found, same, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    assert "gru" not in ops(w, r, b=None, clip=1.0)[0]


def test_the_ops_refuse_what_does_not_fit() -> None:
    attrs = {"gates": "rzn", "linear_before_reset": True, "reverse": False}
    z, r, bias, h = (gf.constant(x) for x in FORMS["gru"].draw(2, 3, 4))
    op = REGISTRY["gru"]
    with pytest.raises(DTypeError, match=r"r is float64, h is float32; use \.astype"):
        op(z, r.astype("float64"), bias, h, **attrs)
    with pytest.raises(ShapeError, match=r"expected z \(T, B, 3·H\), r \(3·H, H\), h \(B, H\)"):
        op(z, r, bias, h[0], **attrs)
    with pytest.raises(ShapeError, match="one number for each row of r"):
        op(z, r, r, h, **attrs)
    with pytest.raises(ShapeError):
        op(z[:, :2], r, bias, h, **attrs)
