"""Node, one application of an op to tensors, and Tensor, an output of a node."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from graphflow.base.notebook_html import html_table
from graphflow.base.source_location import Location, user_location
from graphflow.errors import ArgumentError, GraphError, ShapeError, VariableError
from graphflow.ir import numpy_interop
from graphflow.ir.declarations.op_declaration import Op
from graphflow.ir.declarations.registry import FUNCTIONS
from graphflow.ir.device_name import DeviceName
from graphflow.ir.name_hints import MODULE_CALL_HINTS, attribute_hint, unsupported_message
from graphflow.ir.nodes.tensor_operators import TensorOperators
from graphflow.ir.spec import Equation, Shape, Size, TensorSpec, show_shape

_serial = itertools.count()


class Tensor(TensorOperators):
    """Output number `index` of a node: symbolic, typed, usable with Python's operators.

    `==` builds a node, so compare tensors by `is`. As dictionary keys, tensors are equal only to
    themselves.
    """

    __slots__ = ("__weakref__", "index", "node")

    def __init__(self, node: Any = None, index: Any = None, *_: Any, **__: Any) -> None:
        if not isinstance(node, Node):  # as torch.Tensor([1.0, 2.0])
            raise ArgumentError(
                f"gf.Tensor(…) at {user_location()}: tensors are outputs of nodes; "
                f"{MODULE_CALL_HINTS['tensor']}"
            )
        self.node: Node = node
        self.index: int = index

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype together."""
        return self.node.specs[self.index]

    @property
    def shape(self) -> Shape:
        """Sizes of the axes; one that only a feed fixes is a `Dim`, such as `n` or `2*n + 1`."""
        return self.node.specs[self.index].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """numpy's dtype of the elements."""
        return self.node.specs[self.index].dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.spec.shape)

    @property
    def size(self) -> Size:
        """Number of elements: the product of the shape."""
        return self.spec.size

    @property
    def name(self) -> str:
        """The name of the node."""
        return self.node.name

    @property
    def device(self) -> str:
        """The device that the user pinned the node to; "" if the planner chooses."""
        return str(self.node.device)

    @property
    def real(self) -> Tensor:
        """The real part; the tensor itself if it is real."""
        part: Tensor = FUNCTIONS["real"](self)
        return part

    @property
    def imag(self) -> Tensor:
        """The imaginary part; zeros for a real tensor."""
        part: Tensor = FUNCTIONS["imag"](self)
        return part

    @property
    def T(self) -> Tensor:
        """The last two axes swapped; with fewer, the tensor itself."""
        return self if self.ndim < 2 else self.mT

    @property
    def mT(self) -> Tensor:
        """The last two axes swapped."""
        transposed: Tensor = FUNCTIONS["matrix_transpose"](self)
        return transposed

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self.spec} at {self.node.location}>"

    def _repr_html_(self) -> str:
        rows = [
            ("op", self.node.op.name), ("dtype", self.dtype), ("shape", show_shape(self.shape)),
            *(("input", each.name) for each in self.node.inputs),
            ("made at", self.node.location),
        ]  # fmt: skip
        return html_table(f"Tensor {self.name}", (), rows)

    def _no_value_error(self, what: str) -> GraphError:
        return GraphError(
            f"{self.name} (made at {self.node.location}) has no {what} while the graph is built: "
            "it is symbolic; use gf.where for choices, Session.run for values"
        )

    def __bool__(self) -> bool:
        raise self._no_value_error("truth value")

    def __int__(self) -> int:
        raise self._no_value_error("integer value")

    __index__ = __int__

    def __float__(self) -> float:
        raise self._no_value_error("float value")

    def __complex__(self) -> complex:
        raise self._no_value_error("complex value")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._no_value_error("array")

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise self._no_value_error("memory to export")

    __dlpack_device__ = __dlpack__

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply one of Python's operators to a numpy array and a tensor; refuse other ufuncs."""
        name = numpy_interop.OPERATORS.get(ufunc.__name__)
        if name is None or method != "__call__" or options:
            raise self._numpy_error(ufunc)
        return FUNCTIONS[name](*inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        name = function.__name__
        if name in numpy_interop.ATTRIBUTES and args == (self,) and not options:
            return getattr(self, name)
        raise self._numpy_error(function)

    def _numpy_error(self, function: Any) -> GraphError:
        what = f"{self.name} (made at {self.node.location})"
        return GraphError(unsupported_message(function, what))

    if not TYPE_CHECKING:  # a type checker would otherwise accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            message = f"tensors have no attribute {name!r}"
            message += attribute_hint(name)
            raise AttributeError(message, name=name, obj=self)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise GraphError(
            f"{self.name} (made at {self.node.location}) at {user_location()}: tensors do not "
            "change; gf.where, gf.scatter and gf.index_add make new ones, gf.assign sets a variable"
        )

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: Any) -> Tensor:
        if self.node.op.name == "variable":
            raise VariableError(
                f"{self.name} (made at {self.node.location}) "
                "is one variable, and a copy would be the same; build the layer again for "
                "variables of its own, and session.set(new, session.get(old))"
            )
        return self

    def __reduce__(self) -> NoReturn:
        raise GraphError(
            f"{self.name} (made at {self.node.location}) at {user_location()}: tensors are not "
            "pickled; build the graph where it runs, and take values along by session.save"
        )

    def __len__(self) -> int:
        if not self.ndim:
            raise self._no_value_error("length")
        if not isinstance(self.shape[0], int):
            raise GraphError(
                f"{self.name} (made at {self.node.location}) has no length while the graph is "
                "built: the size of its first axis comes with a feed; x.shape[0] is that size, "
                "gf.vmap and gf.scan run over the axis"
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self[i] for i in range(len(self))])


class Node:
    """One application of an op, immutable and compared by identity.

    Attributes:
        specs: shape and dtype of each output.
        device: the device constraint of the user; empty where there is none.
        location: the user's line that built it.
        origin: the node that it is a derivative of, or that it updates; None for others.
        equations: pairs of symbolic sizes that must be equal.
        turn: a device runs nodes of a lower turn first; -1 means as soon as possible.
        serial: the build number; nodes sorted by it are in topological order.

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
        self._set_fields(op, inputs, attrs, specs, name, device, location, origin, equations, turn)

    def _set_fields(
        self,
        op: Op,
        inputs: tuple[Tensor, ...],
        attrs: Mapping[str, Any],
        specs: tuple[TensorSpec, ...],
        name: str,
        device: DeviceName,
        location: Location,
        origin: Node | None,
        equations: tuple[Equation, ...],
        turn: int,
    ) -> None:
        self.op = op
        self.inputs = inputs
        self.attrs = attrs
        self.specs = specs
        self.name = name
        self.device = device
        self.location = location
        self.origin = origin
        self.equations = equations
        self.turn = turn
        self.serial = next(_serial)
        if len(specs) == 1:  # as Tensor(self, 0), without a call
            tensor = _new_tensor(Tensor)
            tensor.node = self
            tensor.index = 0
            self.outputs: tuple[Tensor, ...] = (tensor,)
        else:
            self.outputs = tuple(map(Tensor, repeat(self), range(len(specs))))

    def with_inputs(
        self,
        inputs: tuple[Tensor, ...],
        attrs: Mapping[str, Any] | None = None,
        specs: tuple[TensorSpec, ...] | None = None,
        turn: int | None = None,
    ) -> Node:
        """Return the same application with other inputs or attributes."""
        attrs = self.attrs if attrs is None else attrs
        turn = self.turn if turn is None else turn
        if specs is None:
            return self._copy(
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
        """Return the same application to inputs of the same specs, as a derivative of `origin`.

        It counts as built at the line of `origin`, in no turn. Equal input specs give equal output
        specs, so the shape rule does not run again.
        """
        attrs = self.attrs if attrs is None else attrs
        return self._copy(inputs, attrs, name, device, origin.location, origin, self.equations, -1)

    def copy_to_run(self, inputs: tuple[Tensor, ...], name: str, device: DeviceName) -> Node:
        """Return the same application for a device's partition.

        It keeps the user's line. Origin, equations and turn have served their purpose by then.
        """
        return self._copy(inputs, self.attrs, name, device, self.location, None, (), -1)

    def _copy(
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
        """Return a node of the same op and specs, without checking the specs again.

        Several passes copy each node of a large graph. Without the keywords and the check of
        `__init__` a copy takes 0.6 instead of 1 µs.
        """
        node = _new_node(Node)
        node._set_fields(
            self.op, inputs, attrs, self.specs, name, device, location, origin, equations, turn
        )
        return node

    def bound_specs(self, bindings: Mapping[str, int]) -> tuple[TensorSpec, ...]:
        """Return the specs with symbols replaced by sizes.

        Raises:
            ShapeError: a size comes out negative.
        """
        try:
            return tuple([spec.bind(bindings) for spec in self.specs])
        except ShapeError as error:
            raise ShapeError(f"{self.op.name} at {self.location}: {error}") from None

    def __deepcopy__(self, memo: Any) -> Node:
        return self  # copies of a plan share its nodes

    def __repr__(self) -> str:
        return f"<{self.op.name} {self.name!r} at {self.location}>"


_new_tensor = Tensor.__new__
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
    """Take a serial number: nodes built before have lower ones, nodes built later higher ones."""
    return next(_serial)
