"""The op that marks gradients which replicas exchange through a filter.

In the graph of one model it passes gradients and state on: one replica has the sum already. A
strategy that replicates the model writes the exchange in its place
(`graphflow/parallel/compression`).
"""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import TensorSpec, spec


def _infer_compressed(*xs: TensorSpec, **attrs: Any) -> tuple[TensorSpec, ...]:
    """Infer the results: the sums, and the next state."""
    return xs


def _kernel(xp: Any, *xs: Any, **attrs: Any) -> tuple[Any, ...]:
    """Return copies of the inputs."""
    return tuple([xp.copy(x) for x in xs])


_PAIR = (spec("float32", (3, 2)), spec("float32", (2, 3, 2)))

# Inputs: `count` gradients, then the state of each: `states[i]` tensors, which have a row for each
# replica; then, if `reads`, the variable of each gradient; and the scale of the loss if `scaled`.
# `rule`: the filter. `stream`: for its random numbers.
compressed_sum = register(
    Op(
        "compressed_sum",
        infer=_infer_compressed,
        kernel=_kernel,
        cost=lambda *xs, **attrs: Cost(flops=0),
        samples=[
            sample(
                *_PAIR, rule=None, count=1, states=(1,), stream=(7, 1), scaled=False, reads=False
            ),
            sample(
                _PAIR[0], rule=None, count=1, states=(0,), stream=(7, 2), scaled=False, reads=False
            ),
        ],
        pure=False,
    )
)
