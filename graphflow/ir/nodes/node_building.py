"""Building nodes: convert the inputs of an op's call, and check them by its shape rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.base.argument_checks import signature_of
from graphflow.base.source_location import Location, user_location, with_location
from graphflow.errors import (
    ArgumentError,
    DTypeError,
    GraphError,
    GraphflowError,
    OpCheckError,
)
from graphflow.ir.declarations.op_declaration import Op, set_node_builder
from graphflow.ir.nodes.node import Node, Tensor
from graphflow.ir.nodes.scopes import current_device, current_scope, is_name
from graphflow.ir.nodes.tensor_conversion import as_tensor, autocast_inputs, promote_inputs
from graphflow.ir.spec import TensorSpec, record_equations


def apply_op(op: Op, inputs: tuple[Any, ...], name: str | None, attrs: Mapping[str, Any]) -> Any:
    """Apply an op to tensors, or to values that convert: a Tensor, or a tuple of them.

    Raises:
        ArgumentError: another number of inputs than the op takes.
    """
    arity = op.arity
    if arity is not None and arity != len(inputs):
        raise ArgumentError(
            f"{op.name} at {user_location()}: takes {arity} "
            f"tensor{'s' * (arity != 1)}, not {len(inputs)}"
        )
    try:
        tensors = promote_inputs(op.name, inputs) if op.promotes else tuple(map(as_tensor, inputs))
        if op.autocast is not None:
            tensors = tuple(autocast_inputs(tensors, op.autocast))
    except GraphError as error:
        raise with_location(op.name, error) from None
    outputs = make_node(op, tensors, attrs, name).outputs
    return outputs[0] if len(outputs) == 1 else outputs


set_node_builder(apply_op)


def make_node(
    op: Op, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any], name: str | None = None
) -> Node:
    """Check an application of an op by its shape rule, and build the node.

    Raises:
        ShapeError, DTypeError, ArgumentError: the rule refuses; the message names op and line.
        OpCheckError: the rule returns something other than specs.
    """
    scope = current_scope.get()
    location = scope.location or user_location()
    if name is not None and not is_name(name):
        raise ArgumentError(
            f"{op.name} at {location}: name is a str that is not empty, and Unicode, not {name!r}"
        )
    given = [t.node.specs[t.index] for t in inputs]
    try:
        with record_equations() as equations:
            specs = op.infer(*given, **attrs) if attrs else op.infer(*given)
    except GraphflowError as error:
        hint = _float64_hint(inputs) if isinstance(error, DTypeError) else ""
        raise type(error)(f"{op.name} at {location}: {error}{hint}") from None
    except TypeError:
        _require_attributes(op, inputs, attrs, location)
        raise
    if isinstance(specs, TensorSpec) and isinstance(specs.dtype, np.dtype):
        outputs: tuple[TensorSpec, ...] = (specs,)
    elif isinstance(specs, tuple) and _are_specs(specs):
        outputs = specs
    else:
        raise OpCheckError(
            f"{op.name} at {location}: its infer gives {specs!r}; it gives a TensorSpec, or a "
            'tuple of them, such as gf.spec("float32", (3, 4))'
        )
    return Node(
        op,
        inputs,
        attrs,
        outputs,
        name=scope.prefix + (name or op.name),
        device=current_device.get(),
        location=location,
        origin=scope.origin,
        equations=tuple(equations),
        turn=scope.turn,
    )


def _float64_hint(inputs: Sequence[Tensor]) -> str:
    """Name the numpy scalar that turned float32 into float64; "" if there is none.

    Python scalars take the dtype of tensors, numpy scalars keep theirs; users confuse the two.
    """
    stack = [t.node for t in inputs if t.dtype == np.float64]
    seen = set(stack)
    while stack:
        node = stack.pop()
        before = {t.node for t in node.inputs if t.dtype == np.float64}
        scalars = [n for n in before if n.op.name == "constant" and not n.specs[0].shape]
        narrow = [n for n in before if n.op.name == "astype" and n.inputs[0].dtype == np.float32]
        if scalars and narrow:
            value = scalars[0].attrs["value"].item()
            return (
                f". It is float64 since {node.op.name} at {node.location}, by the float64 scalar "
                f"{value!r}: numbers of numpy keep their dtype, so give it as a Python number, "
                "float(…)"
            )
        stack += before - seen
        seen |= before
    return ""


def _are_specs(outputs: tuple[Any, ...]) -> bool:
    for each in outputs:
        if not (isinstance(each, TensorSpec) and isinstance(each.dtype, np.dtype)):
            return False
    return True


def _require_attributes(
    op: Op, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any], location: Location
) -> None:
    """Raise ArgumentError if attributes are unknown to the op, or missing."""
    try:
        signature_of(op.infer).bind(*inputs, **attrs)
    except TypeError as error:
        raise ArgumentError(f"{op.name} at {location}: {error}") from None
