"""Node: one application of an op to tensors, checked where it is made."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from graphflow.base.argument_checks import signature_of
from graphflow.base.source_location import Location, user_location
from graphflow.errors import ArgumentError, DTypeError, GraphflowError, OpCheckError, ShapeError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.scopes import current_device, current_scope, is_name
from graphflow.ir.spec import Equation, TensorSpec, record_equations, show_shape
from graphflow.ir.tensor import Tensor

if TYPE_CHECKING:
    from graphflow.ir.op import Op

_serial = itertools.count()
_new_tensor = Tensor.__new__


class Node:
    """One application of an op. Never changed; compared by identity.

    Raises:
        ShapeError: a spec has a negative size.
    """

    __slots__ = (
        "attrs", "device", "equations", "inputs", "location", "name", "op", "origin", "outputs",
        "serial", "specs", "turn",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        inputs: tuple[Tensor, ...],
        attrs: Mapping[str, Any],
        specs: tuple[TensorSpec, ...],
        *,
        name: str,
        device: DeviceName,
        location: Location,
        origin: Node | None = None,
        equations: tuple[Equation, ...] = (),
        turn: int = -1,
    ) -> None:
        for spec in specs:
            for size in spec.shape:
                if type(size) is int and size < 0:
                    raise _negative_size_error(op, location, inputs, spec)
        self.op = op
        self.inputs = inputs
        self.attrs = attrs
        self.specs = specs
        self.name = name
        self.device = device
        self.location = location
        self.origin = origin
        self.equations = equations
        self.turn = turn  # a device runs nodes of a lower one first; -1: as soon as it can
        self.serial = next(_serial)
        self.outputs: tuple[Tensor, ...] = (
            (Tensor(self, 0),)
            if len(specs) == 1
            else tuple(map(Tensor, repeat(self), range(len(specs))))
        )

    def with_inputs(
        self,
        inputs: tuple[Tensor, ...],
        attrs: Mapping[str, Any] | None = None,
        specs: tuple[TensorSpec, ...] | None = None,
        turn: int | None = None,
    ) -> Node:
        """The same application to other inputs of the same specs, or with other attributes."""
        attrs = self.attrs if attrs is None else attrs
        turn = self.turn if turn is None else turn
        if specs is None:
            return self._again(
                inputs, attrs, self.name, self.device, self.location, self.origin, self.equations,
                turn,
            )  # fmt: skip
        return Node(
            self.op,
            inputs,
            attrs,
            specs,
            name=self.name,
            device=self.device,
            location=self.location,
            origin=self.origin,
            equations=self.equations,
            turn=turn,
        )

    def copy_for(
        self,
        inputs: tuple[Tensor, ...],
        name: str,
        device: DeviceName,
        origin: Node,
        attrs: Mapping[str, Any] | None = None,
    ) -> Node:
        """The same application to inputs of the same specs, derived of `origin`: made at its line,
        and in no turn. A shape rule has nothing to add: equal inputs give equal specs."""
        attrs = self.attrs if attrs is None else attrs
        return self._again(inputs, attrs, name, device, origin.location, origin, self.equations, -1)

    def copy_to_run(self, inputs: tuple[Tensor, ...], name: str, device: DeviceName) -> Node:
        """The same application as a device runs it: it was made where this one was, and what else
        is known of that has had its effect."""
        return self._again(inputs, self.attrs, name, device, self.location, None, (), -1)

    def _again(
        self,
        inputs: tuple[Tensor, ...],
        attrs: Mapping[str, Any],
        name: str,
        device: DeviceName,
        location: Location,
        origin: Node | None,
        equations: tuple[Equation, ...],
        turn: int,
    ) -> Node:
        """A node of the same specs, which need no check: as `__init__` makes one, with fewer calls,
        since several passes make each node of a large graph again."""
        node = _new_node(Node)
        node.op = self.op
        node.inputs = inputs
        node.attrs = attrs
        node.specs = self.specs
        node.name = name
        node.device = device
        node.location = location
        node.origin = origin
        node.equations = equations
        node.turn = turn
        node.serial = next(_serial)
        if len(self.specs) == 1:
            tensor = _new_tensor(Tensor)
            tensor.node = node
            tensor.index = 0
            node.outputs = (tensor,)
        else:
            node.outputs = tuple(map(Tensor, repeat(node), range(len(self.specs))))
        return node

    def bound_specs(self, bindings: Mapping[str, int]) -> tuple[TensorSpec, ...]:
        """The specs with symbols replaced by sizes.

        Raises:
            ShapeError: a size comes out negative.
        """
        try:
            return tuple([spec.bind(bindings) for spec in self.specs])
        except ShapeError as error:
            raise ShapeError(f"{self.op.name} at {self.location}: {error}") from None

    def __deepcopy__(self, memo: Any) -> Node:
        return self  # what holds one, such as a plan, is copied without it

    def __repr__(self) -> str:
        return f"<{self.op.name} {self.name!r} at {self.location}>"


_new_node = Node.__new__


def _negative_size_error(
    op: Op, location: Location, inputs: Sequence[Tensor], spec: TensorSpec
) -> ShapeError:
    given = ", ".join(str(t.spec) for t in inputs) or "no tensors"
    return ShapeError(
        f"{op.name} at {location}: the result would have shape {show_shape(spec.shape)}, and no "
        f"size is negative; it is given {given}: give larger ones, or less padding or cropping"
    )


def next_serial() -> int:
    """A number that no node has: nodes built before have lower ones, those built after, higher."""
    return next(_serial)


def make_node(
    op: Op, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any], name: str | None = None
) -> Node:
    """Check an application of an op by its shape rule and build the node.

    Raises:
        ShapeError, DTypeError, ArgumentError: the rule refuses; the message names op and line.
        OpCheckError: the rule gives something that is no spec.
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
    """Where float32 became float64 by a scalar of numpy, which people take for a number; "" if it
    did not."""
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
    """Refuse attributes that the op does not have, or say which it lacks."""
    try:
        signature_of(op.infer).bind(*inputs, **attrs)
    except TypeError as error:
        raise ArgumentError(f"{op.name} at {location}: {error}") from None
