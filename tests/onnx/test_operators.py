"""Operators beyond what onnx's suite has of them: any batch size, attributes that make no sense,
gradients within a model, random numbers, ensembles of trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import graphflow as gf
from graphflow.errors import GraphflowError, OnnxError, UnsupportedOnnxError
from tests.onnx.models import info, initializer, model

RNG = np.random.default_rng(5)
ML = "ai.onnx.ml"
TRAINING = "ai.onnx.preview.training"
CODES = {
    "float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8, "int32": TensorProto.INT32, "float16": TensorProto.FLOAT16,
}  # fmt: skip


def draw_normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype("float32")


def ints(low: int, high: int, *shape: int, dtype: str = "int64") -> Any:
    return RNG.integers(low, high, shape).astype(dtype)


@dataclass(frozen=True)
class Case:
    """One node: what is fed (its first axis is the batch), and what is known.

    `batched`: the axis of each input along which there may be any number.
    """

    op: str
    feeds: Sequence[Any]
    known: dict[int, Any] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)
    domain: str = ""
    outputs: int = 1
    opset: int = 22
    batched: Any = 0
    id: str = ""

    def proto(self) -> Any:
        """The feeds are the inputs whose places the known values leave free."""
        count = len(self.feeds) + len(self.known)
        names = [f"i{i}" for i in range(count)]
        free = [i for i in range(count) if i not in self.known]
        infos = []
        for i, x in zip(free, self.feeds, strict=True):
            axis = self.batched.get(i) if isinstance(self.batched, dict) else self.batched
            shape = ["N" if a == axis else n for a, n in enumerate(x.shape)]
            infos.append(info(names[i], shape, CODES[x.dtype.name]))
        fixed = [
            initializer(names[i], value, np.asarray(value).dtype)
            for i, value in self.known.items()
            if value is not None
        ]
        given = [
            "" if i in self.known and self.known[i] is None else n for i, n in enumerate(names)
        ]
        made = [f"o{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, given, made, domain=self.domain, **self.attrs)
        proto = model([node], infos, [info(n, None) for n in made], fixed, opset=self.opset)
        if self.domain:
            proto.opset_import.append(helper.make_opsetid(self.domain, 3 if ML else 1))
        return proto

    def cut(self, n: int) -> dict[str, Any]:
        """The feeds with n along the batch axis."""
        free = [i for i in range(len(self.feeds) + len(self.known)) if i not in self.known]
        result = {}
        for i, x in zip(free, self.feeds, strict=True):
            axis = self.batched.get(i) if isinstance(self.batched, dict) else self.batched
            result[f"i{i}"] = x if axis is None else np.take(x, range(n), axis)
        return result


def f32(*values: float) -> Any:
    return np.array(values, "float32")


def i64(*values: int) -> Any:
    return np.array(values, "int64")


IMAGE = draw_normal(4, 2, 5, 6)
BOXES = np.abs(draw_normal(4, 4)) + f32(0, 0, 2, 2)
CASES = [
    Case("Resize", [IMAGE], {1: None, 2: f32(1, 1, 2, 0.5)}, {"mode": "linear"}),
    Case(
        "Resize", [IMAGE], {1: None, 2: None, 3: i64(7, 3)}, {"mode": "cubic", "axes": [2, 3]},
        id="cubic",
    ),
    Case(
        "Resize", [ints(0, 200, 4, 1, 3, 3, dtype="uint8")], {1: None, 2: f32(1, 1, 2, 2)},
        {"mode": "linear"}, id="of ints",
    ),
    Case("Upsample", [IMAGE], {1: f32(1, 1, 2, 3)}, opset=9),
    Case("GridSample", [IMAGE, draw_normal(4, 3, 2, 2)], attrs={"padding_mode": "border"}),
    Case("AffineGrid", [draw_normal(3, 2, 3)], {1: i64(3, 1, 4, 5)}, batched=None),
    Case(
        "RoiAlign", [BOXES, ints(0, 2, 4)], {0: IMAGE[:2]},
        {"output_height": 2, "output_width": 3, "sampling_ratio": 2},
    ),
    Case("DeformConv", [IMAGE, draw_normal(4, 8, 4, 5)], {1: draw_normal(3, 2, 2, 2)},
         batched={0: 0, 2: 0}),
    Case("Col2Im", [draw_normal(4, 12, 6)], {1: i64(3, 4), 2: i64(2, 2)}),
    Case("CenterCropPad", [IMAGE], {1: i64(3, 9)}, {"axes": [2, -1]}),
    Case("QuantizeLinear", [IMAGE * 9], {1: f32(0.5, 0.1), 2: np.array([3, 250], "uint8")}),
    Case(
        "DequantizeLinear", [ints(-9, 9, 4, 5, dtype="int8")],
        {1: np.abs(draw_normal(1, 3)).repeat(4, 0)}, {"axis": 1, "block_size": 2}, batched=None,
    ),
    Case("DynamicQuantizeLinear", [draw_normal(4, 3)], outputs=3, opset=20),
    Case(
        "MatMulInteger", [ints(0, 255, 4, 3, dtype="uint8")],
        {1: ints(-99, 99, 3, 2, dtype="int8"), 2: np.uint8(7), 3: np.array([1, -5], "int8")},
    ),
    Case(
        "QLinearMatMul", [ints(0, 255, 4, 3, dtype="uint8")],
        {1: np.float32(0.02), 2: np.uint8(120), 3: ints(0, 255, 3, 2, dtype="uint8"),
         4: np.float32(0.01), 5: np.uint8(9), 6: np.float32(0.05), 7: np.uint8(20)},
    ),
    Case(
        "QLinearConv", [ints(0, 255, 4, 2, 5, 5, dtype="uint8")],
        {1: np.float32(0.02), 2: np.uint8(120), 3: ints(0, 255, 3, 2, 3, 3, dtype="uint8"),
         4: f32(0.01, 0.02, 0.03), 5: np.uint8(99), 6: np.float32(0.7), 7: np.uint8(128),
         8: np.array([10, -20, 3000], "int32")}, {"pads": [1, 1, 1, 1]},
    ),
    Case(
        "ConvInteger", [ints(0, 255, 4, 2, 5, 5, dtype="uint8")],
        {1: ints(0, 255, 3, 2, 3, 3, dtype="uint8"), 2: np.uint8(4)}, {"strides": [2, 2]},
    ),
    Case("DFT", [draw_normal(4, 6, 1)], {1: None, 2: np.int64(1)}, {"onesided": 1}, opset=20),
    Case("DFT", [draw_normal(4, 6, 2)], {1: np.int64(8)}, {"inverse": 1}, opset=17, id="inverse"),
    Case("STFT", [draw_normal(4, 20, 1)], {1: np.int64(4), 2: np.abs(draw_normal(8))},
         {"onesided": 1}),
    Case("CumProd", [draw_normal(4, 5)], {1: np.int64(1)}, {"exclusive": 1, "reverse": 1},
         opset=26),
    Case("Det", [draw_normal(4, 3, 3)]),
    Case("Shrink", [draw_normal(4, 3)], attrs={"lambd": 0.3, "bias": 0.1}),
    Case("Scaler", [draw_normal(4, 2)], attrs={"offset": [1.0, 2.0], "scale": [3.0, 0.5]},
         domain=ML),
    Case("Normalizer", [draw_normal(4, 3)], attrs={"norm": "L1"}, domain=ML),
    Case("Binarizer", [draw_normal(4, 3)], attrs={"threshold": 0.2}, domain=ML),
    Case("ArrayFeatureExtractor", [draw_normal(4, 3)], {1: i64(2, 0)}, domain=ML),
    Case(
        "Imputer", [np.where(draw_normal(4, 2) > 0, np.nan, draw_normal(4, 2))],
        attrs={"imputed_value_floats": [7.0, 8.0], "replaced_value_float": np.nan}, domain=ML,
    ),
    Case("OneHotEncoder", [ints(0, 4, 4)], attrs={"cats_int64s": [3, 1, 2]}, domain=ML),
    Case(
        "FeatureVectorizer", [draw_normal(4, 3), draw_normal(4, 1)],
        attrs={"inputdimensions": [2, 3]},
        domain=ML,
    ),
    Case(
        "LabelEncoder", [ints(0, 5, 4, 2)],
        attrs={"keys_int64s": [4, 1, 2], "values_floats": [0.5, 1.5, 2.5], "default_float": -1.0},
        domain=ML,
    ),
    Case(
        "LinearRegressor", [draw_normal(4, 3)],
        attrs={"coefficients": [1.0, 2, 3, 4, 5, 6], "intercepts": [1.0, -1], "targets": 2},
        domain=ML,
    ),
    Case(
        "LinearClassifier", [draw_normal(4, 3)],
        attrs={"coefficients": list(range(9)), "intercepts": [1.0, -1, 0], "multi_class": 1,
               "classlabels_ints": [7, 8, 9], "post_transform": "SOFTMAX"},
        domain=ML, outputs=2,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op} {c.id}".strip())
def test_an_operator_is_part_of_a_graph_for_any_batch(case: Case) -> None:
    proto = case.proto()
    m, reference = gf.onnx.load(proto), ReferenceEvaluator(proto)
    for n in (4, 3) if case.batched is not None else (4,):
        feeds = case.cut(n)
        for mine, other in zip(m.run(feeds).values(), reference.run(None, feeds), strict=True):
            assert mine.shape == other.shape and mine.dtype == other.dtype
            np.testing.assert_allclose(mine, other, 1e-4, 1e-5)
    assert m.whole


# Recurrent networks -----------------------------------------------------------------------------


def layer(op: str, gates: int, time: Any = "T", **attrs: Any) -> Any:
    sides = 2 if attrs.get("direction") == "bidirectional" else 1
    first = attrs.get("layout", 0) == 1
    node = helper.make_node(op, ["x", "w", "r", "b", "lengths"], ["y", "h"], hidden_size=3, **attrs)
    rng = np.random.default_rng(1)
    return model(
        [node],
        [info("x", ["N", time, 2] if first else [time, "N", 2]), info("lengths", ["N"], 6)],
        [info("y", None), info("h", None)],
        [
            initializer("w", rng.standard_normal((sides, gates * 3, 2))),
            initializer("r", rng.standard_normal((sides, gates * 3, 3))),
            initializer("b", rng.standard_normal((sides, 2 * gates * 3))),
        ],
    )


@pytest.mark.parametrize(("op", "gates", "functions"), [
    ("RNN", 1, ["Affine", "LeakyRelu"]),
    ("GRU", 3, ["HardSigmoid", "Tanh", "Sigmoid", "ScaledTanh"]),
    ("LSTM", 4, ["Sigmoid", "Tanh", "Softsign", "Sigmoid", "Elu", "Relu"]),
])  # fmt: skip
def test_both_directions_are_each_its_own_layer(op: str, gates: int, functions: list[str]) -> None:
    both = gf.onnx.load(layer(op, gates, direction="bidirectional", activations=functions))
    assert both.whole
    x, lengths = draw_normal(5, 2, 2), np.array([5, 3], "int32")
    y, h = both.run({"x": x, "lengths": lengths}).values()
    assert y.shape == (5, 2, 2, 3) and h.shape == (2, 2, 3)
    half = len(functions) // 2
    for side, way in enumerate(("forward", "reverse")):
        chosen = functions[side * half :][:half]
        proto = layer(op, gates, direction=way, activations=chosen)
        whole = layer(op, gates, direction="bidirectional", activations=functions)
        for mine, theirs in zip(proto.graph.initializer, whole.graph.initializer, strict=True):
            part = numpy_helper.to_array(theirs)[side : side + 1]
            mine.CopyFrom(numpy_helper.from_array(part, mine.name))
        one, last = gf.onnx.load(proto).run({"x": x, "lengths": lengths}).values()
        np.testing.assert_allclose(y[:, side], one[:, 0], 1e-5, 1e-6)
        np.testing.assert_allclose(h[side], last[0], 1e-5, 1e-6)
    assert np.all(y[3:, :, 1] == 0)
    np.testing.assert_array_equal(h[0, 1], y[2, 0, 1])


@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_the_batch_may_come_first(op: str, gates: int) -> None:
    x, lengths = draw_normal(4, 2, 2), np.array([4, 2], "int32")
    y, h = gf.onnx.load(layer(op, gates)).run({"x": x, "lengths": lengths}).values()
    proto = layer(op, gates, layout=1)
    turned, last = gf.onnx.load(proto).run({"x": x.swapaxes(0, 1), "lengths": lengths}).values()
    np.testing.assert_array_equal(turned, np.moveaxis(y, 2, 0))
    np.testing.assert_array_equal(last, np.moveaxis(h, 1, 0))


ONE_OP = [("LSTM", 4, {}), ("GRU", 3, {}), ("GRU", 3, {"linear_before_reset": 1})]


@pytest.mark.parametrize(("op", "gates", "more"), ONE_OP)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_a_layer_of_the_usual_activations_is_one_op_for_each_direction(
    op: str, gates: int, more: dict[str, int], direction: str
) -> None:
    proto = layer(op, gates, direction=direction, **more)
    proto.graph.node[0].input[4] = ""
    del proto.graph.input[1]
    m = gf.onnx.load(proto)
    names = [n.op.name for n in gf.Graph([m.outputs["y"], m.outputs["h"]]).nodes]
    assert names.count(op.lower()) == 1 + (direction == "bidirectional") and "scan" not in names
    x = draw_normal(4, 2, 2)
    if direction != "bidirectional":  # the reference has one direction only
        want = ReferenceEvaluator(proto).run(None, {"x": x}) if direction == "forward" else None
        turned = {"x": x[::-1].copy()}
        forward = gf.onnx.load(layer(op, gates, **more)).run(
            {**turned, "lengths": np.full(2, 4, "int32")}
        )
        expected = want[0] if want else forward["y"][::-1]
        np.testing.assert_allclose(m.run([x])["y"], expected, 1e-5, 1e-6)


@pytest.mark.parametrize(("op", "gates", "more"), ONE_OP)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_a_layer_with_lengths_is_one_op_for_each_direction(
    op: str, gates: int, more: dict[str, int], direction: str
) -> None:
    m = gf.onnx.load(layer(op, gates, direction=direction, **more))
    names = [n.op.name for n in gf.Graph([m.outputs["y"], m.outputs["h"]]).nodes]
    assert names.count(op.lower()) == 1 + (direction == "bidirectional") and "scan" not in names
    x, lengths = draw_normal(5, 2, 2), np.array([5, 3], "int32")
    padded = m.run({"x": x, "lengths": lengths})
    for b, length in enumerate(lengths):  # a sequence alone, without padding
        alone = m.run({"x": x[:length, [b]], "lengths": lengths[[b]]})
        np.testing.assert_allclose(padded["y"][:length, :, [b]], alone["y"], 1e-5, 1e-6)
        np.testing.assert_allclose(padded["h"][:, [b]], alone["h"], 1e-5, 1e-6)
    assert not padded["y"][3:, :, 1].any()


def test_linear_attention_takes_any_batch_and_time() -> None:
    names = ["q", "k", "v", "", "decay", "beta"]
    node = helper.make_node("LinearAttention", names, ["y", "state"], q_num_heads=4, kv_num_heads=2)
    wide = {"q": 12, "k": 6, "v": 4, "decay": 2, "beta": 2}
    proto = model(
        [node],
        [info(name, ["B", "T", size]) for name, size in wide.items()],
        [info("y", None), info("state", None)],
        opset=27,
    )
    m, reference = gf.onnx.load(proto), ReferenceEvaluator(proto)
    for batch, time in ((2, 3), (1, 5)):
        feeds = {name: draw_normal(batch, time, size) * 0.5 for name, size in wide.items()}
        for mine, other in zip(m.run(feeds).values(), reference.run(None, feeds), strict=True):
            np.testing.assert_allclose(mine, other, 1e-4, 1e-5)
    assert m.whole


# Quantised numbers ------------------------------------------------------------------------------


def test_products_of_ints_are_exact_however_long_the_sums() -> None:
    a, b = ints(0, 255, 2, 4000, dtype="uint8"), ints(0, 255, 4000, 3, dtype="uint8")
    proto = Case("MatMulInteger", [a], {1: b}, batched=0).proto()
    (y,) = gf.onnx.load(proto).run([a]).values()
    np.testing.assert_array_equal(y, a.astype("int64") @ b.astype("int64"))


def test_quantisation_saturates_where_halves_overflow() -> None:
    x = np.array([60000, -60000, 3], "float16")
    proto = Case("QuantizeLinear", [x], {1: np.float16(0.01), 2: np.int16(5)}).proto()
    (y,) = gf.onnx.load(proto).run([x]).values()
    assert y.tolist() == [32767, -32768, 305] and y.dtype == np.int16


# Random numbers ---------------------------------------------------------------------------------


def draw_samples(op: str, inputs: Sequence[Any] = (), **attrs: Any) -> Any:
    names = [f"i{i}" for i in range(len(inputs))]
    node = helper.make_node(op, names, ["y"], **attrs)
    fixed = [initializer(n, x, x.dtype) for n, x in zip(names, inputs, strict=True)]
    return gf.onnx.load(model([node], [], [info("y", None)], fixed)).run({})["y"]


def test_random_numbers_have_the_moments_that_are_asked_for() -> None:
    uniform = draw_samples("RandomUniform", shape=[4000], low=2.0, high=4.0)
    assert uniform.min() >= 2 and uniform.max() < 4 and abs(uniform.mean() - 3) < 0.1
    like = draw_samples(
        "RandomNormalLike", [np.zeros((50, 80), "float32")], mean=1.0, scale=3.0, dtype=11
    )
    assert like.dtype == np.float64 and abs(like.mean() - 1) < 0.3 and abs(like.std() - 3) < 0.3
    heads = draw_samples("Bernoulli", [np.full(4000, 0.25, "float32")])
    assert abs(heads.mean() - 0.25) < 0.05


def test_a_seed_draws_the_same_numbers_whenever_a_model_is_loaded() -> None:
    first, again, other = (draw_samples("RandomNormal", shape=[5], seed=s) for s in (1.0, 1.0, 2.0))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_classes_are_drawn_as_often_as_they_are_likely() -> None:
    logits = np.log(np.array([[0.5, 0.2, 0.3], [1e-30, 0.9, 0.1]], "float32"))
    y = draw_samples("Multinomial", [logits], sample_size=4000, dtype=7)
    assert y.shape == (2, 4000) and y.dtype == np.int64
    shares = [np.bincount(row, minlength=3) / 4000 for row in y]
    np.testing.assert_allclose(shares, np.exp(logits), atol=0.04)
    assert shares[1][0] == 0


# Training ---------------------------------------------------------------------------------------


def load_training_model(nodes: Sequence[Any], inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    proto = model(nodes, [info(n, ["N"]) for n in inputs], [info(n, None) for n in outputs])
    proto.opset_import.append(helper.make_opsetid(TRAINING, 1))
    return gf.onnx.load(proto)


def gradient(inputs: list[str], outputs: list[str], **attrs: Any) -> Any:
    return helper.make_node("Gradient", inputs, outputs, domain=TRAINING, **attrs)


def test_a_gradient_may_be_taken_at_other_values_and_again() -> None:
    node = helper.make_node
    m = load_training_model(
        [
            node("Mul", ["x", "x"], ["s"]),
            node("Mul", ["s", "w"], ["y"]),
            gradient(["x", "w"], ["dx"], xs=["x"], zs=["w"], y="y"),
            gradient(["other", "w"], ["dother"], xs=["x"], zs=["w"], y="y"),
            gradient(["x", "w"], ["", "ddw"], xs=["x", "w"], y="dx"),
        ],
        ["x", "w", "other"],
        ["dx", "dother", "ddw"],
    )
    x, w, other = (draw_normal(3) for _ in range(3))
    dx, dother, ddw = m.run([x, w, other]).values()
    np.testing.assert_allclose(dx, 2 * x * w, 1e-6)
    np.testing.assert_allclose(dother, 2 * other * w, 1e-6)
    np.testing.assert_allclose(ddw, 2 * x, 1e-6)


@pytest.mark.parametrize(("inputs", "attrs", "told"), [
    (["x"], {"xs": ["x"], "y": "nothing"}, "'nothing'"),
    (["x", "x"], {"xs": ["x"], "y": "y"}, "2 inputs for the 1 names"),
])  # fmt: skip
def test_a_gradient_of_what_is_not_there_is_refused(
    inputs: list[str], attrs: dict[str, Any], told: str
) -> None:
    nodes = [helper.make_node("Exp", ["x"], ["y"]), gradient(inputs, ["dx"], **attrs)]
    with pytest.raises(UnsupportedOnnxError, match=told):
        load_training_model(nodes, ["x"], ["dx"])


def test_the_first_step_of_adam_has_no_bias_to_correct() -> None:
    names = ["rate", "count", "x", "g", "mean", "squares"]
    node = helper.make_node("Adam", names, ["a", "b", "c"], domain=TRAINING, norm_coefficient=0.1)
    proto = model(
        [node],
        [info("rate", []), info("count", [], 7), *(info(n, ["N"]) for n in names[2:])],
        [info(n, None) for n in "abc"],
    )
    proto.opset_import.append(helper.make_opsetid(TRAINING, 1))
    m, reference = gf.onnx.load(proto), ReferenceEvaluator(proto)
    for count in (0, 3):
        values = [
            f32(0.1)[0],
            np.int64(count),
            draw_normal(4),
            draw_normal(4),
            draw_normal(4),
            draw_normal(4) ** 2,
        ]
        feeds = dict(zip(names, map(np.asarray, values), strict=True))
        for mine, other in zip(m.run(feeds).values(), reference.run(None, feeds), strict=True):
            assert np.isfinite(mine).all()
            np.testing.assert_allclose(mine, other, 1e-4, 1e-6)


# Ensembles of trees -----------------------------------------------------------------------------


def forest(
    trees: int, modes: Sequence[str], targets: int, rng: Any, what: str = "target"
) -> dict[str, Any]:
    """Attributes of complete trees of three tests each, over three features."""
    names = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids")
    nodes: dict[str, list[Any]] = {f"nodes_{name}": [] for name in names}
    leaves: dict[str, list[Any]] = {
        f"{what}_{name}": [] for name in ("treeids", "nodeids", "ids", "weights")
    }
    for tree in range(trees):
        for i in range(7):
            inner = i < 3
            row = (
                tree, i, int(rng.integers(3)), modes[(tree + i) % len(modes)] if inner else "LEAF",
                float(np.round(rng.standard_normal(), 1)), 2 * i + 1 if inner else 0,
                2 * i + 2 if inner else 0,
            )  # fmt: skip
            for name, item in zip(names, row, strict=True):
                nodes[f"nodes_{name}"].append(item)
            if not inner:
                weight = float(rng.standard_normal())
                leaf = zip(leaves.values(), (tree, i, i % targets, weight), strict=True)
                for items, item in leaf:
                    items.append(item)
    return nodes | leaves


def ensemble(op: str, outputs: int = 1, **attrs: Any) -> Any:
    node = helper.make_node(op, ["x"], [f"o{i}" for i in range(outputs)], domain=ML, **attrs)
    proto = model([node], [info("x", ["N", 3])], [info(f"o{i}", None) for i in range(outputs)])
    proto.opset_import.append(helper.make_opsetid(ML, 3))
    return proto


@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("modes", [
    ["BRANCH_LEQ"],
    ["BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"],
])  # fmt: skip
def test_a_forest_gives_what_its_trees_give_by_themselves(how: str, modes: list[str]) -> None:
    rng = np.random.default_rng(2)
    attrs = forest(5, modes, 2, rng)
    attrs["nodes_missing_value_tracks_true"] = rng.integers(0, 2, 35).tolist()
    proto = ensemble(
        "TreeEnsembleRegressor", n_targets=2, aggregate_function=how, base_values=[0.5, -1.0],
        **attrs,
    )  # fmt: skip
    m = gf.onnx.load(proto)
    x = np.round(rng.standard_normal((9, 3)), 1).astype("float32")
    x[0, 0] = np.nan
    (mine,) = m.run([x]).values()
    np.testing.assert_allclose(mine, _walk_forest(attrs, x, how) + f32(0.5, -1), 1e-5, 1e-6)
    assert m.whole


def _walk_forest(attrs: dict[str, Any], x: Any, how: str) -> Any:
    """The sums of a forest, node by node."""
    tests = {
        "BRANCH_LEQ": np.less_equal, "BRANCH_LT": np.less, "BRANCH_GTE": np.greater_equal,
        "BRANCH_GT": np.greater, "BRANCH_EQ": np.equal, "BRANCH_NEQ": np.not_equal,
    }  # fmt: skip
    trees = len(set(attrs["nodes_treeids"]))
    start = {"MIN": np.finfo("float32").max, "MAX": -np.finfo("float32").max}.get(how, 0.0)
    result = np.full((len(x), 2), start, "float32")
    weights = iter(attrs["target_weights"])
    leaf: dict[tuple[int, int], tuple[int, float]] = {
        key: (i, next(weights))
        for key, i in zip(
            zip(attrs["target_treeids"], attrs["target_nodeids"], strict=True),
            attrs["target_ids"],
            strict=True,
        )
    }
    for row, out in zip(x, result, strict=True):
        for tree in range(trees):
            at = 0
            while (tree, at) not in leaf:
                i = 7 * tree + at
                value, split = row[attrs["nodes_featureids"][i]], f32(attrs["nodes_values"][i])[0]
                lost = np.isnan(value) and attrs["nodes_missing_value_tracks_true"][i]
                goes = lost or tests[attrs["nodes_modes"][i]](value, split)
                at = attrs["nodes_truenodeids" if goes else "nodes_falsenodeids"][i]
            target, weight = leaf[tree, at]
            if how in ("MIN", "MAX"):
                out[target] = (min if how == "MIN" else max)(out[target], weight)
            else:
                out[target] += weight / (trees if how == "AVERAGE" else 1)
    return result


@pytest.mark.parametrize("post", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
def test_a_forest_chooses_among_classes(post: str) -> None:
    attrs = forest(4, ["BRANCH_LEQ"], 3, np.random.default_rng(3), "class")
    proto = ensemble(
        "TreeEnsembleClassifier", 2, classlabels_int64s=[5, 6, 9], post_transform=post, **attrs
    )
    x = draw_normal(6, 3)
    labels, scores = gf.onnx.load(proto).run([x]).values()
    theirs: Any = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_array_equal(labels, theirs[0])
    np.testing.assert_allclose(scores, theirs[1], 1e-5, 1e-6)


def test_labels_that_are_strings_come_from_the_host() -> None:
    attrs = forest(4, ["BRANCH_LEQ"], 2, np.random.default_rng(3), "class")
    proto = ensemble("TreeEnsembleClassifier", 2, classlabels_strings=["no", "yes"], **attrs)
    labels, scores = gf.onnx.load(proto).run([draw_normal(3, 3)]).values()
    assert set(labels.tolist()) <= {"no", "yes"} and scores.shape == (3, 2)


@pytest.mark.parametrize(("change", "told"), [
    ({"nodes_truenodeids": [0, 3, 5, 0, 0, 0, 0]}, "no first node"),
    ({"nodes_truenodeids": [1, 1, 5, 0, 0, 0, 0]}, "leads back to one of its nodes"),
    ({"nodes_truenodeids": [9, 3, 5, 0, 0, 0, 0]}, "leads to no node"),
    ({"nodes_modes": ["OTHER"] * 7}, "OTHER"),
    ({"target_ids": [0, 1, 0, 7]}, "target"),
    ({"target_nodeids": [3, 4, 5, 8]}, "does not exist"),
    ({"aggregate_function": "MODE"}, "MODE"),
    ({"post_transform": "TWICE"}, "TWICE"),
])  # fmt: skip
def test_trees_that_lead_nowhere_are_refused(change: dict[str, Any], told: str) -> None:
    attrs = forest(1, ["BRANCH_LEQ"], 2, np.random.default_rng(3)) | {"n_targets": 2} | change
    with pytest.raises(OnnxError, match=told):
        gf.onnx.load(ensemble("TreeEnsembleRegressor", **attrs))


def test_scores_become_a_dictionary_for_each_row() -> None:
    node = helper.make_node("ZipMap", ["x"], ["y"], domain=ML, classlabels_int64s=[4, 7])
    proto = model([node], [info("x", ["N", 2])], [info("y", None)])
    proto.opset_import.append(helper.make_opsetid(ML, 1))
    rows = gf.onnx.load(proto).run([f32(0.25, 0.75).reshape(1, 2)])["y"]
    assert rows == [{4: 0.25, 7: 0.75}]


# Attributes that make no sense ------------------------------------------------------------------

BAD = [
    (Case("Resize", [IMAGE], {1: None, 2: None}), "exactly one of scales and sizes"),
    (Case("Resize", [IMAGE], {1: None, 2: f32(1, 1, 2, 2)}, {"mode": "fast"}), "fast"),
    (
        Case("Resize", [IMAGE], {1: None, 2: f32(1, 1, 2, 2)},
             {"coordinate_transformation_mode": "tf_half_pixel_for_nn"}, opset=11), "tf_half_pixel",
    ),
    (Case("Upsample", [IMAGE], {1: f32(2, 2)}, opset=9), "2 scales for 4 axes"),
    (Case("GridSample", [IMAGE, draw_normal(4, 2, 2, 2)], attrs={"padding_mode": "wrap"}), "wrap"),
    (
        Case("QuantizeLinear", [IMAGE], {1: draw_normal(2, 2)}), "without a block_size",
    ),
    (
        Case("QuantizeLinear", [IMAGE], {1: np.float32(1), 2: np.uint8(0)},
             {"output_dtype": TensorProto.INT8}), "another output_dtype",
    ),
    (Case("DFT", [draw_normal(4, 6, 3)], {}, opset=20), "last axis of 3"),
    (Case("DFT", [draw_normal(4, 6, 2)], {}, {"onesided": 1}, opset=20), "onesided"),
    (Case("DFT", [draw_normal(4, 6, 1)], {1: None, 2: np.int64(2)}, opset=20), "axis 2"),
    (Case("Normalizer", [draw_normal(4, 3)], attrs={"norm": "L7"}, domain=ML), "L7"),
    (Case("OneHotEncoder", [ints(0, 4, 4)], domain=ML), "categor"),
    (
        Case("LabelEncoder", [ints(0, 4, 4)], domain=ML,
             attrs={"keys_int64s": [1, 2], "values_int64s": [1]}), "2 keys for 1 values",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "told"), BAD, ids=lambda x: getattr(x, "op", None))
def test_what_makes_no_sense_is_refused_by_name(case: Case, told: str) -> None:
    with pytest.raises(GraphflowError, match=told) as caught:
        gf.onnx.load(case.proto()).run(case.cut(4))
    assert case.op in str(caught.value)


@pytest.mark.parametrize(("attrs", "told"), [
    ({"direction": "sideways"}, "sideways"),
    ({"activations": ["Tanh", "Relu"]}, "there are 1 a direction"),
    ({"activations": ["Unheard"]}, "unheard"),
    ({"clip": -1.0}, "clip"),
])  # fmt: skip
def test_a_recurrent_layer_says_what_it_cannot_do(attrs: dict[str, Any], told: str) -> None:
    with pytest.raises(OnnxError, match=told):
        gf.onnx.load(layer("RNN", 1, time=3, **attrs)).run(
            {"x": draw_normal(3, 2, 2), "lengths": np.array([3, 3], "int32")}
        )


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_an_lstm_of_8_bit_weights_is_near_that_of_floats(direction: str, columns: bool) -> None:
    """Weights of 8 bits, with a scale for each direction or each column."""
    plain = layer("LSTM", 4, direction=direction)
    w, r, b = (numpy_helper.to_array(t) for t in plain.graph.initializer)
    entries, names = [initializer("b", b)], []
    for name, weight in (("w", w), ("r", r)):
        turned = weight.swapaxes(1, 2)
        scale = np.abs(turned).max(1 if columns else (1, 2)) / 127
        steps = scale[:, None, :] if columns else scale[:, None, None]
        entries += [
            initializer(name, np.round(turned / steps), "int8"),
            initializer(f"{name}_scale", scale),
            initializer(f"{name}_zero", np.zeros(scale.shape), "int8"),
        ]
        names += [f"{name}_scale", f"{name}_zero"]
    node = helper.make_node(
        "DynamicQuantizeLSTM", ["x", "w", "r", "b", "lengths", "", "", "", *names], ["y", "h"],
        domain="com.microsoft", hidden_size=3, direction=direction,
    )  # fmt: skip
    proto = model([node], plain.graph.input, plain.graph.output, entries, com_microsoft=1)
    m = gf.onnx.load(proto)
    assert m.whole and set(m.variables) == {"b"}
    feeds = {"x": draw_normal(5, 2, 2), "lengths": np.array([5, 3], "int32")}
    for got, want in zip(
        m.run(feeds).values(), gf.onnx.load(plain).run(feeds).values(), strict=True
    ):
        np.testing.assert_allclose(got, want, 0, 0.02)
        assert not np.array_equal(got, want)
