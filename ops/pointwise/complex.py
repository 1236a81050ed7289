"""Complex numbers: parts, conjugates, angles, and making them from real numbers.

For a real loss L the cotangent of z is dL/dRe z + i·dL/dIm z (as in torch), so z - lr·g descends. A
holomorphic f passes g on as g·conj(f'(z)). Real graphs gain no nodes, since `conj` returns a real
tensor as it is.

Source: Kreutz-Delgado, "The complex gradient operator and the CR-calculus", arXiv:0906.4835.
"""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import Op, Tensor, as_tensor, error_location, function, promote_inputs, sample
from graphflow.ir.spec import TensorSpec, complex_dtype, kind, real_dtype
from graphflow.ops.base.shape_rules import require_kind, same_float
from graphflow.ops.pointwise.convert import astype, zeros_like
from graphflow.ops.pointwise.elementwise import COLUMN, COMPLEX, ROW, F, elementwise
from graphflow.ops.pointwise.transcendental import atan2

DOUBLE = COMPLEX.with_dtype("complex128")
SCALAR = COMPLEX.with_shape(())
_SAMPLES = (sample(COMPLEX), sample(DOUBLE), sample(SCALAR))


def _infer_conj(z: TensorSpec) -> TensorSpec:
    require_kind(z, "complex")
    return z


def _infer_part(z: TensorSpec) -> TensorSpec:
    return _infer_conj(z).with_dtype(real_dtype(z.dtype))


_conj: Op = elementwise(
    "conj", "conjugate", lambda g, y, z: (_conj(g),), _infer_conj, samples=_SAMPLES
)
_real = elementwise(
    "real",
    lambda xp, z: z.real.copy(),
    lambda g, y, z: (astype(g, z.dtype),),
    _infer_part,
    samples=_SAMPLES,
    into=lambda xp, out, z: xp.copyto(out, z.real),
)
_imag = elementwise(
    "imag",
    lambda xp, z: z.imag.copy(),
    lambda g, y, z: (_complex(zeros_like(g), g),),
    _infer_part,
    samples=_SAMPLES,
    into=lambda xp, out, z: xp.copyto(out, z.imag),
)


def _infer_complex(re: TensorSpec, im: TensorSpec) -> TensorSpec:
    return same_float(re, im).with_dtype(complex_dtype(re.dtype))


def _complex_kernel(xp: Any, re: Any, im: Any) -> Any:
    out = xp.empty(xp.broadcast(re, im).shape, complex_dtype(re.dtype))
    _complex_into(xp, out, re, im)
    return out


def _complex_into(xp: Any, out: Any, re: Any, im: Any) -> None:
    out.real[...] = re
    out.imag[...] = im


_complex: Op = elementwise(
    "complex",
    _complex_kernel,
    lambda g, y, re, im: (_real(g), _imag(g)),
    _infer_complex,
    samples=(sample(F, F), sample(ROW, COLUMN)),
    into=_complex_into,
)


@function
def conj(x: Any, name: str | None = None) -> Tensor:
    """Return the complex conjugate of each element; a real tensor is returned as it is."""
    x = as_tensor(x)
    result: Tensor = _conj(x, name=name) if kind(x.dtype) == "complex" else x
    return result


@function
def real(x: Any, name: str | None = None) -> Tensor:
    """Return the real part of each element; a real tensor is returned as it is."""
    x = as_tensor(x)
    result: Tensor = _real(x, name=name) if kind(x.dtype) == "complex" else x
    return result


@function
def imag(x: Any, name: str | None = None) -> Tensor:
    """Return the imaginary part of each element; zeros for a real tensor."""
    x = as_tensor(x)
    result: Tensor = _imag(x, name=name) if kind(x.dtype) == "complex" else zeros_like(x)
    return result


@function
def complex(re: Any, im: Any, name: str | None = None) -> Tensor:
    """Compute re + i·im over broadcast shapes: complex128 for float64, else complex64.

    Raises:
        DTypeError: the parts are not floats.
        ShapeError: the shapes do not broadcast.
    """
    re, im = promote_inputs("complex", (re, im))
    result: Tensor = _complex(re, im, name=name)
    return result


@function
def angle(x: Any, name: str | None = None) -> Tensor:
    """Return the angle of each float or complex number in the complex plane, in (-π, π] radians.

    Raises:
        DTypeError: x is neither float nor complex.
    """
    x = as_tensor(x)
    with error_location("angle"):
        require_kind(x.spec, "float", "complex")
    result: Tensor = atan2(imag(x), real(x), name=name)
    return result
