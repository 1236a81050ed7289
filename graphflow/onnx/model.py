"""`gf.onnx.load`: ONNX models as graphs, with their inputs, outputs and variables as tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, TypeProto, ValueInfoProto, defs

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.array_conversion import NoArrayError, array_of
from graphflow.base.process.interrupts import passes_interrupts
from graphflow.errors import FeedError, OnnxError, UnsupportedOnnxError
from graphflow.frontend.builders import placeholder
from graphflow.ir.op import Tensor, user_location
from graphflow.ir.spec import Dim
from graphflow.onnx import operators
from graphflow.onnx.loading.host import host_control_flow as host_control
from graphflow.onnx.loading.host import host_nodes as host
from graphflow.onnx.loading.host import host_values
from graphflow.onnx.loading.importer import Importer
from graphflow.onnx.loading.model_outputs import ModelOutputs
from graphflow.onnx.loading.reading.domains import normal_domain
from graphflow.onnx.loading.reading.model_checks import check_functions, check_names, check_opsets
from graphflow.onnx.loading.reading.reader import LIMIT, read, read_initializers
from graphflow.onnx.loading.reading.value_kinds import (
    Array,
    Fixed,
    Known,
    OnHost,
    Value,
    dtype_name,
    is_native,
)
from graphflow.onnx.loading.reading.value_kinds import onnx_dtype as dtype_of
from graphflow.onnx.loading.repeated_run import RepeatedRun
from graphflow.onnx.loading.segmented_program import ModelRun, SegmentedProgram
from graphflow.onnx.loading.translation.function_expansion import function_body, schema_with_body
from graphflow.onnx.loading.translation.operator_registry import handler_of
from graphflow.onnx.loading.translation.segments import ImportedSegment, OnnxBody, Stop, known_array
from graphflow.onnx.loading.translation.weights import find_named_constants, find_weights
from graphflow.sessions.session import DEADLINE, Session

NO_RANK = "it has no rank"


class Model:
    """An ONNX model as graphs.

    Attributes:
        inputs: a placeholder for each input of a dtype that tensors have.
        outputs: a tensor for each output.
        variables: the variables of weights, by name, also of later graphs if there are several.
        output_names, input_names: the names in the order of the file.
    """

    def __init__(
        self,
        file: str,
        inputs: Sequence[str],
        importer: Importer,
        body: OnnxBody,
        first: ImportedSegment,
    ) -> None:
        self.file = file
        self.input_names = tuple(inputs)
        self.output_names = body.outputs
        self.inputs: dict[str, Tensor] = first.inputs
        self.outputs = ModelOutputs(body.outputs, first, file)
        self.variables = importer.variables
        self._importer = importer
        self._program = SegmentedProgram(importer, body, first)
        self._given = first.given
        self._optional = {name for name in inputs if name in body.initializers}
        self._fixed = {name for name, value in first.given.items() if isinstance(value, Known)}
        self._session: Session | None = None
        self._repeated: RepeatedRun | None = None

    @property
    def session(self) -> Session:
        """The session in this process that `run` uses by default."""
        if self._session is None:
            self._session = Session()
            weakref.finalize(self, self._session.close)
        return self._session

    @property
    def whole(self) -> bool:
        """True if the model is one graph, without host nodes."""
        return self._program.whole

    def run(
        self,
        feeds: Mapping[str, Any] | Sequence[Any],
        session: Session | None = None,
        deadline: float = DEADLINE,
    ) -> dict[str, Any]:
        """Run the model, and return its outputs by name.

        Args:
            feeds: the inputs by name, or in the order of the file.
            session: default: the model's own session in this process.
            deadline: the time limit in seconds, checked between graphs and at each iteration on
                the host. Each graph also has the deadline of its session.

        Raises:
            FeedError: an input is missing, unknown, or of another dtype or shape.
            OnnxError: the deadline is not a positive number.
            OpError: a node fails.
            StepTimeout: the deadline has passed.
        """
        if not (isinstance(deadline, int | float) and deadline > 0):
            raise OnnxError(
                f"{self.file} at {user_location()}: a deadline is a number of seconds above 0, "
                f"not {deadline!r}"
            )
        session = session or self.session
        if self._repeated is not None:
            found = self._repeated.run(feeds, session)
            if found is not None:
                return found
        values = self._values(feeds)
        results = self._program.run(ModelRun(self._importer, session, deadline), values)
        self._repeated = self._program.repeated_run(values)
        return dict(zip(self.output_names, results, strict=True))

    def _values(self, feeds: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        if not isinstance(feeds, Mapping):
            required = [n for n in self.input_names if n not in self._optional | self._fixed]
            names = self.input_names if len(feeds) > len(required) else required
            if len(feeds) != len(names):
                raise FeedError(
                    f"{self.file} at {user_location()}: takes {len(names)} inputs "
                    f"({', '.join(names)}), {len(feeds)} are given"
                )
            feeds = dict(zip(names, feeds, strict=True))
        unknown = [str(n) for n in feeds if n not in self.input_names or n in self._fixed]
        missing = [
            n for n in self.input_names if n not in feeds and n not in self._optional | self._fixed
        ]
        if unknown or missing:
            problems = [
                f"{n!r} has its value from load(values=…)" if n in self._fixed
                else f"no input {n!r}" for n in unknown
            ]  # fmt: skip
            problems += [f"{n!r} is missing" for n in missing]
            raise FeedError(
                f"{self.file} at {user_location()}: {', '.join(problems)}; its inputs are "
                f"{', '.join(self.input_names)}"
            )
        values = {name: self._value(name, value) for name, value in feeds.items()}
        self._check_shared(values)
        return values

    def _check_shared(self, values: Mapping[str, Any]) -> None:
        """Check that inputs agree on the symbolic sizes that they share."""
        seen: dict[Any, tuple[int, str]] = {}
        for name, value in values.items():
            given = self._given.get(name)
            if not isinstance(given, Tensor):
                continue
            for size, have in zip(given.shape, np.shape(value), strict=True):
                first = seen.setdefault(size, (have, name))
                if isinstance(size, Dim) and first[0] != have:
                    raise FeedError(
                        f"{self.file} at {user_location()}: size {size} is {first[0]} in "
                        f"{first[1]!r} and {have} in {name!r}; give both the same"
                    )

    def _value(self, name: str, value: Any) -> Any:
        given = self._given.get(name)
        if not isinstance(given, Tensor):
            return value
        try:
            array = array_of(value)
        except NoArrayError as error:
            raise FeedError(
                f"{self.file} at {user_location()}: input {name!r} is given {error}"
            ) from None
        if array.dtype != given.dtype:
            if not np.can_cast(array.dtype, given.dtype, "same_kind"):
                raise FeedError(
                    f"{self.file} at {user_location()}: input {name!r} is {given.dtype}, the given "
                    f"value {array.dtype}; convert it with .astype({given.dtype.name!r})"
                )
            array = array.astype(given.dtype)
        sizes = given.shape
        if array.ndim != len(sizes) or any(
            isinstance(want, int) and want != have
            for want, have in zip(sizes, array.shape, strict=True)
        ):
            raise FeedError(
                f"{self.file} at {user_location()}: input {name!r} has shape {sizes}, the given "
                f"value {array.shape}; load(shapes=…) changes what a model takes"
            )
        return array

    def __repr__(self) -> str:
        takes = ", ".join(n for n in self.input_names if n not in self._optional)
        gives = ", ".join(self.output_names)
        return f"<Model {self.file}: {takes} -> {gives}; {len(self.variables)} variables>"


@checks_argument_names(OnnxError)
@passes_interrupts
def load(
    source: Any,
    *,
    shapes: Mapping[str, Sequence[Any]] | None = None,
    values: Mapping[str, Any] | None = None,
    variables: Sequence[str] = (),
    trainable: bool = True,
    limit: int = LIMIT,
) -> Model:
    """Load an ONNX model from a path, from bytes, or from a `ModelProto`.

    Args:
        shapes: shapes of inputs, which replace those in the file: `{"data": (None, 3, 224, 224)}`.
        values: values of inputs that decide shapes; these inputs become constants.
        variables: names of further weights: float initializers that look like constants (such as
            single numbers), and outputs of Constant nodes.
        trainable: whether `minimize` updates the model's variables.
        limit: the largest file to parse, in bytes.

    Raises:
        OnnxError: the file is broken, too large, or inconsistent.
        UnsupportedOnnxError: nodes have no translation; the message lists them all.
    """
    model, large, file, folder = read(source, limit)
    opsets = _check_model(model, file)
    functions = {
        (normal_domain(f.domain), f.name): function_body(f, opsets) for f in model.functions
    }
    arrays = read_initializers(model.graph, file, folder, large)
    nodes = list(model.graph.node)
    arrays.update(find_named_constants(variables, nodes, arrays, file))
    chosen = {**find_weights(nodes, arrays, functions), **dict.fromkeys(variables, True)}
    body = OnnxBody(
        nodes,
        tuple(i.name for i in model.graph.input),
        tuple(o.name for o in model.graph.output),
        opsets,
        {n: _initializer_value(array, n if n in chosen else None) for n, array in arrays.items()},
        main=True,
    )
    importer = Importer(
        file, folder, functions, {n: trainable and t for n, t in chosen.items()}, start_run=ModelRun
    )
    inputs = [i.name for i in model.graph.input if i.name not in arrays]
    inputs += [i.name for i in model.graph.input if i.name in arrays]
    given = _input_values(model.graph, arrays, shapes or {}, values or {}, file)
    unranked = [n for n, value in given.items() if value == OnHost(NO_RANK)]
    if unranked:
        stop = Stop("rank", 0, f"inputs without a rank: {', '.join(unranked)}")
        first = ImportedSegment(0, {}, {}, stop, given)
    else:
        first = importer.read_segment(body, 0, given)
    if first.stop is not None:  # make the variables that only later graphs read
        for value in body.initializers.values():
            if isinstance(value, Known) and value.parameter is not None:
                importer.weight_variable(value)
    return Model(file, inputs, importer, body, first)


def _check_model(model: ModelProto, file: str) -> dict[str, int]:
    """Check a model, and return its opsets."""
    opsets = check_opsets(model, file)
    check_functions(model, file)
    check_names(model.graph, file)
    _check_operators(model, opsets, file)
    return opsets


def _initializer_value(array: Array, parameter: str | None) -> Value:
    return known_array(array, parameter) if is_native(array.dtype) else Fixed(array)


def _check_operators(model: ModelProto, opsets: Mapping[str, int], file: str) -> None:
    """Raise UnsupportedOnnxError, which lists all nodes without a translation."""
    functions = {(normal_domain(f.domain), f.name) for f in model.functions}
    wrong: list[str] = []
    graphs: list[tuple[Sequence[Any], Mapping[str, int]]] = [(model.graph.node, opsets)]
    for function in model.functions:
        imported = {normal_domain(o.domain): o.version for o in function.opset_import}
        graphs.append((function.node, {**opsets, **imported}))
    while graphs:
        nodes, versions = graphs.pop()
        for index, node in enumerate(nodes):
            key = (normal_domain(node.domain), node.op_type)
            version = versions.get(key[0], 1)
            if key not in functions and not _is_supported(*key, version):
                wrong.append(
                    f"  {'.'.join(p for p in key if p)} (opset {version}), node {index + 1} "
                    f"{node.name!r}"
                )
            graphs += [(a.g.node, versions) for a in node.attribute if a.HasField("g")]
    if wrong:
        raise UnsupportedOnnxError(
            f"{file}: {len(wrong)} nodes have no translation; docs/models/onnx.md lists what has:\n"
            + "\n".join(wrong)
        )


def _is_supported(domain: str, name: str, version: int) -> bool:
    if handler_of(domain, name, version) is not None or host.can_run_on_host(domain, name):
        return True
    return schema_with_body(domain, name, version) is not None


def operators_known() -> dict[str, list[str]]:
    """Return the operators of the installed onnx that can be loaded, by domain."""
    known: dict[str, set[str]] = {}
    for schema in defs.get_all_schemas():
        domain = normal_domain(schema.domain)
        if _is_supported(domain, schema.name, schema.since_version):
            known.setdefault(domain, set()).add(schema.name)
    return {domain or "ai.onnx": sorted(names) for domain, names in sorted(known.items())}


def _input_values(
    graph: GraphProto,
    arrays: Mapping[str, Array],
    shapes: Mapping[str, Sequence[Any]],
    values: Mapping[str, Any],
    file: str,
) -> dict[str, Value]:
    """Return the value of each input: a placeholder, a given value, or one for the host."""
    for what, option in (("shapes", shapes), ("values", values)):
        if not isinstance(option, Mapping):
            raise OnnxError(f"load at {user_location()}: {what} are {{input: …}}, not {option!r}")
    names = [i.name for i in graph.input]
    for name in (*shapes, *values):
        if name not in names:
            raise OnnxError(f"{file} has no input {name!r}; its inputs are {', '.join(names)}")
    given: dict[str, Value] = {}
    for info in graph.input:
        if info.name in values:
            given[info.name] = _fixed_input(info, values[info.name], file)
        elif info.name not in arrays:
            given[info.name] = _input_value(info, shapes.get(info.name), file)
    return given


def _fixed_input(info: ValueInfoProto, value: Any, file: str) -> Known:
    """Convert the given value of an input to a known value of the input's dtype."""
    dtype = dtype_of(info.type.tensor_type.elem_type)
    try:
        array = array_of(value)
    except NoArrayError as error:
        raise OnnxError(
            f"{file} at {user_location()}: input {info.name!r} is given {error}"
        ) from None
    if dtype is None or not is_native(dtype) or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise OnnxError(
            f"{file} at {user_location()}: input {info.name!r} takes {dtype or 'no arrays'}, the "
            f"given value is {array.dtype}"
        )
    return Known(array.astype(dtype), dtype)


def _input_value(info: ValueInfoProto, shape: Sequence[Any] | None, file: str) -> Value:
    kind: TypeProto = info.type
    if not kind.HasField("tensor_type"):
        return OnHost(f"input {info.name!r} is not a tensor")
    code = kind.tensor_type.elem_type
    dtype = dtype_of(code)
    if dtype is None or not is_native(dtype):
        return OnHost(f"input {info.name!r} is of {dtype_name(code)}, which no tensor holds")
    if shape is None:
        if not kind.tensor_type.HasField("shape"):
            return OnHost(NO_RANK)
        shape = [_declared_size(dim) for dim in kind.tensor_type.shape.dim]
    elif not isinstance(shape, list | tuple) or (
        kind.tensor_type.HasField("shape") and len(shape) != len(kind.tensor_type.shape.dim)
    ):
        raise OnnxError(
            f"{file} at {user_location()}: input {info.name!r} has rank "
            f"{len(kind.tensor_type.shape.dim)}; {shape!r} are not so many sizes"
        )
    return placeholder(dtype, tuple(shape), name=info.name or None)


def _declared_size(dim: Any) -> Any:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    name = dim.dim_param
    return name if name.isidentifier() else None


__all__ = ["Model", "ModelOutputs", "host_control", "host_values", "load", "operators"]
