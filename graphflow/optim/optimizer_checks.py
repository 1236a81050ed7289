"""Checks of the arguments that users give to optimisers, and to their `minimize`."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.base.argument_checks import format_value
from graphflow.base.argument_kinds import is_number
from graphflow.base.argument_names import explain_repeated
from graphflow.errors import ArgumentError, DifferentiationError, VariableError
from graphflow.ir.op import Tensor, user_location
from graphflow.ir.spec import kind
from graphflow.optim.loss_scaling import LossScaling
from graphflow.optim.schedules import RateSchedule
from graphflow.strategy import check_strategy


def check_minimize(
    loss: object, variables: object, transform: object, strategy: object, scaling: object
) -> None:
    """Check the arguments of `minimize`; raises as it."""
    if strategy is not None:
        check_strategy(strategy)
    if variables is not None and not isinstance(variables, list | tuple):
        raise VariableError(
            f"minimize at {user_location()}: variables must be a list, such as [w] or "
            f"[*model.parameters().values()], not {format_value(variables)}"
        )
    if transform is not None and not callable(transform):
        raise ArgumentError(
            f"minimize at {user_location()}: transform must be a function of the list of "
            f"gradients, not {transform!r}"
        )
    if not isinstance(loss, Tensor) or loss.ndim or kind(loss.dtype) != "float":
        raise DifferentiationError(
            f"minimize at {user_location()}: the loss must be a float scalar, not {loss!r}; "
            "reduce it with gf.mean"
        )
    if scaling is not None and not isinstance(scaling, LossScaling):
        raise ArgumentError(
            f"minimize at {user_location()}: scaling must be a gf.optim.LossScaling, "
            f"not {scaling!r}"
        )


def check_numbers(optimizer: Any, **values: Any) -> None:
    """Check an optimiser's numbers, and store them as Python floats: numpy's would change the
    dtype."""
    what = type(optimizer).__name__
    if not isinstance(optimizer.sparse, bool):
        raise ArgumentError(
            f"{what} at {user_location()}: sparse must be True or False, not {optimizer.sparse!r}"
        )
    for name, value in values.items():
        if name == "lr" and isinstance(value, RateSchedule):
            continue
        if name in ("lr", "gamma") and isinstance(value, Tensor):
            if value.ndim or kind(value.dtype) == "bool":
                raise ArgumentError(
                    f"{what} at {user_location()}: {name} must be a scalar number, not {value!r}"
                )
            continue
        share = name in ("momentum", "beta1", "beta2", "decay")
        number = is_number(value) and bool(0 <= value < np.inf)
        if not number or (share and value > 1) or (name.startswith("beta") and value == 1):
            bound = "from 0 to 1" if share else "from 0"
            bound = "in [0, 1)" if name.startswith("beta") else bound
            listed = name == "lr" and isinstance(value, list | tuple | dict)
            hint = "; " + explain_repeated("lr") if listed else ""
            raise ArgumentError(
                f"{what} at {user_location()}: {name} must be a number {bound}, not {value!r}{hint}"
            )
        object.__setattr__(optimizer, name, float(value))


def refuse_sparse(optimizer: Any) -> None:
    """Refuse `sparse=True` for a rule that needs whole gradients."""
    if optimizer.sparse:
        what = type(optimizer).__name__
        raise ArgumentError(
            f"{what} at {user_location()}: its step depends on whole gradients, so sparse must be "
            'False; give tables to another rule: gf.optim.Groups({"table": gf.optim.Adagrad()}, …)'
        )
