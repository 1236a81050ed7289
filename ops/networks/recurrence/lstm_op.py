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

from graphflow.errors import DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, register, sample
from graphflow.ir.spec import TensorSpec, equate, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import is_zeros, require_kind
from graphflow.ops.kernels.sequence import lstm as kernels
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.pointwise.arithmetic import multiply
from graphflow.ops.pointwise.transcendental import tanh
from graphflow.ops.reductions.reduce import sum
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import reshape_op
from graphflow.ops.tensors.slicing import concat
from graphflow.ops.tensors.slicing import window as part_of


def _infer(
    z: TensorSpec, r: TensorSpec, bias: TensorSpec, h: TensorSpec, c: TensorSpec, gates: str,
    reverse: bool,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    """Infer y, the last h, the last c, all c, and all gates."""
    _require_operands(z, r, h, c)
    if bias.dtype != z.dtype or bias.rank != 1:
        raise ShapeError(f"the bias is {bias}, z {z}: one number for each row of r")
    equate(bias.shape[0], r.shape[0], f"bias {bias}, r {r}")
    states = z.with_shape((*z.shape[:2], r.shape[1]))
    return states, h, c, states, z


def _require_operands(z: TensorSpec, r: TensorSpec, h: TensorSpec, c: TensorSpec) -> None:
    require_kind(z, "float")
    shapes = {"z": z.shape, "r": r.shape, "h": h.shape, "c": c.shape}
    text = ", ".join(f"{name} {show_shape(shape)}" for name, shape in shapes.items())
    if not z.dtype == r.dtype == h.dtype == c.dtype:
        raise DTypeError(f"z is {z.dtype}, r {r.dtype}, h {h.dtype}, c {c.dtype}; use .astype")
    if (z.rank, r.rank, h.rank, c.rank) != (3, 2, 2, 2):
        raise ShapeError(f"expected z (T, B, 4·H), r (4·H, H), h and c (B, H), got {text}")
    equate(z.shape[2], r.shape[0], text)
    equate(r.shape[0], r.shape[1] * 4, text)
    for state in (h, c):
        equate(state.shape[1], r.shape[1], text)
        equate(state.shape[0], z.shape[1], text)


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
        inputs = _alias_inputs(z, r, bias, h, c)
        found: list[Tensor] = FUNCTIONS["gradients"](
            list(_lstm_by_scan(*inputs, gates=gates, reverse=reverse)), inputs, list(gs)
        )
        return found
    y, _, _, cs, kept = ys
    dz, dr, dh, dc = lstm_grad(*gs[:3], r, h, c, y, cs, kept, gates=gates, reverse=reverse)
    return dz, dr, sum(dz, (0, 1)), dh, dc


def _alias_inputs(*inputs: Tensor) -> list[Tensor]:
    """Return aliases that are independent of each other even if the tensors are not."""
    return [reshape_op(x, shape=x.shape) for x in inputs]


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
    _require_operands(kept, r, h, c)
    for states in (gy, y, cs):
        text = f"states {states} of gates {kept}, r {r}"
        if states.dtype != kept.dtype or states.rank != 3:
            raise ShapeError(text)
        for size, wanted in zip(states.shape, (*kept.shape[:2], r.shape[1]), strict=True):
            equate(size, wanted, text)
    return kept, r, h, c


def _grad_kernel(xp: Any, *arrays: Any, gates: str, reverse: bool) -> tuple[Any, ...]:
    r, h, c, kept = *arrays[3:6], arrays[8]
    out = tuple(xp.empty(x.shape, x.dtype) for x in (kept, r, h, c))
    kernels.backward(xp, out, *arrays, gates=gates, reverse=reverse)  # type: ignore[misc]
    return out


def _grad_vjp(
    hs: Sequence[Tensor], ys: Sequence[Tensor], *inputs: Tensor, gates: str, reverse: bool
) -> Sequence[Tensor]:
    apart = _alias_inputs(*inputs)
    firsts = _lstm_grad_by_scan(*apart, gates=gates, reverse=reverse)
    found: list[Tensor] = FUNCTIONS["gradients"](list(firsts), apart, list(hs))
    return found


def _lstm_grad_by_scan(
    gy: Tensor, gh: Tensor, gc: Tensor, r: Tensor, h: Tensor, c: Tensor, y: Tensor, cs: Tensor,
    kept: Tensor, *, gates: str, reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the outputs of `lstm_grad` by a scan over ordinary ops."""
    steps, size = kept.shape[0], r.shape[1]

    def before(first: Tensor, all_: Tensor) -> Tensor:
        start = FUNCTIONS["expand_dims"](first, 0)
        rest = part_of(all_, 0, int(reverse), steps - 1)
        return concat([rest, start] if reverse else [start, rest], 0)

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

    items = (gy, kept, cs, before(c, cs))
    (dh, dc), dz = FUNCTIONS["scan"](body, (gh, gc), items, reverse=not reverse)
    flat, past = (
        FUNCTIONS["reshape"](x, (x.shape[0] * x.shape[1], x.shape[2])) for x in (dz, before(h, y))
    )
    return dz, matmul(flat, past, transpose_a=True), dh, dc


# Ops ----------------------------------------------------------------------------------------------


def _cost(z: TensorSpec, r: TensorSpec, *rest: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=z.size * r.shape[1] * 2 + z.size * 40)


def _batch_rule(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    """Put examples with shared weights side by side in the op's own batch."""
    if batched[1] or batched[2]:
        return NotImplemented
    n = batching.batch_size(inputs, batched)
    z, r, bias, h, c = inputs
    z, h, c = batching.batch_all((z, h, c), (batched[0], *batched[3:]))
    joined = [
        _merge_axes(FUNCTIONS["moveaxis"](z, 0, 1), 1),
        r,
        bias,
        _merge_axes(h, 0),
        _merge_axes(c, 0),
    ]

    def split_batch(x: Tensor) -> Tensor:
        axis = x.ndim - 2
        shape = (*x.shape[:axis], n, z.shape[2], x.shape[-1])
        return FUNCTIONS["moveaxis"](FUNCTIONS["reshape"](x, shape), axis, 0)  # type: ignore[no-any-return]

    return tuple(map(split_batch, op(*joined, **attrs)))


def _merge_axes(x: Tensor, axis: int) -> Tensor:
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    result: Tensor = FUNCTIONS["reshape"](x, shape)
    return result


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
        vjp=_vjp,
        batch=_batch_rule,
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
