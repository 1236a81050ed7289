"""Matrix products, einsum and determinants."""

from __future__ import annotations

from graphflow.ir.op import Tensor
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.ops.matrices import matmul as linalg
from graphflow.ops.matrices.einsum import einsum
from graphflow.ops.matrices.linalg.determinant import det


@operator("MatMul")
def _matmul(call: NodeCall) -> Outputs:
    return linalg.matmul(call.tensor(0), call.tensor(1))


@operator("Gemm")
def _gemm(call: NodeCall) -> Outputs:
    a, b = call.tensor(0), call.tensor(1)
    result: Tensor = linalg.matmul(
        a, b, transpose_a=bool(call.attr("transA", 0)), transpose_b=bool(call.attr("transB", 0))
    )
    alpha, beta = call.attr("alpha", 1.0), call.attr("beta", 1.0)
    if alpha != 1.0:
        result = _scale(result, alpha)
    c = call.optional(2)
    if c is None:
        return result
    return result + (c if beta == 1.0 else _scale(c, beta))


def _scale(x: Tensor, factor: float) -> Tensor:
    result: Tensor = x * (int(factor) if x.dtype.kind in "iu" else factor)
    return result


@operator("Einsum")
def _einsum(call: NodeCall) -> Outputs:
    return einsum(call.required_attr("equation").replace(" ", ""), *call.tensors())


@operator("Det")
def _det(call: NodeCall) -> Outputs:
    return det(call.tensor(0))
