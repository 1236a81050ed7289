"""`gf.onnx.load`: inputs, outputs and variables; what is specialised, and what runs on the host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import graphflow as gf
from graphflow.errors import FeedError, OnnxError, OpError, StepTimeout, UnsupportedOnnxError
from tests.onnx.models import INT64, info, initializer, model, perceptron, text

RNG = np.random.default_rng(3)
ROOT = Path(__file__).resolve().parents[2]


def draw_normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype("float32")


def same_as_reference(proto: Any, *feeds: dict[str, Any], rtol: float = 1e-5) -> gf.onnx.Model:
    """Run a model on each feed; it gives what onnx's own evaluator gives."""
    m = gf.onnx.load(proto)
    reference = ReferenceEvaluator(proto)
    for feed in feeds:
        for mine, other in zip(m.run(feed).values(), reference.run(None, feed), strict=True):
            assert np.shape(mine) == np.shape(other)
            np.testing.assert_allclose(mine, other, rtol, 1e-6)
    return m


# The surface ------------------------------------------------------------------------------------


def test_without_the_package_onnx_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['onnx'] = None; import graphflow as gf; gf.onnx"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "OnnxError: gf.onnx needs the package onnx" in done.stderr
    assert "pip install 'graphflow[onnx]'" in done.stderr


def test_a_model_is_inputs_outputs_and_variables_of_a_graph() -> None:
    m = same_as_reference(perceptron(), {"x": draw_normal(5, 4)}, {"x": draw_normal(2, 4)})
    assert m.whole
    assert m.inputs["x"].shape[1] == 4 and m.inputs["x"].ndim == 2
    assert sorted(m.variables) == ["b", "v", "w"]
    assert list(m.outputs) == ["y"]
    with gf.Session() as s:
        y = s.run(m.outputs["y"], {m.inputs["x"]: draw_normal(6, 4)})
    assert y.shape == (6, 3)


def test_a_loaded_model_trains() -> None:
    m = gf.onnx.load(perceptron())
    labels = gf.placeholder("int64", (None,))
    loss = -gf.mean(gf.log(gf.take_along_axis(m.outputs["y"], labels[:, None], axis=1)))
    step = gf.optim.SGD(0.5).minimize(loss)
    feeds = {m.inputs["x"]: draw_normal(16, 4), labels: RNG.integers(0, 3, 16)}
    with gf.Session() as s:
        before = s.run(loss, feeds)
        for _ in range(20):
            s.run(step, feeds)
        assert s.run(loss, feeds) < before - 0.1
        assert m.run({"x": feeds[m.inputs["x"]]}, session=s)["y"].shape == (16, 3)


def test_variables_are_fixed_if_so_wished_and_running_moments_always_are() -> None:
    assert not gf.onnx.load(perceptron(), trainable=False).variables["w"].node.attrs["trainable"]
    names = ["scale", "bias", "mean", "var"]
    proto = model(
        [helper.make_node("BatchNormalization", ["x", *names], ["y"])],
        [info("x", [None, 2, 3])],
        [info("y", None)],
        [initializer(name, [0.5, 2.0]) for name in names],
    )
    variables = gf.onnx.load(proto).variables
    assert {n: v.node.attrs["trainable"] for n, v in variables.items()} == {
        "scale": True, "bias": True, "mean": False, "var": False,
    }  # fmt: skip


def test_shapes_of_inputs_may_be_given() -> None:
    proto = text("g (float[1, 3] x) => (float[1, 3] y) { y = Exp(x) }")
    m = gf.onnx.load(proto, shapes={"x": (None, 3)})
    assert m.run({"x": np.zeros((7, 3), "float32")})["y"].shape == (7, 3)
    with pytest.raises(FeedError, match=r"load\(shapes"):
        gf.onnx.load(proto).run({"x": np.zeros((7, 3), "float32")})
    with pytest.raises(OnnxError, match="no input 'z'"):
        gf.onnx.load(proto, shapes={"z": (1,)})


@pytest.mark.parametrize(
    ("feeds", "told"),
    [
        ({}, "'x' is missing"),
        ({"x": np.zeros((1, 4), "float32"), "z": 1}, "no input 'z'"),
        ([], "takes 1 inputs"),
        ({"x": np.zeros((1, 4), "complex64")}, "complex64"),
        ({"x": np.zeros(4, "float32")}, "shape"),
    ],
)
def test_feeds_that_do_not_fit_are_refused(feeds: Any, told: str) -> None:
    with pytest.raises(FeedError, match=told):
        gf.onnx.load(perceptron()).run(feeds)


def test_a_size_that_inputs_share_is_one_number() -> None:
    m = gf.onnx.load(text("g (float[N] x, float[N] z) => (float[N] y) { y = Add(x, z) }"))
    assert m.run([draw_normal(3), draw_normal(3)])["y"].shape == (3,)
    with pytest.raises(FeedError, match="size N is 3 in 'x' and 1 in 'z'"):
        m.run([draw_normal(3), draw_normal(1)])


@pytest.mark.parametrize(
    "options",
    [
        {"shapes": {"x": "ab"}},
        {"shapes": {"x": (1, 2, 4)}},
        {"shapes": [1]},
        {"values": {"x": "text"}},
        {"values": 7},
        {"limit": "all"},
    ],
)
def test_options_of_another_form_are_refused(options: Any) -> None:
    with pytest.raises(OnnxError):
        gf.onnx.load(perceptron(), **options)
    with pytest.raises(OnnxError, match="deadline"):
        gf.onnx.load(perceptron()).run([draw_normal(1, 4)], deadline=-1)


def test_nodes_are_named_after_the_nodes_of_the_file() -> None:
    m = gf.onnx.load(perceptron())
    names = [node.name for node in gf.Graph(m.outputs["y"]).nodes]
    assert "first/matmul" in names and "second/matmul" in names


def test_a_node_that_fails_names_its_onnx_node() -> None:
    proto = text("g (float[N, 3] x, int64[K] i) => (float[K, 3] y) { [pick] y = Gather(x, i) }")
    m = gf.onnx.load(proto)
    with pytest.raises(OpError, match="pick") as failure:
        m.run({"x": draw_normal(2, 3), "i": np.array([5])})
    assert "the model:1" in str(failure.value)


def test_all_nodes_without_a_translation_are_listed_in_one_error() -> None:
    nodes = [
        helper.make_node("Unheard", ["x"], ["a"], name="one", domain="my.domain"),
        helper.make_node("Exp", ["a"], ["b"]),
        helper.make_node("NeverHeard", ["b"], ["y"], name="two", domain="my.domain"),
    ]
    proto = model(nodes, [info("x", [1])], [info("y", [1])], my_domain=1)
    with pytest.raises(UnsupportedOnnxError, match="2 nodes") as failure:
        gf.onnx.load(proto)
    for word in ("my.domain.Unheard", "'one'", "NeverHeard", "'two'"):
        assert word in str(failure.value)


def test_all_uses_of_operators_that_have_no_translation_are_listed_in_one_error() -> None:
    proto = text(
        """g (float[4] x) => (float[4] a, float[4] b) {
        p = LpNormalization <p = 3> (x)
        a = Exp(p)
        b = LpNormalization <p = 4> (x)
    }"""
    )
    with pytest.raises(UnsupportedOnnxError) as failure:
        gf.onnx.load(proto)
    assert "p = 3" in str(failure.value) and "p = 4" in str(failure.value)


def test_the_page_lists_the_operators_that_can_be_loaded() -> None:
    page = (ROOT / "docs" / "models" / "onnx.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^- `([\w.]+)`: (.+)$", page, re.MULTILINE))
    known = gf.onnx.operators_known()
    assert listed == {domain: ", ".join(names) for domain, names in known.items()}
    assert len(known["ai.onnx"]) > 190


# Shapes -----------------------------------------------------------------------------------------


def test_arithmetic_on_shapes_stays_symbolic() -> None:
    proto = text(
        """g (float[N, M, 4] x) => (float[A, B] y) {
        s = Shape(x)
        i = Constant <value_ints = [0, 1]> ()
        nm = Gather(s, i)
        rows = ReduceProd <keepdims = 1> (nm)
        four = Constant <value_ints = [-1]> ()
        to = Concat <axis = 0> (rows, four)
        y = Reshape(x, to)
    }"""
    )
    m = same_as_reference(proto, {"x": draw_normal(2, 3, 4)}, {"x": draw_normal(5, 1, 4)})
    assert m.whole and m.outputs["y"].shape[1] == 4


@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap"])
@pytest.mark.parametrize("size", ["4", "N"])
def test_padding_by_own_elements_takes_sizes_that_are_not_known(mode: str, size: str) -> None:
    proto = text(
        f"""g (float[2, {size}] x) => (float[2, M] y) {{
        pads = Constant <value_ints = [0, 2, 0, 3]> ()
        y = Pad <mode = "{mode}"> (x, pads)
    }}"""
    )
    m = same_as_reference(proto, {"x": draw_normal(2, 4)})
    assert m.whole


def test_expand_to_the_shape_of_another_tensor_as_exporters_write_it() -> None:
    proto = text(
        """g (float[1, M] x, float[N, M] like) => (float[N, M] y) {
        s = Shape(like)
        minus = Constant <value_ints = [-1, -1]> ()
        is_minus = Equal(s, minus)
        one = Constant <value_ints = [1, 1]> ()
        to = Where(is_minus, one, s)
        y = Expand(x, to)
    }"""
    )
    m = same_as_reference(proto, {"x": draw_normal(1, 3), "like": draw_normal(4, 3)})
    assert m.whole


def test_an_input_that_decides_a_shape_is_specialised_by_value() -> None:
    proto = text("g (float[N] x, int64[2] to) => (float[A, B] y) { y = Reshape(x, to) }")
    x = draw_normal(12)
    feeds = [{"x": x, "to": np.array(to)} for to in ([3, 4], [2, -1], [3, 4])]
    m = same_as_reference(proto, *feeds)
    with pytest.raises(OnnxError, match=r"load\(values"):
        m.outputs["y"]
    given = gf.onnx.load(proto, values={"to": np.array([3, 4])})
    assert given.outputs["y"].shape == (3, 4)
    assert given.run({"x": x})["y"].shape == given.run([x])["y"].shape == (3, 4)
    with pytest.raises(FeedError, match=r"'to' has its value from load\(values"):
        given.run(feeds[0])


def test_a_computed_value_that_decides_a_shape_cuts_the_graph() -> None:
    proto = text(
        """g (float[N] x) => (float[K] y) {
        top = ReduceMax <keepdims = 1> (x)
        k = Cast <to = 7> (top)
        y = Expand(top, k)
    }"""
    )
    m = same_as_reference(
        proto, {"x": np.array([1, 3], "float32")}, {"x": np.array([2, 5, 1], "float32")}
    )
    assert not m.whole
    with pytest.raises(OnnxError, match=r"m\.run"):
        m.outputs["y"]


def test_an_input_without_a_rank_is_known_when_it_is_fed() -> None:
    proto = model([helper.make_node("Exp", ["x"], ["y"])], [info("x", None)], [info("y", None)])
    m = same_as_reference(proto, {"x": draw_normal(3)}, {"x": draw_normal(2, 2)})
    with pytest.raises(OnnxError, match=r"without a rank: x.*load\(shapes"):
        m.outputs["y"]
    assert gf.onnx.load(proto, shapes={"x": (None,)}).whole


# The host ---------------------------------------------------------------------------------------


def test_shapes_that_depend_on_data_run_on_the_host_between_two_graphs() -> None:
    proto = text(
        """g (float[N, M] x) => (float[K] y, int64[2, K] where) {
        big = Abs(x)
        where = NonZero(big)
        at = Transpose <perm = [1, 0]> (where)
        chosen = GatherND(big, at)
        y = Sqrt(chosen)
    }"""
    )
    sparse = np.array([[0, 4, 0], [9, 0, 1]], "float32")
    m = same_as_reference(proto, {"x": sparse}, {"x": np.zeros((1, 3), "float32")})
    assert not m.whole


def test_unique_values_may_keep_the_order_of_their_first_appearance() -> None:
    proto = text(
        """g (float[N] x) => (float[K] y, int64[K] first, int64[N] back, int64[K] count) {
        y, first, back, count = Unique <sorted = 0> (x)
    }"""
    )
    same_as_reference(proto, {"x": np.array([3, 1, 3, 2, 1], "float32")})


def test_strings_and_sequences_pass_through() -> None:
    proto = text(
        """g (string[N] a, string[N] b) => (string[N] y) { y = StringConcat(a, b) }""", opset=20
    )
    feeds = {"a": np.array(["x", "y"], object), "b": np.array(["1", "2"], object)}
    assert gf.onnx.load(proto).run(feeds)["y"].tolist() == ["x1", "y2"]


def test_a_place_outside_a_sequence_is_an_error_that_names_the_node() -> None:
    proto = text(
        """g (float[2] x, int64 i) => (float[2] y) {
        s = SequenceConstruct(x, x)
        [pick] y = SequenceAt(s, i)
    }"""
    )
    m = gf.onnx.load(proto)
    assert m.run({"x": draw_normal(2), "i": np.array(-1)})["y"].shape == (2,)
    with pytest.raises(OnnxError, match=r"pick.*position 2"):
        m.run({"x": draw_normal(2), "i": np.array(2)})


# Control flow -----------------------------------------------------------------------------------

BRANCH = """g (float[N] x, bool c) => (float[N] y) {
    y = If (c) <
        then_branch = t () => (float[N] a) { a = Exp(x) },
        else_branch = e () => (float[N] b) { b = Neg(x) }
    >
}"""


def test_a_branch_is_taken_by_the_value_of_its_condition() -> None:
    x = draw_normal(3)
    m = same_as_reference(
        text(BRANCH), {"x": x, "c": np.array(True)}, {"x": x, "c": np.array(False)}
    )
    assert m.whole, "branches of one shape are a node of the graph"
    known = gf.onnx.load(text(BRANCH), values={"c": np.array(False)})
    assert known.whole


LOOP = """g (float[N] x, int64 n) => (float[N] y, float[K, N] all) {
    go = Constant <value = bool {1}> ()
    y, all = Loop (n, go, x) <
        body = b (int64 i, bool c, float[N] s) => (bool d, float[N] t, float[N] each) {
            d = Identity(c)
            two = Constant <value_float = 2.0> ()
            t = Mul(s, two)
            each = Add(t, x)
        }
    >
}"""


def test_a_loop_carries_its_state_and_stacks_what_each_iteration_gives() -> None:
    x = draw_normal(3)
    m = same_as_reference(text(LOOP), {"x": x, "n": np.array(3)}, {"x": x, "n": np.array(1)})
    assert not m.whole
    none = m.run({"x": x, "n": np.array(0)})
    assert np.array_equal(none["y"], x) and none["all"].shape == (0, 0)
    known = gf.onnx.load(text(LOOP), values={"n": np.array(3)})
    assert known.whole, "a loop of a known length is a node of the graph"
    again = known.run({"x": x})
    assert np.array_equal(again["all"], m.run({"x": x, "n": np.array(3)})["all"])
    assert gf.gradients(gf.sum(known.outputs["y"]), [known.inputs["x"]])[0] is not None


GROWING = BRANCH.replace("Neg(x)", "Concat <axis = 0> (x, x)").replace("[N] y", "[K] y")


def test_branches_of_different_shapes_are_chosen_by_value() -> None:
    x = draw_normal(3)
    m = same_as_reference(
        text(GROWING), {"x": x, "c": np.array(True)}, {"x": x, "c": np.array(False)}
    )
    assert not m.whole


SCAN = """g (float[N] s, float[T, N] x) => (float[N] t, float[N, T] all) {
    t, all = Scan <
        num_scan_inputs = 1, scan_input_directions = [1], scan_output_axes = [1],
        body = b (float[N] a, float[N] r) => (float[N] c, float[N] d) {
            c = Add(a, r)
            d = Mul(c, r)
        }
    > (s, x)
}"""


def test_a_scan_is_a_node_of_the_graph() -> None:
    m = gf.onnx.load(text(SCAN))
    s, x = draw_normal(2), draw_normal(4, 2)
    got = m.run({"s": s, "x": x})
    sums = s + np.cumsum(x[::-1], 0)
    assert np.allclose(got["t"], sums[-1]) and np.allclose(got["all"], (sums * x[::-1]).T)
    assert m.whole


def test_a_loop_without_end_meets_its_deadline() -> None:
    proto = text(
        """g (float[1] x) => (float[1] y) {
        go = Constant <value = bool {1}> ()
        y = Loop ("", go, x) <
            body = b (int64 i, bool c, float[1] s) => (bool d, float[1] t) {
                d = Identity(c)
                t = Identity(s)
            }
        >
    }""".replace('""', "")
    )
    proto.graph.node[1].input[0] = ""
    with pytest.raises(StepTimeout, match=r"Loop.*iteration"):
        gf.onnx.load(proto).run({"x": np.zeros(1, "float32")}, deadline=0.3)


def test_a_function_of_the_model_is_read_in_place() -> None:
    proto = text("g (float[N] x) => (float[N] y) { y = my.twice <k = 3.0> (x) }")
    function = helper.make_function(
        "my",
        "twice",
        ["a"],
        ["b"],
        [
            helper.make_node("Constant", [], ["c"], name="c"),
            helper.make_node("Mul", ["a", "c"], ["b"]),
        ],
        [helper.make_opsetid("", 20)],
        ["k"],
    )
    attribute = function.node[0].attribute.add()
    attribute.name, attribute.ref_attr_name, attribute.type = "value_float", "k", 1
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid("my", 1))
    m = same_as_reference(proto, {"x": draw_normal(4)})
    assert m.whole


def test_dtypes_that_no_tensor_has_live_on_the_host() -> None:
    proto = model(
        [
            helper.make_node("Cast", ["x"], ["small"], to=TensorProto.FLOAT8E4M3FN),
            helper.make_node("Cast", ["small"], ["y"], to=TensorProto.FLOAT),
        ],
        [info("x", [3])],
        [info("y", [3])],
    )
    got = gf.onnx.load(proto).run({"x": np.array([1.0, 1.05, 300], "float32")})["y"]
    assert got.tolist() == [1.0, 1.0, 288.0]


def test_an_optional_input_has_the_value_of_its_initializer() -> None:
    proto = model(
        [helper.make_node("Add", ["x", "b"], ["y"])],
        [info("x", [2]), info("b", [2])],
        [info("y", [2])],
        [initializer("b", [1, 2])],
    )
    assert gf.onnx.load(proto).run([np.zeros(2, "float32")])["y"].tolist() == [1, 2]


def test_bytes_and_files_load_alike(tmp_path: Any) -> None:
    content = perceptron().SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    x = draw_normal(2, 4)
    a, b = (gf.onnx.load(source).run({"x": x})["y"] for source in (content, path))
    assert np.array_equal(a, b)
    assert "m.onnx" in repr(gf.onnx.load(path))


def test_an_opset_changes_what_an_operator_means() -> None:
    source = "g (float[2, 2, 2] x) => (float[2, 2, 2] y) { y = Softmax(x) }"
    x = draw_normal(2, 2, 2)
    new, old = (gf.onnx.load(text(source, opset)).run({"x": x})["y"] for opset in (13, 11))
    assert np.allclose(new.sum(-1), 1) and np.allclose(old.reshape(2, 4).sum(-1), 1)


def test_ints_are_divided_towards_zero() -> None:
    proto = text("g (int32[4] a, int32[4] b) => (int32[4] y) { y = Div(a, b) }")
    feeds = {"a": np.array([7, -7, 7, -6], "int32"), "b": np.array([2, 2, -2, 3], "int32")}
    assert gf.onnx.load(proto).run(feeds)["y"].tolist() == [3, -3, -3, -2]


def test_int64_constants_stay_constants() -> None:
    proto = model(
        [helper.make_node("Gather", ["x", "i"], ["y"])],
        [info("x", [3])],
        [info("y", [2])],
        [initializer("i", [2, 0], "int64")],
    )
    m = gf.onnx.load(proto)
    assert not m.variables and m.whole and m.output_names == ("y",)


def test_a_model_and_its_outputs_say_what_they_are() -> None:
    loaded = gf.onnx.load(perceptron())
    assert f"{len(loaded.variables)} variables" in repr(loaded)
    (name,) = loaded.output_names
    assert name in loaded.outputs and "unknown" not in loaded.outputs
    assert name in repr(loaded.outputs)


SIZE = [
    helper.make_node("Shape", ["x"], ["s"]),
    helper.make_node("Gather", ["s", "one"], ["t"], axis=0),
]


def build_sized_model(nodes: list[Any], ints: dict[str, Any], **options: Any) -> gf.onnx.Model:
    """A model of x: int64(B, T) whose nodes may read `t`, with ints as initializers."""
    entries = [initializer(name, value, "int64") for name, value in {"one": 1, **ints}.items()]
    inputs, outputs = [info("x", ["B", "T"], INT64)], [info("y", None, INT64)]
    return gf.onnx.load(model([*SIZE, *nodes], inputs, outputs, entries), **options)


def test_ints_in_initializers_are_folded_as_constants_are() -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["t", "axes"], ["tt"]),
        helper.make_node("Concat", ["tt", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["y"]),
    ]
    m = build_sized_model(nodes, {"axes": [0], "rest": [1, -1]})
    assert m.whole and str(m.outputs["y"].shape) == "(T, 1, B)"


@pytest.mark.parametrize("of_floats", [False, True])
def test_a_range_may_end_at_a_symbolic_size(of_floats: bool) -> None:
    node = helper.make_node
    nodes = [node("Range", ["zero", "t", "one"], ["r"]), node("Add", ["x", "r"], ["y"])]
    if of_floats:
        nodes = [
            *(node("Cast", [n], [n + "f"], to=1) for n in ("zero", "t", "one")),
            node("Range", ["zerof", "tf", "onef"], ["rf"]),
            node("Cast", ["rf"], ["r"], to=7),
            nodes[1],
        ]
    m = build_sized_model(nodes, {"zero": 0})
    x = np.ones((2, 5), "int64")
    assert m.whole and np.array_equal(m.run([x])["y"], x + np.arange(5))


def test_a_constant_is_cut_to_a_symbolic_size() -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["t", "axes"], ["tt"]),
        helper.make_node("Slice", ["ids", "zero", "tt", "axes1"], ["p"]),
        helper.make_node("Concat", ["x", "p"], ["y"], axis=0),
    ]
    m = build_sized_model(
        nodes, {"axes": [0], "zero": [0], "axes1": [1], "ids": np.arange(12)[None]}
    )
    assert m.whole
    x = np.ones((2, 5), "int64")
    assert np.array_equal(m.run([x])["y"], [*x, np.arange(5)])


def test_sizes_are_scaled_by_whole_floats_and_compared() -> None:
    node = helper.make_node
    nodes = [
        node("Cast", ["t"], ["f"], to=1),
        node("Cast", ["two"], ["g"], to=1),
        node("Mul", ["f", "g"], ["h"]),
        node("Floor", ["h"], ["i"]),
        node("Cast", ["i"], ["j"], to=7),
        node("Max", ["j", "t"], ["k"]),
        node("Unsqueeze", ["k", "axes"], ["to"]),
        node("Expand", ["one", "to"], ["y"]),
    ]
    m = build_sized_model(nodes, {"two": 2, "axes": [0]})
    assert m.whole and m.run([np.ones((2, 5), "int64")])["y"].shape == (10,)


def test_an_output_that_is_no_tensor_names_the_remedy() -> None:
    node = helper.make_node
    cases = [
        ([node("ReduceSum", ["x"], ["s1"], keepdims=0), node("Reshape", ["one", "s1"], ["y"])],
         "load\\(values={'x': …}\\)"),
        ([node("Unsqueeze", ["t", "axes"], ["k"]), node("TopK", ["x", "k"], ["y", "places"])],
         "load\\(shapes={'x': \\(B, T\\)}\\)"),
        ([node("NonZero", ["x"], ["y"])], "use m.run"),
    ]  # fmt: skip
    for nodes, told in cases:
        m = build_sized_model(nodes, {"axes": [0]})
        assert not m.whole
        with pytest.raises(gf.errors.OnnxError, match=told):
            m.outputs["y"]


def test_an_opset_may_be_imported_twice_as_one_version() -> None:
    proto = text("g (float[1] x) => (float[1] y) { y = Exp(x) }")
    proto.opset_import.extend([helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx", 20)])
    assert gf.onnx.load(proto).run([np.zeros(1, "float32")])["y"].tolist() == [1]


def test_a_constant_that_is_shorter_than_a_symbolic_size_is_cut_as_onnx_says() -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["t", "axes"], ["tt"]),
        helper.make_node("Slice", ["ids", "zero", "tt"], ["y"]),
    ]
    m = build_sized_model(nodes, {"axes": [0], "zero": [0], "ids": np.arange(12)})
    assert m.whole
    assert [m.run([np.ones((1, n), "int64")])["y"].size for n in (5, 15, 7)] == [5, 12, 7]
