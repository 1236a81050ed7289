"""Matrix products and einsum, of floats and of quantised ints."""

from __future__ import annotations

from graphflow.onnx.call import Call
from graphflow.onnx.registry import Outputs, operator
from graphflow.op import Tensor
from graphflow.ops import linalg
from graphflow.ops.convert import astype
from graphflow.ops.einsum import einsum
from graphflow.ops.shape import expand_dims


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


@operator("MatMulInteger")
def _matmul_integer(call: Call) -> Outputs:
    a, b = astype(call.tensor(0), "int32"), astype(call.tensor(1), "int32")
    a_zero, b_zero = call.optional(2), call.optional(3)
    if a_zero is not None:
        a_zero = astype(a_zero, "int32")
        a = a - (expand_dims(a_zero, -1) if a_zero.ndim == 1 and a.ndim > 1 else a_zero)
    if b_zero is not None:
        b = b - astype(b_zero, "int32")
    return linalg.matmul(a, b)


@operator("Einsum")
def _einsum(call: Call) -> Outputs:
    return einsum(call.required("equation").replace(" ", ""), *call.tensors())
