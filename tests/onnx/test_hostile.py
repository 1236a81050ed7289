"""Files that nobody should trust: each is refused with an error of ours."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, external_data_helper, helper, numpy_helper

import graphflow as gf
from graphflow.errors import GraphflowError, OnnxError, OpError
from tests.onnx.models import info, initializer, model, perceptron, text

GOOD = perceptron().SerializeToString()
SEEDS = [
    GOOD,
    text(
        """g (float[2, 4] x) => (float[K] y) {
        s = Shape(x)
        i = Constant <value_ints = [0]> ()
        n = Gather(s, i)
        to = Concat <axis = 0> (i, n)
        z = Reshape <allowzero = 0> (x, to)
        t = Transpose <perm = [1, 0]> (z)
        y = ReduceSum <keepdims = 0> (t, i)
    }"""
    ).SerializeToString(),
    text(
        """g (float[2, 4] x) => (float[2, 4] y) {
        n = Constant <value_int = 3> ()
        go = Constant <value = bool {1}> ()
        y = Loop (n, go, x) <
            body = b (int64 i, bool c, float[2, 4] s) => (bool d, float[2, 4] t) {
                d = Identity(c)
                t = Add(s, x)
            }
        >
    }"""
    ).SerializeToString(),
]


def check_refusal(source: Any, told: str, **options: Any) -> None:
    with pytest.raises(OnnxError, match=told):
        gf.onnx.load(source, **options)


# Bytes ------------------------------------------------------------------------------------------


def test_bytes_that_are_no_model_are_refused() -> None:
    check_refusal(b"", "holds no graph")
    check_refusal(b"\xff" * 100, "not an ONNX model")
    check_refusal(GOOD[: len(GOOD) // 2], "cut short")
    check_refusal(7, "a path, bytes or a ModelProto")


def test_a_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(3 << 30)  # no disk is used
    check_refusal(path, "3221225472 bytes, the limit is 2147483647")
    check_refusal(GOOD, "the limit is 10", limit=10)
    check_refusal(tmp_path / "none.onnx", "cannot be read: No such file")
    check_refusal(tmp_path, "is not a file")


def test_a_model_of_an_unknown_or_missing_opset_is_refused() -> None:
    check_refusal(text("g (float[1] x) => (float[1] y) { y = Exp(x) }", 99), "opset 99")
    proto = perceptron()
    del proto.opset_import[:]
    check_refusal(proto, "imports no opset")
    proto.opset_import.extend([helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx", 19)])
    check_refusal(proto, "as 20 and as 19")


# Names ------------------------------------------------------------------------------------------


def _exp(a: str, b: str) -> Any:
    return helper.make_node("Exp", [a], [b], name=f"{a}_{b}")


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([("x", "y"), ("x", "y")], "which something before it makes"),
        ([("x", "x"), ("x", "y")], "which something before it makes"),
        ([("b", "a"), ("a", "b"), ("a", "y")], "the graph has a cycle"),
        ([("y", "y")], "the graph has a cycle"),
        ([("a", "y"), ("x", "a")], "topological order"),
        ([("nothing", "y")], "which nothing makes"),
        ([("x", "z")], "nothing makes the output 'y'"),
    ],
)
def test_names_are_made_once_and_before_they_are_read(nodes: Any, told: str) -> None:
    check_refusal(model([_exp(*n) for n in nodes], [info("x", [1])], [info("y", [1])]), told)


def test_two_inputs_or_initializers_of_one_name_are_refused() -> None:
    nodes, outputs = [_exp("x", "y")], [info("y", [1])]
    check_refusal(model(nodes, [info("x", [1]), info("x", [2])], outputs), "two inputs")
    check_refusal(model(nodes, [info("x", [1])], outputs * 2), "two outputs")
    twice = [initializer("w", [1]), initializer("w", [2])]
    check_refusal(model(nodes, [info("x", [1])], outputs, twice), "two initializers")


def test_a_subgraph_sees_only_what_comes_before_it() -> None:
    source = """g (float[1] x, bool c) => (float[1] y) {
        y = If (c) < then_branch = t () => (float[1] a) { a = Exp(later) },
                     else_branch = e () => (float[1] b) { b = Neg(x) } >
        later = Exp(x)
    }"""
    check_refusal(text(source), "'later', which nothing makes")


def test_functions_that_contain_themselves_are_refused() -> None:
    proto = text("g (float[1] x) => (float[1] y) { y = my.f (x) }")
    body = [helper.make_node("f", ["a"], ["b"], domain="my")]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1)]
    proto.functions.append(helper.make_function("my", "f", ["a"], ["b"], body, opsets))
    proto.opset_import.append(helper.make_opsetid("my", 1))
    check_refusal(proto, "contain themselves: f")
    proto.functions.append(proto.functions[0])
    check_refusal(proto, "defined twice")


def test_subgraphs_that_are_nested_very_deep_are_refused() -> None:
    inner = helper.make_graph([_exp("x", "y0")], "g", [], [info("y0", [1])])
    for depth in range(20):
        name = f"y{depth + 1}"
        node = helper.make_node("If", ["c"], [name], then_branch=inner, else_branch=inner)
        del node.attribute[1]  # doubling each time would be another attack
        inner = helper.make_graph([node], "g", [], [info(name, [1])])
    proto = model(inner.node, [info("x", [1]), info("c", [], 9)], [info("y20", [1])])
    check_refusal(proto, "nested more than 16")


# Tensors ----------------------------------------------------------------------------------------


def _with_tensor(tensor: TensorProto) -> ModelProto:
    node = helper.make_node("Add", ["x", tensor.name], ["y"])
    return model([node], [info("x", [2])], [info("y", None)], [tensor])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"raw_data": b"123"}, "has 3 bytes, but float"),
        ({"dims": [2, -1]}, "negative size"),
        ({"dims": [1 << 40, 1 << 40], "raw_data": b"1234"}, "has 4 bytes"),
        ({"dims": [2], "float_data": [1.0]}, "cannot be read"),
        ({"data_type": 77, "raw_data": b""}, "unknown"),
        ({"data_type": 0}, "unknown"),
    ],
)
def test_a_tensor_whose_bytes_do_not_match_its_shape_is_refused(changes: Any, told: str) -> None:
    fields = {"dims": [2], "data_type": 1, **changes}
    check_refusal(_with_tensor(TensorProto(name="w", **fields)), f"tensor 'w'.*{told}")


def _external(folder: Path, location: str, offset: int = 0, length: int | None = None) -> Path:
    tensor = numpy_helper.from_array(np.arange(2, dtype="float32"), "w")
    external_data_helper.set_external_data(tensor, location, offset, length)
    tensor.ClearField("raw_data")
    path = folder / "m.onnx"
    path.write_bytes(_with_tensor(tensor).SerializeToString())
    return path


def test_external_data_in_the_folder_of_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "w.bin").write_bytes(b"0000" + np.array([3, 4], "float32").tobytes())
    path = _external(tmp_path, "parts/w.bin", 4, 8)
    assert gf.onnx.load(path).run([np.zeros(2, "float32")])["y"].tolist() == [3, 4]


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "a/../../secret", "", "."])
def test_external_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(8))
    (tmp_path / "models").mkdir()
    check_refusal(_external(tmp_path / "models", location), "outside|no file")


def test_external_data_over_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(8))
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "w.bin").symlink_to(tmp_path / "secret")
    (folder / "sub").symlink_to(tmp_path)
    check_refusal(_external(folder, "w.bin"), "symbolic link")
    check_refusal(_external(folder, "sub/secret"), "symbolic link")


@pytest.mark.parametrize(
    ("offset", "length"), [(4, 8), (-4, 8), (0, 4), (0, 1 << 60), (1 << 62, 8)]
)
def test_external_data_beyond_the_file_is_refused(tmp_path: Path, offset: int, length: int) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(8))
    check_refusal(_external(tmp_path, "w.bin", offset, length), "takes 8 bytes")


def test_external_data_of_a_model_without_a_folder_is_refused(tmp_path: Path) -> None:
    check_refusal(_external(tmp_path, "w.bin").read_bytes(), "give the model by its path")


# Values -----------------------------------------------------------------------------------------


def test_a_constant_of_a_gigantic_shape_is_not_made_while_the_model_is_read() -> None:
    proto = model(
        [helper.make_node("ConstantOfShape", ["s"], ["c"]), helper.make_node("Exp", ["c"], ["y"])],
        [],
        [info("y", None)],
        [initializer("s", [1 << 20, 1 << 20], "int64")],
    )
    m = gf.onnx.load(proto)
    with pytest.raises(GraphflowError, match=r"4\.4e\+03 GB"):
        m.run({})


def test_labels_out_of_range_are_an_error_of_the_node() -> None:
    proto = text(
        """g (float[N, 3] x, int64[N] t) => (float loss) {
        [loss] loss = SoftmaxCrossEntropyLoss(x, t)
    }"""
    )
    m = gf.onnx.load(proto)
    x = np.zeros((2, 3), "float32")
    assert m.run({"x": x, "t": np.array([0, 2])})["loss"] == pytest.approx(np.log(3))
    with pytest.raises(OpError, match="loss"):
        m.run({"x": x, "t": np.array([0, 7])})


@pytest.mark.parametrize(
    "body",
    [
        "y = Reshape(x, five)",
        "y = Concat <axis = 7> (x, x)",
        "y = Transpose <perm = [0, 0]> (x)",
        "y = Conv (x, x)",
        "y = Gemm (x, five)",
        "y = Cast <to = 99> (x)",
        "y = Squeeze (x, five)",
        "y = Pow (x)",
        "y = Attention (x, x)",
        'y = BitShift <direction = "UP"> (x, x)',
    ],
)
def test_nodes_that_make_no_sense_are_refused_by_name(body: str) -> None:
    constant = "five = Constant <value_ints = [5]> ()"
    proto = text(f"g (float[2, 3] x) => (float[K] y) {{ {constant}\n {body} }}")
    with pytest.raises(GraphflowError, match="the model"):
        gf.onnx.load(proto).run({"x": np.zeros((2, 3), "float32")})


# Anything at all --------------------------------------------------------------------------------


def _load_and_run(content: bytes) -> None:
    """Whatever happens is an error of ours."""
    try:
        m = gf.onnx.load(content)
        if not any(t.size == 0 for t in m.inputs.values()):
            m.run({"x": np.ones((2, 4), "float32")}, deadline=5)
    except GraphflowError:
        pass


def _mutate(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case _:
                data[at:at] = data[rng.randrange(len(data)) :][: rng.randrange(1, 30)]
    return bytes(data)


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", range(10))
def test_mutated_models_give_a_result_or_an_error_of_ours(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1000):
        _load_and_run(_mutate(rng.choice(SEEDS), rng))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_an_error_of_ours(content: bytes) -> None:
    _load_and_run(content)
