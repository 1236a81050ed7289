"""A module of ops and host functions as a user writes one; tests/runtime/worker/test_custom_ops.py
puts it where workers find it."""

from __future__ import annotations

from typing import Any

import graphflow as gf
from graphflow.ir.op import Op, register

F = gf.spec("float32", (3, 4))


def _slope(xp: Any, x: Any) -> Any:
    return 1 / (1 + xp.abs(x)) ** 2


softsign_grad = register(
    Op(
        "users.softsign_grad",
        infer=lambda g, x: x,
        expr=lambda xp, g, x: g * _slope(xp, x),
        vjp=lambda h, y, g, x: (
            softsign_grad(h, x),
            h * g * gf.sign(x) * -2 / gf.pow(1 + gf.abs(x), 3),
        ),
        samples=(gf.sample(F, F, low=0.2, high=2.0),),
        elementwise=True,
    )
)

# x / (1 + |x|), with a gradient of its own.
softsign = register(
    Op(
        "users.softsign",
        infer=lambda x: x,
        expr=lambda xp, x: x / (1 + xp.abs(x)),
        vjp=lambda g, y, x: (softsign_grad(g, x),),
        cost=lambda x: gf.Cost(flops=3 * x.size),
        samples=(gf.sample(F), gf.sample(F, low=-3.0, high=-0.5)),
        elementwise=True,
    )
)


def halve(x: Any) -> Any:
    """A host function."""
    return x / 2


def halve_back(g: Any, y: Any, x: Any) -> Any:
    """Its gradient."""
    return g / 2
