"""One node of an ONNX graph as its translation sees it: inputs, attributes, and ways to give up."""

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
from graphflow.onnx.loading.domains import normal_domain
from graphflow.onnx.loading.segments import OnnxBody, Scope
from graphflow.onnx.loading.value_kinds import (
    Array,
    Fixed,
    Known,
    OnHost,
    Value,
    dtype_name,
    is_native,
)
from graphflow.onnx.loading.value_kinds import onnx_dtype as dtype_of_code

LARGE = 1 << 28
"""Bytes of a tensor that is not computed while a model is read."""


class Signal(Exception):
    """Ends the translation of a node early; caught by the importer, never seen by users."""


class NeedsValue(Signal):
    """The value of an input decides a shape, and is not known yet."""

    def __init__(self, tensor: Tensor, why: str) -> None:
        super().__init__(why)
        self.tensor = tensor


class NeedsShapes(Signal):
    """A symbolic size would have to be known."""


class RunOnHost(Signal):
    """The node cannot be part of a graph: it runs on the host, between two graphs."""


class ImportContext(Protocol):
    """What the calls and the host nodes of a model may ask of its importer."""

    functions: dict[tuple[str, str], OnnxBody]
    programs: dict[int, tuple[Any, Any]]

    def as_tensor(self, value: Known) -> Tensor: ...

    def subgraph(self, graph: GraphProto, opsets: Mapping[str, int]) -> OnnxBody: ...

    def inline(
        self, body: OnnxBody, inputs: Sequence[Value | None], outer: Scope | None, index: int
    ) -> list[Value | None]: ...

    def expand_schema(self, call: NodeCall) -> list[Value | None]: ...


class NodeCall:
    """A node, the values of its inputs, and its opset."""

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
        """Number of inputs that are written down, trailing absent ones left out."""
        given = [i for i, value in enumerate(self.values) if value is not None]
        return given[-1] + 1 if given else 0

    def has(self, i: int) -> bool:
        """Whether an optional input is given."""
        return i < len(self.values) and self.values[i] is not None

    def value(self, i: int) -> Value:
        """Input i as it is.

        Raises:
            OnnxError: it is missing.
        """
        found = self.values[i] if i < len(self.values) else None
        if found is None:
            raise OnnxError(f"{self.label}: input {i} is missing")
        return found

    def tensor(self, i: int) -> Tensor:
        """Input i as a tensor; a weight becomes a variable."""
        value = self.value(i)
        if isinstance(value, Known):
            return self._importer.as_tensor(value)
        if isinstance(value, OnHost | Fixed):
            raise RunOnHost(f"{self.op_type} reads a value that is no tensor")
        return value

    def as_tensor(self, value: Known) -> Tensor:
        """A known value as the tensor that stands for it throughout the model."""
        return self._importer.as_tensor(value)

    def optional(self, i: int) -> Tensor | None:
        """Input i as a tensor, or None where it is left out."""
        return self.tensor(i) if self.has(i) else None

    def tensors(self) -> list[Tensor]:
        """All inputs; for operators that take any number."""
        return [self.tensor(i) for i in range(len(self.values))]

    def spec(self, i: int) -> TensorSpec:
        """Shape and dtype of input i."""
        value = self.value(i)
        if isinstance(value, Known):
            return TensorSpec(value.shape, value.dtype)
        return self.tensor(i).spec

    def rank(self, i: int) -> int:
        return self.spec(i).rank

    def static_size(self, size: Size) -> int:
        """A size as a plain int; the model is specialised by shapes if it must be."""
        if isinstance(size, Dim):
            raise NeedsShapes(f"{self.label} needs the size {size} as a number")
        return int(size)

    def is_symbolic(self, i: int) -> bool:
        """Whether input i is known but for symbolic sizes in it."""
        value = self.value(i)
        return isinstance(value, Known) and value.symbolic

    def known_array(self, i: int) -> Array:
        """The value of input i as an array of plain numbers.

        Signals NeedsValue where it depends on what is fed.
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
            raise RunOnHost(f"{self.op_type} reads a value that is no tensor")
        raise NeedsValue(value, f"{self.label}: its input {i} decides the shape of its output")

    def sizes(self, i: int) -> list[Size]:
        """The value of input i as a list of sizes, some of them perhaps symbolic."""
        value = self.value(i)
        if isinstance(value, Known):
            items = value.array.reshape(-1).tolist()
            if any(not isinstance(x, Dim) and x != int(x) for x in items):
                raise OnnxError(f"{self.label}: sizes are whole numbers, not {items}")
            return [x if isinstance(x, Dim) else int(x) for x in items]
        return [int(x) for x in self.known_array(i).reshape(-1)]

    def scalar(self, i: int) -> Any:
        """The value of an input of one element as a Python number."""
        return self.known_array(i).reshape(-1)[0].item()

    # Attributes -------------------------------------------------------------------------------

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute as a Python value: int, float, str, list, TensorProto or GraphProto."""
        attribute = self._attributes.get(name)
        return default if attribute is None else attribute_value(attribute)

    def required_attr(self, name: str) -> Any:
        """An attribute without which there is no meaning.

        Raises:
            OnnxError: it is missing.
        """
        if name not in self._attributes:
            raise OnnxError(f"{self.label}: attribute {name!r} is missing")
        return self.attr(name)

    def dtype(self, name: str, default: int | None = None) -> np.dtype[Any]:
        """An attribute that is a type code, as a dtype that a tensor can have.

        Signals RunOnHost for other dtypes.
        """
        return self.dtype_of(self.attr(name, default))

    def dtype_of(self, code: int) -> np.dtype[Any]:
        found = dtype_of_code(code)
        if found is None or not is_native(found):
            raise RunOnHost(f"tensors of {dtype_name(code)} live on the host only")
        return found

    def inline(self, name: str, inputs: Sequence[Value]) -> list[Value | None]:
        """The outputs of a subgraph, which is an attribute, read into the current graph."""
        for attribute in self.proto.attribute:
            if attribute.name == name:
                body = self._importer.subgraph(attribute.g, self.scope.opsets)
                return self._importer.inline(body, inputs, self.scope, self.index)
        raise OnnxError(f"{self.label}: attribute {name!r} is missing")

    def expand_schema_body(self) -> list[Value | None]:
        """The outputs by the function body of ONNX's schema, read into the current graph."""
        return self._importer.expand_schema(self)

    # Outputs ----------------------------------------------------------------------------------

    def wants(self, i: int) -> bool:
        """Whether output i has a name that others may read."""
        return i < len(self.proto.output) and bool(self.proto.output[i])

    def unsupported_error(self, what: str) -> UnsupportedOnnxError:
        """The error for a use of an operator that has no translation."""
        return UnsupportedOnnxError(f"{self.label}: {what}")


def attribute_value(attribute: AttributeProto) -> Any:
    """The value of an attribute, bytes as text where they are text."""
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
    """The value of a tensor that depends on no feed and draws nothing; variables count with their
    initial values. None for any other tensor, and for one that takes much memory to compute."""
    for node in Graph(tensor).nodes:
        if not (node.op.pure or node.op.name == "variable") or has_dim(node):
            return None
        if any(not spec.is_concrete or nbytes(spec) > LARGE for spec in node.specs):
            return None
    return np.asarray(evaluate([tensor])[0])


def has_dim(node: Any) -> bool:
    """Whether an attribute of a node is or holds a symbolic size."""
    return any(
        isinstance(item, Dim)
        for value in node.attrs.values()
        for item in (value if isinstance(value, tuple | list) else (value,))
    )


__all__ = [
    "LARGE", "NodeCall", "NeedsShapes", "NeedsValue", "RunOnHost", "Signal", "attribute_value",
    "constant_value", "has_dim",
]  # fmt: skip
