"""Long short-term memory along a whole sequence as one op.

`gf.nn.LSTM` and `gf.nn.lstm` use it unless an option needs a scan over the cell (peepholes, coupled
gates, clipping, other activations). The op keeps the gates and states of all steps, and
its gradient is a second op that runs backwards over them. The gradient of that op is the gradient
of a scan.

Source: Hochreiter & Schmidhuber, Neural Computation 9, 1997.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, WeightLayout, register, sample
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops.base.shape_rules import is_zeros
from graphflow.ops.kernels.sequence import lstm as kernels
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.networks.recurrence.sequence_ops import (
    alias_inputs,
    batch_rule,
    packed_bytes,
    require_bias,
    require_operands,
    require_states,
    states_before,
    sum_products,
)
from graphflow.ops.pointwise.arithmetic import multiply
from graphflow.ops.pointwise.transcendental import tanh
from graphflow.ops.reductions.reduce import sum
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.slicing import concat
from graphflow.ops.tensors.slicing import window as part_of


def _infer(
    z: TensorSpec, r: TensorSpec, bias: TensorSpec, h: TensorSpec, c: TensorSpec, gates: str,
    reverse: bool,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    """Infer y, the last h, the last c, all c, and all gates."""
    require_operands(z, r, {"h": h, "c": c}, 4)
    require_bias(z, r, bias)
    states = z.with_shape((*z.shape[:2], r.shape[1]))
    return states, h, c, states, z


def _kernel(
    xp: Any, z: Any, r: Any, bias: Any, h: Any, c: Any, gates: str, reverse: bool
) -> tuple[Any, ...]:
    states = (*z.shape[:2], h.shape[1])
    out = tuple(xp.empty(s, z.dtype) for s in (states, h.shape, c.shape, states, z.shape))
    kernels.forward(xp, out, z, r, bias, h, c, gates, reverse)
    return out


def _vjp(
    gs: Sequence[Tensor], ys: Sequence[Tensor], z: Tensor, r: Tensor, bias: Tensor, h: Tensor,
    c: Tensor, gates: str, reverse: bool,
) -> Sequence[Tensor]:  # fmt: skip
    # the kept gates or states may have a cotangent of their own
    if not all(is_zeros(g) for g in gs[3:]):
        inputs = alias_inputs(z, r, bias, h, c)
        found: list[Tensor] = FUNCTIONS["gradients"](
            list(_lstm_by_scan(*inputs, gates=gates, reverse=reverse)), inputs, list(gs)
        )
        return found
    y, _, _, cs, kept = ys
    dz, dr, dh, dc = lstm_grad(*gs[:3], r, h, c, y, cs, kept, gates=gates, reverse=reverse)
    return dz, dr, sum(dz, (0, 1)), dh, dc


def _lstm_by_scan(
    z: Tensor, r: Tensor, bias: Tensor, h: Tensor, c: Tensor, *, gates: str, reverse: bool
) -> tuple[Tensor, ...]:
    """Compute the outputs of the op by a scan over ordinary ops, for derivatives of any order."""
    size = r.shape[1]

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, c = state
        total = x + bias + matmul(h, r, transpose_b=True)
        value = {}
        for gate in "ifgo":
            mine = part_of(total, 1, gates.index(gate) * size, size)
            value[gate] = tanh(mine) if gate == "g" else FUNCTIONS["sigmoid"](mine)
        c = value["f"] * c + value["i"] * value["g"]
        h = multiply(value["o"], tanh(c))
        return (h, c), (h, c, concat([value[gate] for gate in gates], 1))

    (h, c), (y, cs, kept) = FUNCTIONS["scan"](body, (h, c), z, reverse=reverse)
    return y, h, c, cs, kept


# The gradient -------------------------------------------------------------------------------------


def _infer_grad(
    gy: TensorSpec, gh: TensorSpec, gc: TensorSpec, r: TensorSpec, h: TensorSpec, c: TensorSpec,
    y: TensorSpec, cs: TensorSpec, kept: TensorSpec, gates: str, reverse: bool,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    """Infer the cotangents of z, r, h and c."""
    require_operands(kept, r, {"h": h, "c": c}, 4)
    require_states(kept, r, gy, y, cs)
    return kept, r, h, c


def _grad_kernel(xp: Any, *arrays: Any, gates: str, reverse: bool) -> tuple[Any, ...]:
    r, h, c, kept = *arrays[3:6], arrays[8]
    out = tuple(xp.empty(x.shape, x.dtype) for x in (kept, r, h, c))
    kernels.backward(xp, out, *arrays, gates=gates, reverse=reverse)  # type: ignore[misc]
    return out


def _grad_vjp(
    hs: Sequence[Tensor], ys: Sequence[Tensor], *inputs: Tensor, gates: str, reverse: bool
) -> Sequence[Tensor]:
    apart = alias_inputs(*inputs)
    firsts = _lstm_grad_by_scan(*apart, gates=gates, reverse=reverse)
    found: list[Tensor] = FUNCTIONS["gradients"](list(firsts), apart, list(hs))
    return found


def _lstm_grad_by_scan(
    gy: Tensor, gh: Tensor, gc: Tensor, r: Tensor, h: Tensor, c: Tensor, y: Tensor, cs: Tensor,
    kept: Tensor, *, gates: str, reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the outputs of `lstm_grad` by a scan over ordinary ops."""
    size = r.shape[1]

    def body(state: tuple[Tensor, Tensor], items: tuple[Tensor, ...]) -> Any:
        dh, dc = state
        g_now, now, c_now, c_past = items
        i, f, g, o = (part_of(now, 1, gates.index(x) * size, size) for x in "ifgo")
        total, level = g_now + dh, tanh(c_now)
        state_g = dc + total * o * (1 - level * level)
        sums = {
            "i": state_g * g * i * (1 - i),
            "f": state_g * c_past * f * (1 - f),
            "g": state_g * i * (1 - g * g),
            "o": total * level * o * (1 - o),
        }
        dz = concat([sums[x] for x in gates], 1)
        return (matmul(dz, r), state_g * f), dz

    items = (gy, kept, cs, states_before(c, cs, reverse))
    (dh, dc), dz = FUNCTIONS["scan"](body, (gh, gc), items, reverse=not reverse)
    return dz, sum_products(dz, states_before(h, y, reverse)), dh, dc


# Ops ----------------------------------------------------------------------------------------------


def _cost(z: TensorSpec, r: TensorSpec, *rest: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=z.size * r.shape[1] * 2 + z.size * 40)


_STATE, _STATES, _GATES = (spec("float32", s) for s in ((2, 3), (3, 2, 3), (3, 2, 12)))
_R, _BIAS = spec("float32", (12, 3)), spec("float32", (12,))
_CASES: tuple[dict[str, Any], ...] = (
    {"gates": "ifgo", "reverse": False},
    {"gates": "iofg", "reverse": True},
)

# From the inputs' part z of the gates: y, the last h, the last c, all c, and all gates.
lstm_op: Op = register(
    Op(
        "lstm",
        infer=_infer,
        kernel=_kernel,
        into=kernels.forward,
        records=True,
        layout=WeightLayout(1, packed_bytes),
        vjp=_vjp,
        batch=batch_rule,
        sharding=sharding.equation_rule(".b.,..,.,b.,b.->.b.,b.,b.,.b.,.b."),
        cost=_cost,
        autocast="high",
        samples=tuple(sample(_GATES, _R, _BIAS, _STATE, _STATE, **attrs) for attrs in _CASES),
        doc="Long short-term memory along a sequence, from the inputs' part of the gates.",
    )
)
lstm_grad: Op = register(
    Op(
        "lstm_grad",
        infer=_infer_grad,
        kernel=_grad_kernel,
        into=kernels.backward,
        records=True,
        vjp=_grad_vjp,
        sharding=sharding.equation_rule(".b.,b.,b.,..,b.,b.,.b.,.b.,.b.->.b.,..,b.,b."),
        cost=lambda gy, gh, gc, r, h, c, y, cs, kept, **attrs: Cost(
            flops=kept.size * r.shape[1] * 4 + kept.size * 20
        ),
        samples=tuple(
            sample(
                _STATES, _STATE, _STATE, _R, _STATE, _STATE, _STATES, _STATES, _GATES,
                low=-1.0, high=1.0, **attrs,
            )
            for attrs in _CASES
        ),
        doc="The cotangents of the inputs of `lstm`.",
    )
)  # fmt: skip
