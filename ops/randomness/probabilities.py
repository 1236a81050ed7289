"""Checks of probabilities that a step computes, before samplers draw with them."""

from __future__ import annotations

from typing import Any

from graphflow.errors import CheckError
from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.reductions.reduce import require_elements
from graphflow.ops.sharding import rules as sharding


def _find_invalid(xp: Any, values: Any, right: Any) -> tuple[int, tuple[int, ...], float]:
    """Return the number of invalid values, and the index and value of the first."""
    wrong = xp.argwhere(~xp.atleast_1d(right))
    place = tuple(int(i) for i in wrong[0])
    return len(wrong), place, float(xp.atleast_1d(values)[place])


def _infer_logits(x: TensorSpec, axis: int) -> TensorSpec:
    require_elements(x, (axis,))
    return x


def _logits_kernel(xp: Any, x: Any, axis: int) -> Any:
    largest = x.max(axis=axis, initial=-xp.inf)  # `initial`: a fed axis may have no elements
    drawable = xp.isfinite(largest)  # the largest of a row with NaN is NaN
    if not bool(drawable.all()):
        count, row, value = _find_invalid(xp, largest, drawable)
        where = f" of row {row}" if largest.ndim else ""
        raise CheckError(
            f"{count} of {largest.size} rows of logits along axis {axis} have no "
            f"probabilities: the largest logit{where} is {value}"
        )
    return x


def _logits_into(xp: Any, out: Any, x: Any, axis: int) -> None:
    xp.copyto(out, _logits_kernel(xp, x, axis))


# Returns the logits after checking that each row has a softmax: no NaN, no inf, not only -inf.
categorical_logits: Op = register(
    Op(
        "categorical_logits",
        infer=_infer_logits,
        kernel=_logits_kernel,
        into=_logits_into,
        batch=batching.along("axis"),
        sharding=sharding.row_rule("axis"),
        cost=lambda x, axis: Cost(flops=x.size),
        samples=(sample(spec("float32", (3, 4)), axis=1), sample(spec("float64", (4,)), axis=0)),
        pure=False,
    )
)


def _probabilities_kernel(xp: Any, p: Any) -> Any:
    if p.size and not (float(p.min()) >= 0.0 and float(p.max()) <= 1.0):
        count, place, value = _find_invalid(xp, p, (p >= 0.0) & (p <= 1.0))
        where = f" at index {place}" if p.ndim else ""
        raise CheckError(
            f"{count} of {p.size} probabilities are not in [0, 1]: p{where} is {value}"
        )
    return p


# Returns the numbers after checking that all are in [0, 1].
bernoulli_probabilities: Op = register(
    Op(
        "bernoulli_probabilities",
        infer=lambda p: p,
        kernel=_probabilities_kernel,
        into=lambda xp, out, p: xp.copyto(out, _probabilities_kernel(xp, p)),
        batch=batching.rows,
        sharding=sharding.view_rule,
        cost=lambda p: Cost(flops=p.size),
        samples=(
            sample(spec("float32", (3, 4)), low=0.0, high=1.0),
            sample(spec("float64"), low=0.0, high=1.0),
        ),
        pure=False,
    )
)
