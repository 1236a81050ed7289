"""Large initializers are read once, straight into the arrays that variables begin as."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper

import graphflow as gf
from graphflow.base.process.memory_pages import is_supported
from graphflow.errors import OnnxError
from graphflow.onnx.loading.reading.payloads import ModelBytes, split_off_large
from tests.onnx.models import info, model

node = helper.make_node
DTYPES = ["float32", "float64", "float16", "int8", "int64", "uint16", "bool", "complex64"]


def product(w: Any, tensor: TensorProto | None = None) -> Any:
    given = tensor or numpy_helper.from_array(w, "w")
    return model([node("MatMul", ["x", "w"], ["y"])], [info("x", ["N", len(w)])],
                 [info("y", None)], [given])  # fmt: skip


def as_floats(w: Any) -> Any:
    """A tensor whose elements are `float_data`, not raw bytes."""
    return helper.make_tensor("w", TensorProto.FLOAT, w.shape, w.ravel())


def read_initial_value(m: gf.onnx.Model) -> Any:
    return m.variables["w"].node.attrs["initial"]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("source", ["path", "bytes", "proto"])
def test_a_large_initializer_is_the_same_from_any_source(
    source: str, raw: bool, tmp_path: Path
) -> None:
    w = np.random.default_rng(0).standard_normal((64, 33)).astype("float32")
    proto = product(w, None if raw else as_floats(w))
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    given = {"path": path, "bytes": path.read_bytes(), "proto": proto}[source]
    m = gf.onnx.load(given)
    assert np.array_equal(read_initial_value(m), w) and not read_initial_value(m).flags.writeable
    x = np.ones((2, 64), "float32")
    np.testing.assert_allclose(m.run([x])["y"], x @ w, 1e-4, 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_plain_dtype_leaves_the_parsed_model(dtype: str) -> None:
    w = (np.arange(3000) % 7).astype(dtype)
    content = product(w).SerializeToString()
    rest, large = split_off_large(ModelBytes(content))
    assert len(rest) < 400 and np.array_equal(large[0].view(dtype), w)
    parsed = onnx.ModelProto.FromString(rest)
    assert parsed.graph.initializer[0].name == "w" and not parsed.graph.initializer[0].raw_data
    assert parsed.graph.node[0].op_type == "MatMul" and parsed.opset_import[0].version == 20


def test_a_model_of_unusual_form_is_parsed_whole() -> None:
    w = np.zeros(3000, "float32")
    content = product(w).SerializeToString()
    twice = content + content  # protobuf merges two graphs
    for odd in (
        twice,
        content[:-1],
        b"",
        b"\xff" * 20,
        product(w, as_strings()).SerializeToString(),
    ):
        rest, large = split_off_large(ModelBytes(odd))
        assert rest == odd and not large


def as_strings() -> Any:
    return helper.make_tensor("w", TensorProto.STRING, [200], [b"a word of some length"] * 200)


def test_bytes_that_do_not_match_the_shape_are_refused(tmp_path: Path) -> None:
    proto = product(np.zeros((40, 40), "float32"))
    proto.graph.initializer[0].dims[0] = 41
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(OnnxError, match=r"'w' has 6400 bytes, but float\(41, 40\) takes 6560"):
        gf.onnx.load(path)


@pytest.mark.parametrize("outside", [False, True])
def test_a_model_takes_the_memory_of_its_initializers_once(outside: bool, tmp_path: Path) -> None:
    w = np.zeros((2048, 1024), "float32")  # 8 MiB
    proto = product(w)
    path = tmp_path / "m.onnx"
    if outside:
        external_data_helper.convert_model_to_external_data(proto, location="data")
    onnx.save(proto, path)
    gf.onnx.load(path)
    tracemalloc.start()
    m = gf.onnx.load(path)
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(read_initial_value(m), w)
    assert now < 1.05 * w.nbytes and peak < 1.1 * w.nbytes


@pytest.mark.skipif(not is_supported(), reason="this system has no files without a name")
def test_sessions_read_the_pages_of_a_model_and_write_to_their_own(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((256, 128)).astype("float32")
    path = tmp_path / "m.onnx"
    path.write_bytes(product(w).SerializeToString())
    m = gf.onnx.load(path)
    y, v = m.outputs["y"], m.variables["w"]
    step = gf.optim.SGD(0.1).minimize(gf.mean(y * y))
    x = np.ones((2, 256), "float32")
    with gf.Session() as a, gf.Session() as b:
        first = a.run(y, {m.inputs["x"]: x})
        b.run([y, step], {m.inputs["x"]: x})
        assert not np.array_equal(b.get(v), w)
        assert np.array_equal(a.get(v), w) and np.array_equal(read_initial_value(m), w)
        a.set(v, np.zeros_like(w))
        assert not a.run(y, {m.inputs["x"]: x}).any()
        assert not np.array_equal(b.get(v), 0 * w) and np.array_equal(read_initial_value(m), w)
    with gf.Session() as c:
        assert np.array_equal(c.run(y, {m.inputs["x"]: x}), first)
