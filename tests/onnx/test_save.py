"""`gf.onnx.save`: what is written passes onnx's checker, and computes the same elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import graphflow as gf
from graphflow.errors import ArgumentError, OnnxError, UnsupportedOnnxError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY, Sample
from graphflow.onnx.saving.export import _WRITERS

RNG = np.random.default_rng(7)


def agree(outputs: Any, feeds: Mapping[gf.Tensor, Any], rtol: float = 1e-5) -> onnx.ModelProto:
    """Save; onnx's own evaluator and a second load give what the graph gives."""
    tensors = list(outputs.values()) if isinstance(outputs, dict) else outputs
    with gf.Session() as s:
        expected = s.run(list(tensors), feeds)
        model = gf.onnx.save(None, outputs, inputs=list(feeds), values=s)
    onnx.checker.check_model(model, full_check=True)
    arrays = dict(zip([i.name for i in model.graph.input], feeds.values(), strict=True))
    again = gf.onnx.load(model).run(arrays).values()
    for got in (ReferenceEvaluator(model).run(None, arrays), again):
        for mine, other in zip(expected, got, strict=True):
            assert mine.dtype == other.dtype and mine.shape == other.shape
            scale = 1.0 + float(np.max(np.abs(mine), initial=0.0, where=np.isfinite(mine)))
            assert np.allclose(mine, other, rtol, 1e-6 * scale, equal_nan=True)
    return model


def draw_normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype("float32")


def test_a_perceptron_of_any_batch_goes_through_onnx_and_back() -> None:
    x = gf.placeholder("float32", ("n", 8), name="x")
    w, b = gf.variable(draw_normal(8, 16), name="w"), gf.variable(draw_normal(16), name="b")
    v = gf.variable(draw_normal(16, 3), name="v")
    y = gf.nn.softmax(gf.nn.gelu(x @ w + b) @ v)
    model = agree({"chances": y, "best": gf.argmax(y, axis=-1)}, {x: draw_normal(5, 8)})
    assert [o.name for o in model.graph.output] == ["chances", "best"]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"
    loaded = gf.onnx.load(model)
    assert loaded.inputs["x"].shape[1] == 8
    assert sorted(loaded.variables) == ["b", "v", "w"]


def test_trained_values_are_written_not_the_initial_ones() -> None:
    x = gf.placeholder("float32", (2,), name="x")
    w = gf.variable(np.zeros(2, "float32"), name="w")
    with gf.Session() as s:
        s.set(w, np.array([1.0, 2.0]))
        model = gf.onnx.save(None, x * w, values=s)
    (got,) = ReferenceEvaluator(model).run(None, {"x": np.ones(2, "float32")})
    assert got.tolist() == [1, 2]
    by_hand = gf.onnx.save(None, x * w, values={w: [3.0, 4.0]})
    (got,) = ReferenceEvaluator(by_hand).run(None, {"x": np.ones(2, "float32")})
    assert got.tolist() == [3, 4]


def test_a_convolutional_network_goes_through_onnx_and_back() -> None:
    x = gf.placeholder("float32", (None, 3, 12, 12), name="x")
    w = gf.variable(draw_normal(8, 3, 3, 3), name="w")
    scale, bias = (
        gf.variable(draw_normal(8), name="scale"),
        gf.variable(draw_normal(8), name="bias"),
    )
    mean, spread = gf.constant(draw_normal(8)), gf.constant(np.abs(draw_normal(8)) + 0.1)
    h = gf.nn.conv2d(x, w, stride=2, padding=1)
    h = gf.nn.relu(gf.nn.batch_norm(h, scale, bias, mean, spread))
    h = gf.nn.max_pool2d(h, 2)
    h = gf.nn.avg_pool2d(h, 2, stride=1, padding=1)
    flat = gf.reshape(h, (-1, 8 * 4 * 4))
    agree(
        [flat @ gf.variable(draw_normal(128, 5), name="head")], {x: draw_normal(4, 3, 12, 12)}, 1e-4
    )


@pytest.mark.parametrize("causal", [False, True])
def test_an_attention_block_with_shared_keys_goes_through_onnx_and_back(causal: bool) -> None:
    x = gf.placeholder("float32", ("batch", "time", 16), name="x")
    batch, time = x.shape[:2]
    h = gf.nn.layer_norm(
        x, gf.variable(draw_normal(16), name="s"), gf.variable(draw_normal(16), name="b")
    )

    def heads(count: int) -> gf.Tensor:
        rows = h @ gf.variable(draw_normal(16, count * 4), name=f"w{count}")
        return gf.permute_dims(gf.reshape(rows, (batch, time, count, 4)), (0, 2, 1, 3))

    q, k = heads(4), heads(2)
    mixed = gf.nn.attention(q, k, k, causal=causal)
    y = x + gf.reshape(gf.permute_dims(mixed, (0, 2, 1, 3)), (batch, time, 16))
    agree([y], {x: draw_normal(2, 6, 16)}, 1e-4)


def test_a_size_that_is_not_known_is_computed_from_the_inputs_shape() -> None:
    x = gf.placeholder("float32", ("n", "m"), name="x")
    n, m = x.shape
    agree(
        [gf.reshape(gf.broadcast_to(x, (2, n, m)), (n * 2, m)), gf.sum(x) / n, gf.ones((n + 1,))],
        {x: draw_normal(3, 4)},
    )


PLAIN = set("?bhilqBHILQefd")  # characters of the dtypes that onnx's evaluator computes with
# It takes no scalars here, and no groups there.
NOT_ELSEWHERE = {"softsign", "conv_transpose", "det"}


def _list_written_samples() -> list[Any]:
    return [
        pytest.param(op, sample, id=f"{op.name}-{i}")
        for op in REGISTRY.values()
        if op.name in _WRITERS
        for i, sample in enumerate(op.samples)
        if all(spec.dtype.char in PLAIN for spec in sample.inputs)
        and sample.attrs.get("dtype") not in ("bfloat16", "complex64", "complex128")
        and sample.attrs.get("sorted", True)  # else any order is right
        and not (op.name == "pad" and max(sample.attrs["step"]) > 1)  # ONNX cannot say it
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize(("op", "sample"), _list_written_samples())
def test_every_op_that_is_written_computes_the_same_elsewhere(op: Any, sample: Sample) -> None:
    inputs = []
    for spec in sample.inputs:
        if spec.dtype.kind == "f":
            span = sample.high - sample.low
            inputs.append((RNG.random(spec.shape) * span + sample.low).astype(spec.dtype))
        else:
            low = int(op.name in ("fmod", "remainder"))  # nothing is divided by 0
            inputs.append(RNG.integers(low, sample.classes + low, spec.shape).astype(spec.dtype))
    given = [gf.placeholder(s.dtype, s.shape, name=f"x{i}") for i, s in enumerate(sample.inputs)]
    made = op(*given, **sample.attrs)
    outputs = [made] if isinstance(made, gf.Tensor) else list(made)
    if op.name == "attention":
        outputs = outputs[:1]
    if op.name == "floor_divide" and inputs[0].dtype.kind == "i":
        pytest.skip("ONNX divides ints towards zero")
    model = gf.onnx.save(None, outputs, inputs=given)
    feeds = {f"x{i}": x for i, x in enumerate(inputs)}
    expected = evaluate(outputs, dict(zip(given, inputs, strict=True)))
    loaded = gf.onnx.load(model).run(feeds).values()
    for mine, other in zip(expected, loaded, strict=True):
        assert mine.dtype == other.dtype
        assert np.allclose(mine, other, 1e-3 if mine.dtype == np.float16 else 1e-5, 1e-5)
    if op.name in NOT_ELSEWHERE:
        return
    with np.errstate(invalid="ignore"):  # onnx's softmax of a row of -inf
        elsewhere = ReferenceEvaluator(model).run(None, feeds)
    for mine, other in zip(expected, elsewhere, strict=True):
        assert mine.shape == other.shape
        assert np.allclose(mine, other, 5e-3 if mine.dtype == np.float16 else 1e-4, 1e-4)


def test_all_ops_that_onnx_cannot_say_are_named_in_one_error_with_their_lines() -> None:
    x = gf.placeholder("float32", (3, 3), name="x")
    bad = gf.linalg.inv(x) + gf.linalg.cholesky(x)
    with pytest.raises(UnsupportedOnnxError, match="2 nodes") as failure:
        gf.onnx.save(None, bad)
    assert "inv" in str(failure.value) and "cholesky" in str(failure.value)
    assert f"{__file__}:" in str(failure.value)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    x = gf.placeholder("float32", (2,), name="x")
    path = tmp_path / "model.onnx"
    gf.onnx.save(path, x + 1.0)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert gf.onnx.load(path).run({"x": np.zeros(2, "float32")})["add"].tolist() == [1, 1]
    with pytest.raises(OnnxError, match="cannot be written"):
        gf.onnx.save(tmp_path / "nowhere" / "model.onnx", x + 1.0)


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [("x", None), ([1.0], None), ({"": None}, None), (None, None), (..., [])],
)
def test_arguments_of_another_form_are_refused(outputs: Any, inputs: Any) -> None:
    x = gf.placeholder("float32", (2,), name="x")
    with pytest.raises(ArgumentError, match=f"save at {__file__}"):
        gf.onnx.save(None, x + 1.0 if outputs is ... else outputs, inputs=inputs)


def test_a_value_of_another_shape_is_refused() -> None:
    w = gf.variable(np.zeros(2, "float32"), name="w")
    with pytest.raises(OnnxError, match="'w'"):
        gf.onnx.save(None, w * 2.0, values={w: np.zeros(3)})


def test_values_that_lack_a_variable_are_refused() -> None:
    w = gf.variable(np.zeros(2, "float32"), name="enc/w")
    b = gf.variable(np.zeros(2, "float32"), name="b")
    with pytest.raises(
        OnnxError, match=r"lack variables enc/w; no variable is named ecn/w.*'ecn/w'"
    ):
        gf.onnx.save(None, w + b, values={b: np.ones(2), "ecn/w": np.ones(2)})
    gf.onnx.save(None, w + b, values={b: np.ones(2), "enc/w": np.ones(2), "adam": np.ones(2)})


def test_what_is_picked_scattered_and_sorted_goes_through_onnx_with_unknown_sizes() -> None:
    x = gf.placeholder("float32", ("n", "m"), name="x")
    i = gf.placeholder("int64", ("n", 3), name="i")
    agree(
        [
            gf.gather(x, i), gf.put_along_axis(x, i, gf.take_along_axis(x, i, axis=1), axis=1),
            gf.scatter_add(x, i[0], x[:, :3], axis=1), gf.gather_nd(x, i[:, 1:]),
            gf.sort(x, descending=True), gf.argsort(x, axis=0), gf.linalg.vector_norm(x, axis=1),
        ],
        {x: draw_normal(4, 5), i: np.array([[0, -1, 2], [1, 3, -4], [3, 0, -2], [2, 2, 0]])},
    )  # fmt: skip
