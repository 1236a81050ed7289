"""Confluent divided differences: gradients of eigenvectors and singular vectors at equal values.

The cotangent of vectors is divided by the gaps between values. Equal values have no unique vectors:
these may be any basis of a space. If a function does not depend on the choice of the basis, its
dividend is 0 there, and the quotient has a limit: the slope of the dividend over the slope of the
gap, as the values move apart while the vectors stay. That slope of the cotangents is found by
forward mode if they are computed from the values, as those of V·f(w)·Vᴴ are. If a function does
depend on the choice, it has no derivative, and the result is NaN.

If values are close, the quotient divides rounding errors by a small gap. The limit is then more
accurate, provided that it explains the dividend up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes

from graphflow.errors import GraphflowError
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.ir.spec import real_dtype
from graphflow.ops.base.shape_rules import conj
from graphflow.ops.matrices.linalg.matrix_rules import identity, per_column, per_row, times

_VALUE_OUTPUTS = {"eigh": 0, "eigvalsh": 0, "eig": 0, "svd": 1, "svdvals": 0}
"""Ops that compute values, and the output that holds them."""
_MAX_NODES = 2000
"""Most nodes of a graph that forward mode runs through along the values."""


def separation_slopes(values: Tensor, close: Tensor | None = None) -> Tensor:
    """Return slopes for values that move apart: 1, 2, 3 …, less their mean over `close` values."""
    steps = FUNCTIONS["arange"](1, values.shape[-1] + 1)
    slopes = FUNCTIONS["broadcast_to"](FUNCTIONS["astype"](steps, values.dtype), values.shape)
    if close is None:
        return slopes  # type: ignore[no-any-return]
    near = FUNCTIONS["astype"](close, values.dtype)
    offsets = FUNCTIONS["sum"](near * (per_column(slopes) - per_row(slopes)), -1)
    return -offsets / (FUNCTIONS["sum"](near, -1) + 1)  # type: ignore[no-any-return]


def rounding_error(values: Tensor) -> float:
    """Return the rounding error of values (…, n), relative to the largest."""
    n = values.shape[-1]
    return machine_epsilon(values) * (max(n, 16) if isinstance(n, int) else 16)


def largest_magnitude(values: Tensor) -> Tensor:
    """Return the magnitude of the largest of values (…, n) as (…, 1, 1)."""
    return per_column(_max_abs(values, -1))


def is_close(gaps: Tensor, size: Tensor) -> Tensor:
    """Return where a gap is so small beside `size` that dividing by it loses half of the digits."""
    return FUNCTIONS["abs"](gaps) <= size * machine_epsilon(gaps) ** 0.5  # type: ignore[no-any-return]


def machine_epsilon(x: Tensor) -> float:
    """Return the machine epsilon of the dtype of x (for complex numbers, of their parts)."""
    return float(ml_dtypes.finfo(real_dtype(x.dtype)).eps)  # type: ignore[no-untyped-call]


def _max_abs(x: Tensor, axes: Any) -> Tensor:
    size: Tensor = FUNCTIONS["abs"](x)
    return size if x.shape[-1] == 0 else FUNCTIONS["max"](size, axis=axes, keepdims=True)


def matrix_scale(*turned: Tensor) -> Tensor:
    """Return the largest magnitude in each matrix, or in each group of matrices."""
    first, *others = (_max_abs(t, (-2, -1)) for t in turned)
    for other in others:
        first = FUNCTIONS["maximum"](first, other)
    return first


def pairwise_differences(values: Tensor, sign: int = -1) -> Tensor:
    """Return vⱼ - vᵢ (or vⱼ + vᵢ for sign 1), with infinity on the diagonal."""
    alone = identity(values.shape[-1], values) == 1
    return FUNCTIONS["where"](alone, float("inf"), per_column(values) + per_row(values) * sign)  # type: ignore[no-any-return]


def cotangent_slopes(
    x: Tensor, gs: Sequence[Tensor], close: Sequence[Tensor], apart: Tensor
) -> list[Tensor] | None:
    """Return how cotangents change as the values of x move `apart` while the vectors stay.

    They are computed in the step only where some values are `close`. Unknown slopes are NaN there.
    None if the cotangents do not depend on the values.
    """
    nodes = Graph(gs).nodes
    found = [
        node.outputs[_VALUE_OUTPUTS[node.op.name]]
        for node in nodes
        if node.op.name in _VALUE_OUTPUTS and node.inputs[0] is x
    ]
    if not found:
        return None
    some: Tensor = FUNCTIONS["any"](close[0])
    for other in close[1:]:
        some = FUNCTIONS["logical_or"](some, FUNCTIONS["any"](other))
    unknown = [FUNCTIONS["full_like"](g, float("nan")) for g in gs]
    if len(nodes) > _MAX_NODES:
        return [FUNCTIONS["where"](some, u, 0) for u in unknown]

    def differentiate() -> tuple[Tensor, ...]:
        return tuple(FUNCTIONS["jvp"](list(gs), found, [apart] * len(found)))

    def give_zeros() -> tuple[Tensor, ...]:
        return tuple(FUNCTIONS["zeros_like"](g) for g in gs)

    try:
        results: Sequence[Tensor] = FUNCTIONS["cond"](some, differentiate, give_zeros)
    except GraphflowError:  # an op between the values and the cotangents has no tangent
        return [FUNCTIONS["where"](some, u, 0) for u in unknown]
    return list(results)


def confluent_quotient(
    top: Tensor, bottom: Tensor, moved: Tensor | None, apart: Tensor,
    scale: Tensor, size: Tensor, error: float, condition: Any = 1.0,
) -> Tensor:  # fmt: skip
    """Return top / bottom, and the limit moved / apart where the bottom is 0 or close to it.

    There is no limit where the bottom is 0 and the top is not, relative to `scale`: the result is
    NaN then. Derivatives of a limit are NaN, too.

    Args:
        scale, size: magnitudes of the numbers that tops and bottoms are computed from.
        error: the rounding error of bottoms, relative to `size`.
        condition: a factor of all rounding errors.
    """
    where, size = FUNCTIONS["where"], size * condition
    equal, close = FUNCTIONS["abs"](bottom) <= size * error, is_close(bottom, size)
    limit = 0.0 if moved is None else moved / where(close, apart, 1)
    rest = FUNCTIONS["abs"](top - where(close, bottom, 0) * limit)
    noise = machine_epsilon(top) * 4 * condition
    explained = close & (rest <= scale * where(equal, machine_epsilon(top) ** 0.5, noise))
    # Infinite where another branch is selected, so that derivatives of this one are NaN there.
    regular = top * (1 / where(equal | explained, 0, bottom))
    return where(explained, limit, where(equal, float("nan"), regular))  # type: ignore[no-any-return]


def divide_by_gaps(
    x: Tensor,
    values: Tensor,
    vectors: Tensor,
    g: Tensor,
    turn: Callable[[Tensor], Tensor],
    condition: Any = 1.0,
) -> Tensor:
    """Return turn(g) divided by the gaps between eigenvalues, (…, n, n).

    Args:
        x: the matrices.
        values, vectors: their eigenvalues (…, n) and eigenvectors (…, n, n).
        g: the cotangent of the vectors.
        turn: the linear map from a cotangent of the vectors to the dividend.
        condition: the condition number of the vectors, a number or (…, 1, 1); rounding errors grow
            by it.
    """
    gaps, size = pairwise_differences(values), largest_magnitude(values)
    close = is_close(gaps, size * condition)
    apart = separation_slopes(values, close)
    moved = cotangent_slopes(x, [g], [close], apart)
    return confluent_quotient(
        turn(g),
        conj(gaps),
        turn(moved[0]) if moved else None,
        pairwise_differences(apart),
        matrix_scale(times(vectors, g, adjoint_a=True)),
        size,
        rounding_error(values),
        condition,
    )
