"""NodeCall: the inputs and attributes of an ONNX node for its translation, and the signals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto

from graphflow.errors import OnnxError, UnsupportedOnnxError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.ir.spec import Dim, Size, TensorSpec, nbytes
from graphflow.onnx.loading.reading.domains import normal_domain
from graphflow.onnx.loading.reading.value_kinds import (
    Array,
    Fixed,
    Known,
    OnHost,
    Value,
    dtype_name,
    is_native,
)
from graphflow.onnx.loading.reading.value_kinds import onnx_dtype as dtype_of_code
from graphflow.onnx.loading.translation.segments import OnnxBody, Scope

LARGE = 1 << 28
"""Bytes of the largest tensor that is computed while a model is read."""


class Signal(Exception):
    """Ends the translation of a node early. The importer catches it; users never see it."""


class NeedsValue(Signal):
    """The value of an input decides a shape and is not known yet."""

    def __init__(self, tensor: Tensor, why: str) -> None:
        super().__init__(why)
        self.tensor = tensor


class NeedsShapes(Signal):
    """A symbolic size must be known."""


class RunOnHost(Signal):
    """The node cannot be part of a graph, so it runs on the host, between two graphs."""


class ImportContext(Protocol):
    """The part of the importer that calls and host nodes use."""

    functions: dict[tuple[str, str], OnnxBody]
    programs: dict[int, tuple[Any, Any]]

    def as_tensor(self, value: Known) -> Tensor: ...

    def subgraph(self, graph: GraphProto, opsets: Mapping[str, int]) -> OnnxBody: ...

    def inline(
        self, body: OnnxBody, inputs: Sequence[Value | None], outer: Scope | None, index: int
    ) -> list[Value | None]: ...

    def expand_schema(self, call: NodeCall) -> list[Value | None]: ...


class NodeCall:
    """A node with the values of its inputs and its opset, for the function that translates it."""

    def __init__(
        self,
        proto: NodeProto,
        values: Sequence[Value | None],
        scope: Scope,
        label: str,
        importer: ImportContext,
        index: int = 0,
    ) -> None:
        self.proto = proto
        self.values = list(values)
        self.scope = scope
        self.label = label
        self.op_type = proto.op_type
        self.version = scope.opsets.get(normal_domain(proto.domain), 1)
        self._importer = importer
        self.index = index
        self._attributes = {a.name: a for a in proto.attribute}

    # Inputs -----------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of inputs without trailing absent ones."""
        given = [i for i, value in enumerate(self.values) if value is not None]
        return given[-1] + 1 if given else 0

    def has(self, i: int) -> bool:
        """Return True if input i is given."""
        return i < len(self.values) and self.values[i] is not None

    def value(self, i: int) -> Value:
        """Return the value of input i.

        Raises:
            OnnxError: the input is missing.
        """
        found = self.values[i] if i < len(self.values) else None
        if found is None:
            raise OnnxError(f"{self.label}: input {i} is missing")
        return found

    def tensor(self, i: int) -> Tensor:
        """Return input i as a tensor; a weight becomes a variable."""
        value = self.value(i)
        if isinstance(value, Known):
            return self._importer.as_tensor(value)
        if isinstance(value, OnHost | Fixed):
            raise RunOnHost(f"{self.op_type} reads a value that is not a tensor")
        return value

    def as_tensor(self, value: Known) -> Tensor:
        """Return the tensor that stands for a known value in the whole model."""
        return self._importer.as_tensor(value)

    def optional(self, i: int) -> Tensor | None:
        """Return input i as a tensor, or None if it is left out."""
        return self.tensor(i) if self.has(i) else None

    def tensors(self) -> list[Tensor]:
        """Return all inputs as tensors, for operators of any number of inputs."""
        return [self.tensor(i) for i in range(len(self.values))]

    def spec(self, i: int) -> TensorSpec:
        """Return shape and dtype of input i."""
        value = self.value(i)
        if isinstance(value, Known):
            return TensorSpec(value.shape, value.dtype)
        return self.tensor(i).spec

    def rank(self, i: int) -> int:
        """Return the number of axes of input i."""
        return self.spec(i).rank

    def static_size(self, size: Size) -> int:
        """Return a size as an int. Signals NeedsShapes for a symbolic size."""
        if isinstance(size, Dim):
            raise NeedsShapes(f"{self.label} needs the size {size} as a number")
        return int(size)

    def is_symbolic(self, i: int) -> bool:
        """Return True if input i is known, but holds symbolic sizes."""
        value = self.value(i)
        return isinstance(value, Known) and value.symbolic

    def known_array(self, i: int) -> Array:
        """Return the value of input i as an array of numbers.

        Signals NeedsValue if the value depends on feeds, NeedsShapes if it holds symbolic sizes.
        """
        value = self.value(i)
        if isinstance(value, Known):
            if value.symbolic:
                raise NeedsShapes(f"{self.label} needs the sizes of input {i} as numbers")
            return value.array
        if isinstance(value, Tensor):
            constant = constant_value(value)
            if constant is not None:
                return constant
        if isinstance(value, Fixed | OnHost):
            raise RunOnHost(f"{self.op_type} reads a value that is not a tensor")
        raise NeedsValue(value, f"{self.label}: its input {i} decides the shape of its output")

    def sizes(self, i: int) -> list[Size]:
        """Return the value of input i as a list of sizes, which may be symbolic."""
        value = self.value(i)
        if isinstance(value, Known):
            items = value.array.reshape(-1).tolist()
            if any(not isinstance(x, Dim) and x != int(x) for x in items):
                raise OnnxError(f"{self.label}: sizes are whole numbers, not {items}")
            return [x if isinstance(x, Dim) else int(x) for x in items]
        return [int(x) for x in self.known_array(i).reshape(-1)]

    def scalar(self, i: int) -> Any:
        """Return the value of an input of one element as a Python number."""
        return self.known_array(i).reshape(-1)[0].item()

    # Attributes -------------------------------------------------------------------------------

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute as a Python value: int, float, str, list, TensorProto, GraphProto."""
        attribute = self._attributes.get(name)
        return default if attribute is None else attribute_value(attribute)

    def required_attr(self, name: str) -> Any:
        """Return an attribute that the operator requires.

        Raises:
            OnnxError: the attribute is missing.
        """
        if name not in self._attributes:
            raise OnnxError(f"{self.label}: attribute {name!r} is missing")
        return self.attr(name)

    def dtype(self, name: str, default: int | None = None) -> np.dtype[Any]:
        """Return the dtype of an attribute that is a type code.

        Signals RunOnHost for dtypes that tensors cannot have.
        """
        return self.dtype_of(self.attr(name, default))

    def dtype_of(self, code: int) -> np.dtype[Any]:
        """Return the dtype of a type code. Signals RunOnHost if tensors cannot have it."""
        found = dtype_of_code(code)
        if found is None or not is_native(found):
            raise RunOnHost(f"tensors of {dtype_name(code)} live on the host only")
        return found

    def inline(self, name: str, inputs: Sequence[Value]) -> list[Value | None]:
        """Translate the subgraph in an attribute into the current graph; return its outputs."""
        for attribute in self.proto.attribute:
            if attribute.name == name:
                body = self._importer.subgraph(attribute.g, self.scope.opsets)
                return self._importer.inline(body, inputs, self.scope, self.index)
        raise OnnxError(f"{self.label}: attribute {name!r} is missing")

    def expand_schema_body(self) -> list[Value | None]:
        """Translate the function body in ONNX's schema into the graph; return its outputs."""
        return self._importer.expand_schema(self)

    # Outputs ----------------------------------------------------------------------------------

    def wants(self, i: int) -> bool:
        """Return True if output i has a name, so that other nodes may read it."""
        return i < len(self.proto.output) and bool(self.proto.output[i])

    def unsupported_error(self, what: str) -> UnsupportedOnnxError:
        """Return the error for a use of an operator that has no translation."""
        return UnsupportedOnnxError(f"{self.label}: {what}")


def attribute_value(attribute: AttributeProto) -> Any:
    """Return the value of an attribute as a Python value; strings are decoded as UTF-8."""
    kinds: Mapping[int, Callable[[], Any]] = {
        AttributeProto.FLOAT: lambda: attribute.f,
        AttributeProto.INT: lambda: attribute.i,
        AttributeProto.STRING: lambda: _text(attribute.s),
        AttributeProto.TENSOR: lambda: attribute.t,
        AttributeProto.GRAPH: lambda: attribute.g,
        AttributeProto.FLOATS: lambda: list(attribute.floats),
        AttributeProto.INTS: lambda: list(attribute.ints),
        AttributeProto.STRINGS: lambda: [_text(s) for s in attribute.strings],
        AttributeProto.TENSORS: lambda: list(attribute.tensors),
        AttributeProto.GRAPHS: lambda: list(attribute.graphs),
        AttributeProto.SPARSE_TENSOR: lambda: attribute.sparse_tensor,
        AttributeProto.TYPE_PROTO: lambda: attribute.tp,
    }
    read = kinds.get(attribute.type)
    if read is None:
        raise OnnxError(f"attribute {attribute.name!r} has the unknown type {attribute.type}")
    return read()


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="replace")


def constant_value(tensor: Tensor) -> Array | None:
    """Compute a tensor that depends on no feed and no random number; else return None.

    Variables have their initial values. Tensors that take much memory to compute give None, too.
    """
    for node in Graph(tensor).nodes:
        if not (node.op.pure or node.op.name == "variable") or has_dim(node):
            return None
        if any(not spec.is_concrete or nbytes(spec) > LARGE for spec in node.specs):
            return None
    return np.asarray(evaluate([tensor])[0])


def has_dim(node: Any) -> bool:
    """Return True if an attribute of a node is or holds a symbolic size."""
    return any(
        isinstance(item, Dim)
        for value in node.attrs.values()
        for item in (value if isinstance(value, tuple | list) else (value,))
    )


__all__ = [
    "LARGE", "NodeCall", "NeedsShapes", "NeedsValue", "RunOnHost", "Signal", "attribute_value",
    "constant_value", "has_dim",
]  # fmt: skip
