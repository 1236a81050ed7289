"""Small ONNX models for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, parser

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def info(name: str, shape: Sequence[Any] | None, code: int = FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, code, shape)


def initializer(name: str, value: Any, dtype: Any = "float32") -> TensorProto:
    return numpy_helper.from_array(np.asarray(value, dtype), name)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    initializers: Sequence[TensorProto] = (),
    opset: int = 20,
    **others: int,
) -> ModelProto:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(initializers))
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(name.replace("_", "."), v) for name, v in others.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def text(source: str, opset: int = 20) -> ModelProto:
    """A model in ONNX's own language: `g (float[N] x) => (float[N] y) { y = Exp(x) }`."""
    header = f'<ir_version: 9, opset_import: ["" : {opset}]>'
    return parser.parse_model(header + source)


def perceptron() -> ModelProto:
    """Two layers over any batch."""
    rng = np.random.default_rng(1)
    w, v = rng.standard_normal((4, 8)), rng.standard_normal((8, 3))
    node = helper.make_node
    return model(
        [
            node("Gemm", ["x", "w", "b"], ["h"], name="first"),
            node("Relu", ["h"], ["r"]),
            node("MatMul", ["r", "v"], ["z"], name="second"),
            node("Softmax", ["z"], ["y"]),
        ],
        [info("x", ["N", 4])],
        [info("y", ["N", 3])],
        [initializer("w", w), initializer("b", np.zeros(8)), initializer("v", v)],
    )


__all__ = ["FLOAT", "INT64", "info", "initializer", "model", "perceptron", "text"]
