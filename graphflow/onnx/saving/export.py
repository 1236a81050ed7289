"""`gf.onnx.save`: write a graph as an ONNX model, as far as ONNX can express it.

For each op, a function registered by `writes` emits the nodes (`writers*.py`). Symbolic sizes
become `dim_param`s of the inputs. Where an op needs such a size, nodes compute it by `Shape`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import (
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    checker,
    helper,
    numpy_helper,
)

from graphflow import _version
from graphflow.base.argument_checks import checks_argument_names, did_you_mean
from graphflow.base.atomic_write import write_atomically
from graphflow.base.formatting import show_count
from graphflow.base.process.interrupts import passes_interrupts
from graphflow.errors import ArgumentError, OnnxError, UnsupportedOnnxError
from graphflow.frontend.feeds import convert
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor, error_location, user_location
from graphflow.ir.spec import Dim, Size, is_fresh, substitute, symbols
from graphflow.onnx.loading.reading.reader import LIMIT
from graphflow.onnx.loading.reading.value_kinds import Array
from graphflow.runtime.checkpoint.manifest import list_some
from graphflow.sessions.session import Session

OPSET = 20
IR_VERSION = 9

Writer = Callable[["Export", Node, list[str]], str | list[str]]
_WRITERS: dict[str, Writer] = {}


def writes(*ops: str) -> Callable[[Writer], Writer]:
    """Register (export, node, names of inputs) -> names of outputs as the writer of ops."""

    def enter(writer: Writer) -> Writer:
        _WRITERS.update(dict.fromkeys(ops, writer))
        return writer

    return enter


class Unwritable(Exception):
    """A use of an op that ONNX cannot express. Export collects these; users never see them."""


class Export:
    """An ONNX model in the making: its nodes, initializers, and the names of tensors."""

    def __init__(self, graph: Graph, values: Callable[[Tensor], Array]) -> None:
        self.graph = graph
        self.values = values
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.names: dict[Tensor, str] = {}
        self._taken: set[str] = set()
        self._sizes: dict[Size, str] = {}
        self._origin: dict[str, tuple[str, int]] = {}  # symbol -> input, axis
        self.current = ""

    # For writers ------------------------------------------------------------------------------

    def emit(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node of one output, and return the output's name."""
        return self.emit_many(op_type, inputs, 1, **attributes)[0]

    def emit_many(
        self, op_type: str, inputs: Sequence[str], outputs: int, **attributes: Any
    ) -> list[str]:
        """Add a node of several outputs, and return their names."""
        made = [self.name(f"{self.current}_{op_type}") for _ in range(outputs)]
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(op_type, list(inputs), made, name=made[0], **given))
        return made

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Add an initializer, and return its name."""
        array = np.asarray(value, dtype)
        name = self.name(f"{self.current}_constant")
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(
            array.shape), name))  # fmt: skip
        return name

    def ints(self, values: Sequence[int]) -> str:
        """Add a list of known ints, and return its name."""
        return self.constant(np.array(values, np.int64).reshape(-1))

    def shape(self, sizes: Sequence[Size]) -> str:
        """Add a shape, computed if sizes are symbolic, and return its name."""
        if not any(isinstance(size, Dim) for size in sizes):
            return self.ints([int(size) for size in sizes])
        parts = [self.emit("Unsqueeze", [self.size(s), self.ints([0])]) for s in sizes]
        return self.emit("Concat", parts, axis=0)

    def size(self, size: Size) -> str:
        """Add a size as an int64 scalar, and return its name."""
        if not isinstance(size, Dim):
            return self.constant(np.array(size, np.int64))
        if size not in self._sizes:
            terms = [self._monomial(m, c) for m, c in size.terms.items()]
            total = terms[0]
            for term in terms[1:]:
                total = self.emit("Add", [total, term])
            self._sizes[size] = total
        return self._sizes[size]

    def _monomial(self, atoms: Sequence[Any], factor: int) -> str:
        names = [self._atom(atom) for atom in atoms]
        if factor != 1 or not names:
            names.append(self.constant(np.array(factor, np.int64)))
        result = names[0]
        for name in names[1:]:
            result = self.emit("Mul", [result, name])
        return result

    def _atom(self, atom: Any) -> str:
        if not isinstance(atom, str):
            kind = {"floordiv": "Div", "min": "Min", "max": "Max"}[atom[0]]
            return self.emit(kind, [self.size(atom[1]), self.size(atom[2])])
        if atom not in self._origin:
            raise Unwritable(f"the size {atom} comes from no input")
        source, axis = self._origin[atom]
        shape = self.emit("Shape", [source], start=axis, end=axis + 1)
        return self.emit("Squeeze", [shape, self.ints([0])])

    def name(self, wish: str) -> str:
        """Reserve a name that is not in use: `wish`, perhaps with a number."""
        name, number = wish, 1
        while name in self._taken:
            name, number = f"{wish}_{number}", number + 1
        self._taken.add(name)
        return name

    # The graph --------------------------------------------------------------------------------

    def input(self, tensor: Tensor, name: str) -> ValueInfoProto:
        """Declare a placeholder as an input of the model."""
        self.names[tensor] = self.name(name)
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, Dim) and len(size.terms) == 1:
                ((atoms, factor),) = size.terms.items()
                if factor == 1 and len(atoms) == 1 and isinstance(atoms[0], str):
                    self._origin.setdefault(atoms[0], (self.names[tensor], axis))
        return _value_info(self.names[tensor], tensor)

    def write(self, outputs: Mapping[str, Tensor]) -> list[ValueInfoProto]:
        """Write all nodes, and return the outputs.

        Raises:
            UnsupportedOnnxError: ONNX cannot express some nodes; the message lists all, with the
                user's lines.
        """
        self._taken.update(outputs)
        wrong = []
        for node in self.graph.nodes:
            if node.op.name == "placeholder":
                continue
            self.current = self.graph.names[node].replace("/", "_")
            try:
                self._write(node)
            except Unwritable as error:
                wrong.append(f"  {node.op.name} {node.name!r} at {node.location}: {error}")
                self.names.update((t, "") for t in node.outputs)
        if wrong:
            raise UnsupportedOnnxError(
                f"{show_count(len(wrong), 'node')} cannot be written as ONNX:\n" + "\n".join(wrong)
            )
        for name, tensor in outputs.items():
            self.nodes.append(helper.make_node("Identity", [self.names[tensor]], [name], name=name))
        return [_value_info(name, tensor) for name, tensor in outputs.items()]

    def _write(self, node: Node) -> None:
        if node.op.name in ("variable", "constant"):
            (tensor,) = node.outputs
            array = self.values(tensor) if node.op.name == "variable" else node.attrs["value"]
            self.names[tensor] = self.name(self.graph.names[node])
            self.initializers.append(numpy_helper.from_array(np.array(array, order="C"),
                                                             self.names[tensor]))  # fmt: skip
            return
        writer = _WRITERS.get(node.op.name)
        if writer is None:
            raise Unwritable("there is no translation")
        made = writer(self, node, [self.names[t] for t in node.inputs])
        names = [made] if isinstance(made, str) else made
        self.names.update(zip(node.outputs, names, strict=False))


def _value_info(name: str, tensor: Tensor) -> ValueInfoProto:
    sizes = [s if isinstance(s, int) else _dim_name(s) for s in tensor.shape]
    code = helper.np_dtype_to_tensor_dtype(tensor.dtype)
    return helper.make_tensor_value_info(name, code, sizes)


def _dim_name(size: Size) -> str:
    """Return a `dim_param` for a symbolic size.

    ONNX allows any text, but tools prefer identifiers, and tell sizes apart by them. So fresh
    symbols get their numbers as names.
    """
    fresh = filter(is_fresh, symbols(size))
    names = {symbol: Dim.symbol(f"size_{symbol[1:].partition(' ')[0]}") for symbol in fresh}
    return str(substitute(size, names)).replace(" ", "")


@checks_argument_names(OnnxError)
@passes_interrupts
def save(
    path: str | os.PathLike[str] | None,
    outputs: Any,
    *,
    inputs: Any = None,
    values: Session | Mapping[Any, Any] | None = None,
) -> ModelProto:
    """Write a graph as an ONNX model (opset 20), and return the model.

    Args:
        path: the file to write; None for none.
        outputs: a tensor, a list of them, or {name: tensor}.
        inputs: placeholders in order, or {name: placeholder}; default: all, by their names.
        values: the values of variables: a session, or a dict from all variables (tensors or names)
            to arrays; default: the initial values.

    Raises:
        UnsupportedOnnxError: ONNX cannot express some nodes; the message lists them all.
        OnnxError: an argument is invalid, or the model is larger than protobuf allows.
    """
    with error_location("save"):
        named = _name_tensors("output", outputs)
        graph = Graph(list(named.values()))
        given = _name_tensors("input", inputs) if inputs is not None else _placeholders(graph)
        _check_inputs(graph, given)
    export = Export(graph, _variable_reader(values, graph))
    infos = [export.input(tensor, name) for name, tensor in given.items()]
    made = export.write(named)
    proto = helper.make_graph(
        export.nodes, "graphflow", infos, made, initializer=export.initializers
    )
    model = helper.make_model(
        proto,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="graphflow",
        producer_version=_version.__version__,
    )
    size = model.ByteSize()
    if size > LIMIT:
        raise OnnxError(f"the model has {size} bytes, protobuf takes {LIMIT}")
    checker.check_model(model)
    if path is not None:
        try:
            write_atomically(Path(path), model.SerializeToString())
        except OSError as error:
            raise OnnxError(f"{path} cannot be written: {error.strerror}") from None
    return model


def _name_tensors(what: str, tensors: Any) -> dict[str, Tensor]:
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    if isinstance(tensors, Mapping):
        named = dict(tensors)
    elif isinstance(tensors, list | tuple):
        named = {}
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise ArgumentError(f"an {what} is a tensor, not {tensor!r}")
            named[_free_name(tensor.name.replace("/", "_"), named)] = tensor
    else:
        raise ArgumentError(f"{what}s are a tensor, a list or {{name: tensor}}, not {tensors!r}")
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or not isinstance(name, str) or not name:
            raise ArgumentError(f"an {what} is a tensor with a name, not {name!r}: {tensor!r}")
    return named


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    free, number = name, 1
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


def _placeholders(graph: Graph) -> dict[str, Tensor]:
    return {graph.names[node].replace("/", "_"): node.outputs[0] for node in graph.placeholders}


def _check_inputs(graph: Graph, given: Mapping[str, Tensor]) -> None:
    nodes = [tensor.node for tensor in given.values()]
    for tensor in given.values():
        if tensor.node.op.name != "placeholder":
            raise ArgumentError(f"input {tensor.name!r} is a {tensor.node.op.name}, no placeholder")
    missing = [node.name for node in graph.placeholders if node not in nodes]
    if missing:
        raise ArgumentError(f"the outputs also depend on placeholders {', '.join(missing)}")


def _variable_reader(
    values: Session | Mapping[Any, Any] | None, graph: Graph
) -> Callable[[Tensor], Array]:
    """Return a function that reads the value of a variable.

    Raises:
        OnnxError: values are neither a session nor a dict, or lack variables of the graph.
    """

    def read_initial(tensor: Tensor) -> Array:
        start = tensor.node.attrs["initial"]
        return np.asarray(start() if callable(start) else start)

    if values is None:
        return read_initial
    if isinstance(values, Session):
        return values.get
    if not isinstance(values, Mapping):
        raise OnnxError(f"save at {user_location()}: values are a session or a dict")
    names = [node.name for node in graph.variables]
    lacking = [
        n.name for n in graph.variables if n.outputs[0] not in values and n.name not in values
    ]
    if lacking:
        spare = [key for key in values if isinstance(key, str) and key not in names]
        unexpected = f"; no variable is named {list_some(spare)}" if spare else ""
        raise OnnxError(
            f"save at {user_location()}: values lack variables {list_some(lacking)}{unexpected}; "
            f"give all of them. {did_you_mean(lacking[0], spare)}".rstrip()
        )

    def read_given(tensor: Tensor) -> Array:
        found = values[tensor] if tensor in values else values[tensor.name]
        return convert(tensor.node, found, OnnxError)

    return read_given
