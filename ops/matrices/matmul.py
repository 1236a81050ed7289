"""Matrix products: `matmul`, and the product that is added to a tensor.

`matmul` is the op that takes most of the time of typical steps. Small and medium products run
generated kernels (`ops/kernels/gemm/gemm.py`). Large ones run BLAS on blocks, one thread each.
Which of the two runs, and how a product is split (`blas_blocks.py`), depends on shapes, flags and
dtype alone, so results have the same bits for any number of threads. Products of bfloat16 run AMX
tiles where the processor has them (`ops/kernels/gemm/amx_products.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Cost,
    Op,
    Tensor,
    autocast_inputs,
    function,
    promote_inputs,
    register,
    sample,
)
from graphflow.ir.spec import (
    Size,
    TensorSpec,
    broadcast_shapes,
    equate,
    is_half,
    kind,
    product,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import (
    conj,
    require_kind,
    unbroadcast,
)
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.gemm.amx_products import AmxProduct
from graphflow.ops.kernels.gemm.contiguous_products import plan_if_faster_than_blas
from graphflow.ops.kernels.gemm.gemm import MatrixProduct
from graphflow.ops.kernels.gemm.gemv import VectorProduct, plan_vector_product
from graphflow.ops.kernels.gemm.tiny import tiny_task
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import KernelTask, vector_width
from graphflow.ops.matrices.blas_blocks import choose_blocks, multiply_blocks, sum_of_products
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import (
    expand_dims,
    reshape,
    squeeze,
)

# matmul -----------------------------------------------------------------------------------------


def _matmul_sizes(
    a: TensorSpec, b: TensorSpec, ta: bool, tb: bool
) -> tuple[Size, Size, Size, Size]:
    """Return m, k as a has it, k as b has it, and n."""
    m, k = a.shape[-2:] if not ta else a.shape[:-3:-1]
    k2, n = b.shape[-2:] if not tb else b.shape[:-3:-1]
    return m, k, k2, n


def _infer_matmul(
    a: TensorSpec, b: TensorSpec, transpose_a: bool = False, transpose_b: bool = False
) -> TensorSpec:
    require_kind(a, "int", "float", "complex")
    if a.rank < 2 or b.rank < 2:
        raise ShapeError(f"expected matrices, got {show_shape(a.shape)} @ {show_shape(b.shape)}")
    m, k, k2, n = _matmul_sizes(a, b, transpose_a, transpose_b)
    if isinstance(k, int) and isinstance(k2, int) and k != k2:
        shown = [
            show_shape(x.shape) + (" transposed" if flag else "")
            for x, flag in ((a, transpose_a), (b, transpose_b))
        ]
        raise ShapeError(
            f"inner sizes differ, {' @ '.join(shown)} ({k} != {k2}); transpose one operand?"
        )
    equate(k, k2, "inner sizes")
    return a.with_shape((*broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n))


def _cost_matmul(
    a: TensorSpec, b: TensorSpec, transpose_a: bool = False, transpose_b: bool = False
) -> Cost:
    out = _infer_matmul(a, b, transpose_a, transpose_b)
    each = 8 if kind(a.dtype) == "complex" else 2
    return Cost(flops=out.size * each * _matmul_sizes(a, b, transpose_a, transpose_b)[1])


def native_matmul(
    a: TensorSpec, b: TensorSpec, transpose_a: bool = False, transpose_b: bool = False
) -> KernelTask | None:
    """Return the generated kernel of a product, or None if BLAS computes it."""
    of_vector = _generated_vector_product(a, b, transpose_a, transpose_b)
    if of_vector is not None:
        return of_vector.task
    product = _generated_product(a, b, transpose_a, transpose_b)
    if product is None:
        return None
    tiny = None
    if a.rank == 2 == b.rank:
        m, k, _, n = (cast(int, size) for size in _matmul_sizes(a, b, transpose_a, transpose_b))
        tiny = tiny_task(m, k, n, a.dtype.name, transpose_a, transpose_b)
    return tiny or product.task


def _generated_product(
    a: Any, b: Any, transpose_a: bool, transpose_b: bool, added: bool = False
) -> MatrixProduct | AmxProduct | None:
    """Return the kernel for contiguous arrays (or their specs), or None if BLAS multiplies them."""
    if a.dtype != b.dtype or not is_jit_enabled():
        return None
    return plan_if_faster_than_blas(a.shape, b.shape, a.dtype.name, transpose_a, transpose_b, added)


def _generated_vector_product(
    a: Any, b: Any, transpose_a: bool, transpose_b: bool
) -> VectorProduct | None:
    """Return the kernel that multiplies a large matrix and a vector, or None for other operands."""
    if a.dtype != b.dtype or not is_jit_enabled() or vector_width() < 8:
        return None
    return plan_vector_product(a.shape, b.shape, a.dtype.name, transpose_a, transpose_b)


def _is_half_product(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> bool:
    """Return True if a kernel multiplies these 16-bit arrays without converting them."""
    return is_half(a.dtype) and bool(_generated_product(a, b, transpose_a, transpose_b))


def matmul_into(
    xp: Any, out: Any, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False
) -> None:
    """Write the product of a and b, each transposed if its flag is set, to `out`."""
    if xp is np:
        of_vector = _generated_vector_product(a, b, transpose_a, transpose_b)
        if of_vector is not None and out.dtype == a.dtype:
            of_vector.run(out, np.ascontiguousarray(a), np.ascontiguousarray(b))
            return
        generated = _generated_product(a, b, transpose_a, transpose_b)
        if generated is not None and out.dtype == a.dtype:
            a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
            generated.run(address(out), address(a), address(b))
            return
    if xp is np and transpose_a != transpose_b and a.shape == b.shape and np.may_share_memory(a, b):
        # If both operands share memory, numpy computes x @ x.T by `syrk`, which gives other bits.
        b = b.copy()
    if transpose_a:
        a = a.swapaxes(-1, -2)
    if transpose_b:
        b = b.swapaxes(-1, -2)
    axis, blocks = 0, 1
    if xp is np:
        axis, blocks = choose_blocks(out.shape[:-2], out.shape[-2], a.shape[-1], out.shape[-1])
    if blocks == 1:
        xp.matmul(a, b, out=out)
    elif axis == out.ndim:
        sum_of_products(out, a, b, blocks)
    else:
        multiply_blocks(out, a, b, axis, blocks)


def _matmul_kernel(
    xp: Any, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False
) -> Any:
    m = a.shape[-1] if transpose_a else a.shape[-2]
    n = b.shape[-2] if transpose_b else b.shape[-1]
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = xp.empty((*batch, m, n), a.dtype)
    matmul_into(xp, out, a, b, transpose_a, transpose_b)
    return out


def _matmul_vjp(
    g: Tensor, y: Tensor, a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False
) -> tuple[Tensor, Tensor]:
    a, b = conj(a), conj(b)
    if transpose_a:
        ga = matmul(b, g, transpose_a=transpose_b, transpose_b=True)
    else:
        ga = matmul(g, b, transpose_b=not transpose_b)
    if transpose_b:
        gb = matmul(g, a, transpose_a=True, transpose_b=transpose_a)
    else:
        gb = matmul(a, g, transpose_a=not transpose_a)
    return unbroadcast(ga, a.shape), unbroadcast(gb, b.shape)


M34, M45 = spec("float32", (3, 4)), spec("float32", (4, 5))
M43, M54 = spec("float32", (4, 3)), spec("float32", (5, 4))

_BOTH: dict[str, Any] = {"transpose_a": True, "transpose_b": True}
matmul_op = register(
    Op(
        "matmul",
        infer=_infer_matmul,
        kernel=_matmul_kernel,
        into=matmul_into,
        native=native_matmul,
        takes_half=_is_half_product,
        vjp=_matmul_vjp,
        batch=batching.matmul,
        sharding=sharding.matmul_rule,
        cost=_cost_matmul,
        rate="half_product",
        autocast="low",
        samples=(
            sample(M34, M45),
            sample(M43, M45, transpose_a=True),
            sample(M34, M54, transpose_b=True),
            sample(M43, M54, **_BOTH),
            sample(spec("float32", (2, 3, 4)), spec("float32", (2, 4, 2))),
            sample(spec("float32", (2, 1, 3, 4)), spec("float32", (3, 4, 2))),
            sample(spec("int32", (2, 3)), spec("int32", (3, 2))),
            sample(spec("complex64", (2, 3)), spec("complex64", (3, 2))),
            sample(spec("complex64", (3, 2)), spec("complex64", (4, 3)), **_BOTH),
        ),
        promotes=True,
    )
)


# A product that is added to something --------------------------------------------------------


def _infer_accumulate(
    c: TensorSpec, a: TensorSpec, b: TensorSpec, transpose_a: bool = False,
    transpose_b: bool = False,
) -> TensorSpec:  # fmt: skip
    made = _infer_matmul(a, b, transpose_a, transpose_b)
    if c.rank != made.rank or c.dtype != made.dtype:
        raise ShapeError(
            f"the product is {made} and the summand {c}; give them one shape and dtype"
        )
    shape = tuple(equate(n, m, "sizes of a sum") for n, m in zip(c.shape, made.shape, strict=True))
    return made.with_shape(shape)


def generated_accumulation(
    a: Any, b: Any, transpose_a: bool, transpose_b: bool
) -> MatrixProduct | AmxProduct | None:
    """Return the kernel that adds the product to a tensor, or None if the product is made first."""
    if _generated_vector_product(a, b, transpose_a, transpose_b) is not None:
        return None
    return _generated_product(a, b, transpose_a, transpose_b, added=True)


def _native_accumulate(
    c: TensorSpec, a: TensorSpec, b: TensorSpec, transpose_a: bool = False,
    transpose_b: bool = False,
) -> KernelTask | None:  # fmt: skip
    product = generated_accumulation(a, b, transpose_a, transpose_b)
    if product is None:
        return None
    return replace(product.task, order=(2, 1, 0) if product.swapped else (1, 2, 0))


def _accumulate_into(
    xp: Any, out: Any, c: Any, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False
) -> None:
    product = generated_accumulation(a, b, transpose_a, transpose_b) if xp is np else None
    if product is None or not out.flags.c_contiguous:
        xp.add(c, _matmul_kernel(xp, a, b, transpose_a, transpose_b), out=out)
        return
    c, a, b = (np.ascontiguousarray(x) for x in (c, a, b))
    product.run(address(out), address(a), address(b), address(c))


def _accumulate_kernel(
    xp: Any, c: Any, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False
) -> Any:
    out = xp.empty(c.shape, c.dtype)
    _accumulate_into(xp, out, c, a, b, transpose_a, transpose_b)
    return out


def _accumulate_vjp(
    g: Tensor, y: Tensor, c: Tensor, a: Tensor, b: Tensor, transpose_a: bool = False,
    transpose_b: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    return (g, *_matmul_vjp(g, y, a, b, transpose_a, transpose_b))


M35 = spec("float32", (3, 5))
accumulate_op = register(
    Op(
        "accumulate_product",
        infer=_infer_accumulate,
        kernel=_accumulate_kernel,
        into=_accumulate_into,
        native=_native_accumulate,
        vjp=_accumulate_vjp,
        cost=lambda c, a, b, **flags: Cost(_cost_matmul(a, b, **flags).flops + c.size),
        in_place=True,
        autocast="low",
        doc="The sum of a tensor and a product of matrices: c + a @ b, which may be written to c.",
        samples=(
            sample(M35, M34, M45),
            sample(M35, M43, M45, transpose_a=True),
            sample(M35, M34, M54, transpose_b=True),
            sample(spec("float32", (2, 3, 2)), spec("float32", (2, 3, 4)),
                   spec("float32", (2, 4, 2))),
        ),
        promotes=True,
    )
)  # fmt: skip


@function
def matmul(a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """Multiply matrices over the last two axes, broadcast over the others; vectors as in numpy.

    Args:
        a, b: ints, floats or complex numbers, (…, m, k) and (…, k, n) after transposition.
        transpose_a, transpose_b: exchange the last two axes of an operand first, without a copy.

    Returns:
        (…, m, n). Costs 2·m·n·k flops for each matrix.

    Raises:
        ShapeError: inner sizes differ, other axes do not broadcast, or an operand is a scalar.
        DTypeError: an operand is bool, or kinds mix.
    """
    a, b = promote_inputs("matmul", (a, b))
    if not a.ndim or not b.ndim:
        raise ShapeError(f"{show_shape(a.shape)} @ {show_shape(b.shape)}: use * for scalars")
    if a.ndim == 1:
        row = matmul(expand_dims(a, 0), b, transpose_b=transpose_b)
        return squeeze(row, -2 if b.ndim > 1 else 0)
    if b.ndim == 1:
        return squeeze(matmul(a, expand_dims(b, 1), transpose_a=transpose_a), -1)
    if b.ndim == 2 and a.ndim > 2 and not transpose_a:
        # one large product instead of a batch of small ones
        flat = matmul(reshape(a, (product(a.shape[:-1]), a.shape[-1])), b, transpose_b=transpose_b)
        return reshape(flat, (*a.shape[:-1], flat.shape[-1]))
    result: Tensor = matmul_op(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    return result


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias to a product of weights; None adds nothing.

    If `gf.autocast` made the product one of 16 bits, the bias is converted, too.
    """
    if bias is None:
        return y
    (bias,) = autocast_inputs([bias], "low" if is_half(y.dtype) else None)
    total: Tensor = FUNCTIONS["add"](y, bias)
    return total
