"""Dropout: set random elements to 0, other ones in each step. Public as `gf.nn.dropout`."""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError
from graphflow.ir.op import Op, Tensor, as_tensor, error_location, function, sample
from graphflow.ir.spec import TensorSpec, broadcast_shapes, spec
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.pointwise.elementwise import elementwise
from graphflow.ops.randomness.random import keep_mask

F = spec("float32", (3, 4))


def _infer_masked(x: TensorSpec, mask: TensorSpec, scale: float) -> TensorSpec:
    require_kind(x, "float")
    require_kind(mask, "bool")
    return TensorSpec(broadcast_shapes(x.shape, mask.shape), x.dtype)


def _masked_of(xp: Any, x: Any, mask: Any, scale: float) -> Any:
    return xp.where(mask, x * scale, 0)


# x·scale where the mask is set, else 0, even if x is infinite there.
masked: Op = elementwise(
    "masked",
    _masked_of,
    vjp=lambda g, y, x, mask, scale: (masked(g, mask, scale=scale), None),
    infer=_infer_masked,
    samples=(
        sample(F, spec("bool", (3, 4)), scale=2.0),
        sample(spec("float32"), spec("bool"), scale=1.5),
    ),
    flops=2,
    into=lambda xp, out, x, mask, scale: xp.copyto(out, _masked_of(xp, x, mask, scale)),
    promotes=False,
)


@function
def dropout(x: Any, rate: float, name: str | None = None) -> Tensor:
    """Set each element of x to 0 with probability `rate`, and divide the others by (1 - rate).

    Each call draws from a random stream of its own (see `gf.random.seed`), anew in each step.

    Args:
        x: floats.
        rate: a number in [0, 1).

    Raises:
        DTypeError: x is not float.
        ArgumentError: rate is not a number in [0, 1).

    Source: Srivastava et al., JMLR 15, 2014.
    """
    tensor = as_tensor(x)
    with error_location("dropout"):
        require_kind(tensor.spec, "float")
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise ArgumentError(f"rate must be a number in [0, 1), got {rate!r}")
    if rate == 0:
        return tensor
    mask = keep_mask(tensor.shape, 1.0 - rate)
    result: Tensor = masked(tensor, mask, scale=1.0 / (1.0 - rate), name=name)
    return result
