"""Determinants, as they are and as a sign and a logarithm. Public in `gf.linalg`.

Source of the gradients: Giles, "An extended collection of matrix derivative results for forward and
reverse mode algorithmic differentiation", 2008.
"""

from __future__ import annotations

import math
from typing import Any

from graphflow.ir.op import FUNCTIONS, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import TensorSpec, real_dtype, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import conj, require_kind
from graphflow.ops.matrices.linalg.matrix_rules import (
    adjoint,
    call_lapack,
    cast_result,
    cubic_cost,
    make_well_conditioned,
    match_kind,
    square_size,
)
from graphflow.ops.matrices.linalg.solve import inv_op
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import expand_dims, matrix_transpose

M33, BATCH33, C33 = spec("float32", (3, 3)), spec("float32", (2, 3, 3)), spec("complex64", (3, 3))


def _infer_det(x: TensorSpec) -> TensorSpec:
    square_size(x)
    return x.with_shape(x.shape[:-2])


def _infer_cofactor(x: TensorSpec) -> TensorSpec:
    square_size(x)
    return x


def _det_kernel(xp: Any, x: Any) -> Any:
    return cast_result(xp, xp.asarray(xp.linalg.det(x)), x.dtype).reshape(x.shape[:-2])


def _cofactor_kernel(xp: Any, x: Any) -> Any:
    """Compute det(u)·det(v)·u*·s'·v* for x = u·s·v.

    s'ᵢ is the product of all singular values but the i-th.
    """
    u, s, v = call_lapack(xp, xp.linalg.svd, x, "has no singular values: does it hold NaN or inf?")
    n = s.shape[-1]
    others = xp.where(xp.eye(n, dtype=bool), s.dtype.type(1), s[..., None, :]).prod(-1)
    signs = xp.linalg.det(u) * xp.linalg.det(v)
    result = xp.matmul(u.conj() * others[..., None, :], v.conj()) * signs[..., None, None]
    return cast_result(xp, result, x.dtype)


def _cofactor_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    """Apply dC = (tr(Cᵀdx)·C - C·dxᵀ·C) / det x, for regular matrices."""
    c = conj(y)
    inner = FUNCTIONS["sum"](g * c, axis=(-2, -1), keepdims=True)
    crossed = matmul(matmul(c, matrix_transpose(g)), c)
    return ((inner * c - crossed) / _as_matrix(conj(det_op(x))),)


def _as_matrix(values: Tensor) -> Tensor:
    return expand_dims(values, (-2, -1))


# det(x)·x⁻ᵀ, the derivative of the determinant. Singular matrices have it, too.
cofactor = register(
    Op(
        "cofactor",
        infer=_infer_cofactor,
        kernel=_cofactor_kernel,
        vjp=_cofactor_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2),
        cost=cubic_cost(22),
        autocast="high",
        samples=tuple(sample(s, make=make_well_conditioned) for s in (M33, BATCH33, C33)),
    )
)
det_op = register(
    Op(
        "det",
        infer=_infer_det,
        kernel=_det_kernel,
        vjp=lambda g, y, x: (_as_matrix(g) * conj(cofactor(x)),),
        batch=batching.rows,
        sharding=sharding.matrix_rule(2, outputs=(0,)),
        cost=cubic_cost(1),
        autocast="high",
        samples=tuple(sample(s) for s in (M33, BATCH33, C33)),
    )
)


@composite("x", to="high")
@function
def det(x: Any) -> Tensor:
    """Compute the determinant of each matrix of x (…, n, n), float or complex.

    Singular matrices have a gradient, too (the cofactors). Second derivatives need regular
    matrices.

    Raises:
        ShapeError: x is not square.
        DTypeError: x is neither float nor complex.
    """
    result: Tensor = det_op(as_tensor(x))
    return result


def _infer_slogdet(x: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    sign = _infer_det(x)
    return sign, sign.with_dtype(real_dtype(x.dtype))


def _slogdet_kernel(xp: Any, x: Any) -> tuple[Any, Any]:
    sign, log = map(xp.asarray, xp.linalg.slogdet(x))
    shape = x.shape[:-2]
    return (
        cast_result(xp, sign, x.dtype).reshape(shape),
        cast_result(xp, log, real_dtype(x.dtype)).reshape(shape),
    )


def _slogdet_vjp(g: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor]:
    """Apply d(log|det| + i·arg det) = tr(x⁻¹dx); the sign of a real determinant is flat."""
    g_sign, factor = g
    if x.dtype.kind == "c":
        turn: Tensor = FUNCTIONS["imag"](conj(g_sign) * y[0])
        factor = FUNCTIONS["complex"](factor, -turn)
    return (match_kind(_as_matrix(factor) * adjoint(inv_op(x)), x),)


slogdet_op = register(
    Op(
        "slogdet",
        infer=_infer_slogdet,
        kernel=_slogdet_kernel,
        vjp=_slogdet_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2, outputs=(0, 0)),
        cost=cubic_cost(1),
        autocast="high",
        samples=tuple(sample(s, make=make_well_conditioned) for s in (M33, BATCH33, C33)),
    )
)


@composite("x", to="high")
@function
def slogdet(x: Any) -> tuple[Tensor, Tensor]:
    """Compute (sign, log|det|) of each matrix of x (…, n, n); (0, -inf) for singular ones.

    The result neither overflows nor underflows. The sign of complex matrices is a number of modulus
    1.

    Raises:
        ShapeError: x is not square.
        DTypeError: x is neither float nor complex.
        CheckError: from a step that takes the gradient at a singular matrix.
    """
    sign, log = slogdet_op(as_tensor(x))
    return sign, log


@composite("x", to="high")
@function
def logdet(x: Any) -> Tensor:
    """Compute log(det x) of each matrix of x (…, n, n): -inf for det 0, NaN for negative ones.

    Raises:
        ShapeError: x is not square.
        DTypeError: x is not float.
        CheckError: from a step that takes the gradient at a singular matrix.
    """
    x = as_tensor(x)
    require_kind(x.spec, "float")
    sign, log = slogdet_op(x)
    result: Tensor = FUNCTIONS["where"](FUNCTIONS["less"](sign, 0), math.nan, log)
    return result


__all__ = ["det", "logdet", "slogdet"]
