"""Variables that belong to an optimiser, such as a count of steps."""

from __future__ import annotations

from collections.abc import Mapping

from graphflow import init
from graphflow.ir.op import REGISTRY, Tensor


def state_variable(name: str, initial: init.Initializer) -> Tensor:
    """Return a new variable that is not trained."""
    tensor: Tensor = REGISTRY["variable"](
        initial=initial, trainable=False, shape=initial.shape, dtype=initial.dtype, named=False,
        name=name,
    )  # fmt: skip
    return tensor


def state_variables(owner: Tensor, initial: Mapping[str, init.Initializer]) -> dict[str, Tensor]:
    """Return new variables that are not trained, by name, each named after the owner, too."""
    return {
        name: state_variable(f"{owner.node.name}/{name}", each) for name, each in initial.items()
    }
