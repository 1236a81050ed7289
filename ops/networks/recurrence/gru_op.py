"""Gated recurrent units along a whole sequence as one op.

`gf.nn.GRU` and `gf.nn.gru` use it unless an option needs a scan over the cell (clipping, other
activations, candidates that are not the last gate). The op keeps the gates of all steps, and its
gradient is a second op that runs backwards over them. The gradient of that op is the gradient of a
scan.

Source: Cho et al., EMNLP 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, WeightLayout, register, sample
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops.base.shape_rules import is_zeros
from graphflow.ops.kernels.sequence import gru as kernels
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
from graphflow.ops.pointwise.transcendental import tanh
from graphflow.ops.reductions.reduce import sum
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.slicing import concat
from graphflow.ops.tensors.slicing import window as part_of


def _infer(
    z: TensorSpec, r: TensorSpec, bias: TensorSpec, h: TensorSpec, **attrs: Any
) -> tuple[TensorSpec, ...]:
    """Infer y, the last h, all gates, and what the gate r multiplies or has multiplied."""
    require_operands(z, r, {"h": h}, 3)
    require_bias(z, r, bias)
    states = z.with_shape((*z.shape[:2], r.shape[1]))
    return states, h, z, states


def _kernel(xp: Any, z: Any, r: Any, bias: Any, h: Any, **attrs: Any) -> tuple[Any, ...]:
    states = (*z.shape[:2], h.shape[1])
    out = tuple(xp.empty(s, z.dtype) for s in (states, h.shape, z.shape, states))
    kernels.forward(xp, out, z, r, bias, h, **attrs)
    return out


def _vjp(
    gs: Sequence[Tensor], ys: Sequence[Tensor], z: Tensor, r: Tensor, bias: Tensor, h: Tensor,
    **attrs: Any,
) -> Sequence[Tensor]:  # fmt: skip
    # what is kept for the gradient may have a cotangent of its own
    if not all(is_zeros(g) for g in gs[2:]):
        inputs = alias_inputs(z, r, bias, h)
        found: list[Tensor] = FUNCTIONS["gradients"](
            list(_gru_by_scan(*inputs, **attrs)), inputs, list(gs)
        )
        return found
    y, _, kept, inner = ys
    dz, dr, dh, dn = gru_grad(*gs[:2], r, h, y, kept, inner, **attrs)
    dbias = sum(dz, (0, 1))
    if attrs["linear_before_reset"]:
        dbias = concat([part_of(dbias, 0, 0, r.shape[1] * 2), sum(dn, (0, 1))], 0)
    return dz, dr, dbias, dh


def _gru_by_scan(
    z: Tensor, r: Tensor, bias: Tensor, h: Tensor, *, gates: str, linear_before_reset: bool,
    reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the outputs of the op by a scan over ordinary ops, for derivatives of any order."""
    size = r.shape[1]
    # the candidates' weights last
    both, last = part_of(r, 0, 0, size * 2), part_of(r, 0, size * 2, size)
    added, added_last = part_of(bias, 0, 0, size * 2), part_of(bias, 0, size * 2, size)

    def body(h: Tensor, x: Tensor) -> Any:
        given, given_last = part_of(x, 1, 0, size * 2), part_of(x, 1, size * 2, size)
        opened = FUNCTIONS["sigmoid"](given + matmul(h, both, transpose_b=True) + added)
        keep, reset = (part_of(opened, 1, gates.index(gate) * size, size) for gate in "zr")
        if linear_before_reset:
            inner = matmul(h, last, transpose_b=True) + added_last
            new = tanh(given_last + reset * inner)
        else:
            inner = reset * h
            new = tanh(given_last + matmul(inner, last, transpose_b=True) + added_last)
        h = (1 - keep) * new + keep * h
        return h, (h, concat([opened, new], 1), inner)

    h, (y, kept, inner) = FUNCTIONS["scan"](body, h, z, reverse=reverse)
    return y, h, kept, inner


# The gradient -------------------------------------------------------------------------------------


def _infer_grad(
    gy: TensorSpec, gh: TensorSpec, r: TensorSpec, h: TensorSpec, y: TensorSpec, kept: TensorSpec,
    inner: TensorSpec, **attrs: Any,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    """Infer the cotangents of z, r and h, and of the candidates' products with r."""
    require_operands(kept, r, {"h": h}, 3)
    require_states(kept, r, gy, y, inner)
    return kept, r, h, inner


def _grad_kernel(xp: Any, *arrays: Any, **attrs: Any) -> tuple[Any, ...]:
    r, h, kept, inner = *arrays[2:4], *arrays[5:]
    out = tuple(xp.empty(x.shape, x.dtype) for x in (kept, r, h, inner))
    kernels.backward(xp, out, *arrays, **attrs)
    return out


def _grad_vjp(
    hs: Sequence[Tensor], ys: Sequence[Tensor], *inputs: Tensor, **attrs: Any
) -> Sequence[Tensor]:
    apart = alias_inputs(*inputs)
    firsts = _gru_grad_by_scan(*apart, **attrs)
    found: list[Tensor] = FUNCTIONS["gradients"](list(firsts), apart, list(hs))
    return found


def _gru_grad_by_scan(
    gy: Tensor, gh: Tensor, r: Tensor, h: Tensor, y: Tensor, kept: Tensor, inner: Tensor, *,
    gates: str, linear_before_reset: bool, reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the outputs of `gru_grad` by a scan over ordinary ops."""
    size = r.shape[1]
    both, last = part_of(r, 0, 0, size * 2), part_of(r, 0, size * 2, size)

    def body(dh: Tensor, items: tuple[Tensor, ...]) -> Any:
        g_now, now, inner, past = items
        keep, reset, new = (part_of(now, 1, gates.index(g) * size, size) for g in "zrn")
        total = g_now + dh
        fresh = total * (1 - keep) * (1 - new * new)
        own = fresh * reset if linear_before_reset else fresh
        product = matmul(own, last)
        sums = {"z": total * (past - new) * keep * (1 - keep)}
        if linear_before_reset:
            sums["r"] = fresh * inner * reset * (1 - reset)
        else:
            sums["r"] = product * past * reset * (1 - reset)
            product = product * reset
        opened = concat([sums[gate] for gate in gates[:2]], 1)
        dh = total * keep + product + matmul(opened, both)
        return dh, (concat([opened, fresh], 1), own)

    before = states_before(h, y, reverse)
    dh, (dz, dn) = FUNCTIONS["scan"](body, gh, (gy, kept, inner, before), reverse=not reverse)
    read = before if linear_before_reset else inner
    opened = part_of(dz, 2, 0, size * 2)
    return dz, concat([sum_products(opened, before), sum_products(dn, read)], 0), dh, dn


# Ops ----------------------------------------------------------------------------------------------

_STATE, _STATES, _GATES = (spec("float32", s) for s in ((2, 3), (3, 2, 3), (3, 2, 9)))
_R, _BIAS = spec("float32", (9, 3)), spec("float32", (9,))
_CASES: tuple[dict[str, Any], ...] = (
    {"gates": "rzn", "linear_before_reset": True, "reverse": False},
    {"gates": "zrn", "linear_before_reset": False, "reverse": True},
)

# From the inputs' part z of the gates: y, the last h, all gates, and what the gate r multiplies.
gru_op: Op = register(
    Op(
        "gru",
        infer=_infer,
        kernel=_kernel,
        into=kernels.forward,
        records=True,
        layout=WeightLayout(1, packed_bytes),
        vjp=_vjp,
        batch=batch_rule,
        sharding=sharding.equation_rule(".b.,..,.,b.->.b.,b.,.b.,.b."),
        cost=lambda z, r, *rest, **attrs: Cost(flops=z.size * r.shape[1] * 2 + z.size * 40),
        autocast="high",
        samples=tuple(sample(_GATES, _R, _BIAS, _STATE, **attrs) for attrs in _CASES),
        doc="Gated recurrent units along a sequence, from the inputs' part of the gates.",
    )
)
gru_grad: Op = register(
    Op(
        "gru_grad",
        infer=_infer_grad,
        kernel=_grad_kernel,
        into=kernels.backward,
        vjp=_grad_vjp,
        sharding=sharding.equation_rule(".b.,b.,..,b.,.b.,.b.,.b.->.b.,..,b.,.b."),
        cost=lambda gy, gh, r, h, y, kept, inner, **attrs: Cost(
            flops=kept.size * r.shape[1] * 4 + kept.size * 20
        ),
        samples=tuple(
            sample(
                _STATES, _STATE, _R, _STATE, _STATES, _GATES, _STATES, low=-1.0, high=1.0, **attrs
            )
            for attrs in _CASES
        ),
        doc="The cotangents of the inputs of `gru`.",
    )
)
