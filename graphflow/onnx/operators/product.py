"""Matrix products, einsum and determinants."""

from __future__ import annotations

from graphflow.ir.op import Tensor
from graphflow.onnx.loading.node_call import Call
from graphflow.onnx.loading.operator_registry import Outputs, operator
from graphflow.ops.matrices import matmul as linalg
from graphflow.ops.matrices.determinant import det
from graphflow.ops.matrices.einsum import einsum


@operator("MatMul")
def _matmul(call: Call) -> Outputs:
    return linalg.matmul(call.tensor(0), call.tensor(1))


@operator("Gemm")
def _gemm(call: Call) -> Outputs:
    a, b = call.tensor(0), call.tensor(1)
    result: Tensor = linalg.matmul(
        a, b, transpose_a=bool(call.attr("transA", 0)), transpose_b=bool(call.attr("transB", 0))
    )
    alpha, beta = call.attr("alpha", 1.0), call.attr("beta", 1.0)
    if alpha != 1.0:
        result = _scaled(result, alpha)
    c = call.optional(2)
    if c is None:
        return result
    return result + (c if beta == 1.0 else _scaled(c, beta))


def _scaled(x: Tensor, factor: float) -> Tensor:
    result: Tensor = x * (int(factor) if x.dtype.kind in "iu" else factor)
    return result


@operator("Einsum")
def _einsum(call: Call) -> Outputs:
    return einsum(call.required("equation").replace(" ", ""), *call.tensors())


@operator("Det")
def _det(call: Call) -> Outputs:
    return det(call.tensor(0))
