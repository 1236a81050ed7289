"""Layer normalisation, and the standardisation that it is made of."""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.op import FUNCTIONS, Cost, Op, Tensor, as_tensor, function, located, register, sample
from graphflow.ops.reduce import CUBE, F, mean, sum, var
from graphflow.ops.rules import like_first, normalize_axes, require_kind
from graphflow.ops.transcendental import rsqrt
from graphflow.spec import Shape, TensorSpec, broadcast_shapes, equate, show_shape, spec


def _per_element(flops: int) -> Any:
    return lambda x, *others, **attrs: Cost(flops=x.size * flops)


def _moments(xp: Any, x: Any, axis: tuple[int, ...], epsilon: float) -> tuple[Any, Any]:
    """x about its mean, and the reciprocal deviation (of float16 as float32)."""
    number = 1
    if x.dtype.itemsize == 2:
        x = x.astype("float32")
    for a in axis:
        number *= x.shape[a]
    centred = x - xp.sum(x, axis=axis, keepdims=True) / number
    variance = xp.sum(centred * centred, axis=axis, keepdims=True) / number
    return centred, xp.reciprocal(xp.sqrt(variance + epsilon))


def _standardize_into(xp: Any, out: Any, x: Any, axis: tuple[int, ...], epsilon: float) -> None:
    centred, per_deviation = _moments(xp, x, axis, epsilon)
    xp.multiply(centred, per_deviation, out=out)


def _standardize_grad_into(
    xp: Any, out: Any, g: Any, x: Any, axis: tuple[int, ...], epsilon: float
) -> None:
    centred, per_deviation = _moments(xp, x, axis, epsilon)
    number = 1
    for a in axis:
        number *= x.shape[a]
    unit = centred * per_deviation
    along = xp.sum(g * unit, axis=axis, keepdims=True) / number
    level = xp.sum(g, axis=axis, keepdims=True) / number
    xp.multiply(g - level - unit * along, per_deviation, out=out)


def _standardize_grad_vjp(
    h: Tensor, y: Tensor, g: Tensor, x: Tensor, axis: tuple[int, ...], epsilon: float
) -> tuple[Tensor, Tensor]:
    """With x̂ the standardised x, r its reciprocal deviation and ⟨·⟩ means over the axes:

    y = r·(g - ⟨g⟩ - x̂·⟨g·x̂⟩) is linear and symmetric in g; and from dx̂/dx = y[g := 1_k] and
    dr/dx = -r²·x̂/count follows dx = -r·(x̂·⟨h·y⟩ + y[g := h]·⟨g·x̂⟩ + y·⟨h·x̂⟩).
    """
    unit = standardize(x, axis=axis, epsilon=epsilon)
    per_deviation = rsqrt(var(x, axis, keepdims=True) + epsilon)
    dg = standardize_grad(h, x, axis=axis, epsilon=epsilon)

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return mean(a * b, axis, keepdims=True)

    dx = per_deviation * (unit * inner(h, y) + dg * inner(g, unit) + y * inner(h, unit))
    return dg, -dx


def _infer_standardize(
    x: TensorSpec, *others: TensorSpec, axis: tuple[int, ...], epsilon: float
) -> TensorSpec:
    require_kind(x, "float")
    return TensorSpec(broadcast_shapes(x.shape, *(o.shape for o in others)), x.dtype)


_NORM: dict[str, Any] = {"axis": (1,), "epsilon": 0.1}
standardize_grad = register(
    Op(
        "standardize_grad",
        infer=_infer_standardize,
        kernel=like_first(_standardize_grad_into),
        into=_standardize_grad_into,
        vjp=_standardize_grad_vjp,
        cost=_per_element(14),
        samples=(sample(F, F, **_NORM), sample(CUBE, CUBE, axis=(1, 2), epsilon=0.1)),
    )
)
# (x - mean) / √(variance + epsilon) over axes.
standardize = register(
    Op(
        "standardize",
        infer=_infer_standardize,
        kernel=like_first(_standardize_into),
        into=_standardize_into,
        vjp=lambda g, y, x, axis, epsilon: (standardize_grad(g, x, axis=axis, epsilon=epsilon),),
        cost=_per_element(7),
        samples=(sample(F, **_NORM), sample(CUBE, axis=(0, 2), epsilon=0.1)),
    )
)


def _over(shape: Shape, axis: tuple[int, ...]) -> Shape:
    return tuple(size if i in axis else 1 for i, size in enumerate(shape))


def _infer_layer_norm(
    x: TensorSpec, scale: TensorSpec, bias: TensorSpec, axis: tuple[int, ...], epsilon: float
) -> TensorSpec:
    require_kind(x, "float")
    wanted = tuple(x.shape[a] for a in axis)
    for what, given in (("scale", scale), ("bias", bias)):
        if given.dtype != x.dtype:
            raise DTypeError(f"{what} is {given.dtype}, x is {x.dtype}; convert one with .astype")
        text = (
            f"{what} {show_shape(given.shape)} is not of the normalised shape {show_shape(wanted)}"
        )
        if given.rank != len(axis):
            raise ShapeError(text)
        for a, b in zip(given.shape, wanted, strict=True):
            equate(b, a, text)
    return x


def _layer_norm_into(
    xp: Any, out: Any, x: Any, scale: Any, bias: Any, axis: tuple[int, ...], epsilon: float
) -> None:
    _standardize_into(xp, out, x, axis, epsilon)
    xp.multiply(out, scale.reshape(_over(x.shape, axis)), out=out)
    xp.add(out, bias.reshape(_over(x.shape, axis)), out=out)


def _layer_norm_vjp(
    g: Tensor, y: Tensor, x: Tensor, scale: Tensor, bias: Tensor, axis: tuple[int, ...],
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rest = tuple(i for i in range(x.ndim) if i not in axis)
    unit = standardize(x, axis=axis, epsilon=epsilon)
    scaled = g * FUNCTIONS["reshape"](scale, _over(x.shape, axis))
    dx = standardize_grad(scaled, x, axis=axis, epsilon=epsilon)
    return dx, sum(g * unit, rest), sum(g, rest)


_layer_norm = register(
    Op(
        "layer_norm",
        infer=_infer_layer_norm,
        kernel=like_first(_layer_norm_into),
        into=_layer_norm_into,
        vjp=_layer_norm_vjp,
        cost=_per_element(9),
        samples=(
            sample(F, spec("float32", (4,)), spec("float32", (4,)), **_NORM),
            sample(
                CUBE, spec("float32", (3, 2)), spec("float32", (3, 2)), axis=(1, 2), epsilon=0.1
            ),
        ),
    )
)


@function
def layer_norm(
    x: Any, scale: Any, bias: Any, axis: Any = -1, epsilon: float = 1e-5, name: str | None = None
) -> Tensor:
    """scale·(x - mean) / √(variance + epsilon) + bias, moments over an axis or several.

    Args:
        scale, bias: of the shape of x along the axes (in order).

    Raises:
        DTypeError: x is not float, or the dtypes differ.
        ShapeError, ArgumentError: not axes of x, scale or bias of another shape, epsilon negative.

    Source: Ba, Kiros & Hinton, arXiv:1607.06450.
    """
    x = as_tensor(x)
    with located("layer_norm"):
        axes = normalize_axes(axis, x.ndim)
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not epsilon >= 0:
            raise ArgumentError(f"epsilon is a number that is not negative, not {epsilon!r}")
    result: Tensor = _layer_norm(x, scale, bias, axis=axes, epsilon=float(epsilon), name=name)
    return result
