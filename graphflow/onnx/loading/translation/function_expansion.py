"""Expansion of operators that are functions of other operators.

A model may define functions. An operator without a translation is expanded by the function body in
ONNX's schema, if it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import (
    IR_VERSION,
    AttributeProto,
    FunctionProto,
    NodeProto,
    TypeProto,
    checker,
    defs,
    helper,
)

from graphflow.errors import OnnxError
from graphflow.ir.op import Tensor
from graphflow.onnx.loading.reading.domains import normal_domain
from graphflow.onnx.loading.reading.value_kinds import Known, Value
from graphflow.onnx.loading.translation.node_call import ImportContext, NodeCall
from graphflow.onnx.loading.translation.segments import OnnxBody


def inline_function(importer: ImportContext, body: OnnxBody, call: NodeCall) -> list[Value | None]:
    """Translate the body of a function in place of a call of it."""
    nodes = with_attributes(body, call.proto)
    bound = OnnxBody(nodes, body.inputs, body.outputs, body.opsets, body.initializers)
    return importer.inline(bound, call.values, None, call.index)


def with_attributes(body: OnnxBody, node: NodeProto) -> list[NodeProto]:
    """Return a function's nodes, with references to attributes replaced by those of a call."""
    given = {attribute.name: attribute for attribute in node.attribute}
    return [_fill_attributes(n, {**body.defaults, **given}) for n in body.nodes]


def _fill_attributes(node: NodeProto, given: dict[str, AttributeProto]) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            source = given.get(attribute.ref_attr_name)
            if source is None:
                continue
            added = copy.attribute.add()
            added.CopyFrom(source)
            added.name = attribute.name
            continue
        added = copy.attribute.add()
        added.CopyFrom(attribute)
        if attribute.type == AttributeProto.GRAPH:
            inner = [_fill_attributes(n, given) for n in attribute.g.node]
            del added.g.node[:]
            added.g.node.extend(inner)
    return copy


def function_body(
    function: FunctionProto,
    opsets: Mapping[str, int] | None = None,
    defaults: Mapping[str, AttributeProto] | None = None,
) -> OnnxBody:
    """Convert a FunctionProto to a body."""
    imported = {normal_domain(o.domain): o.version for o in function.opset_import}
    return OnnxBody(
        list(function.node),
        tuple(function.input),
        tuple(function.output),
        {**(opsets or {}), **imported},
        defaults={**(defaults or {}), **{a.name: a for a in function.attribute_proto}},
    )


def schema_with_body(domain: str, name: str, version: int) -> Any:
    """Return ONNX's schema of an operator if it has a function body, else None."""
    try:  # the type stubs of onnx lack has_function
        schema: Any = defs.get_schema(name, version, domain)
    except defs.SchemaError:
        return None
    return schema if schema.has_function or schema.has_context_dependent_function else None


def schema_body(call: NodeCall, plain: bool) -> OnnxBody | None:
    """Return the function body in ONNX's schema for a call; None if there is none.

    Args:
        plain: all inputs are tensors or known, as bodies need that depend on types of inputs.
    """
    domain = normal_domain(call.proto.domain)
    schema = schema_with_body(domain, call.op_type, call.version)
    if schema is None:
        return None
    function = FunctionProto()
    if schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= call.scope.opsets.get("", 1)]
        content = schema.get_function_with_opset_version(max(versions)) if versions else b""
    elif plain:
        content = _context_dependent_body(schema, call)
    else:
        content = b""
    if not content:
        return None
    function.ParseFromString(content)
    attributes = {
        name: attribute.default_value
        for name, attribute in schema.attributes.items()
        if attribute.default_value.type != AttributeProto.UNDEFINED
    }
    return function_body(function, call.scope.opsets, attributes)


def _context_dependent_body(schema: Any, call: NodeCall) -> bytes:
    """Return the serialized function whose body depends on types of inputs and on attributes."""
    versions = [
        v
        for v in schema.context_dependent_function_opset_versions
        if v <= call.scope.opsets.get("", 1)
    ]
    if not versions:
        return b""
    if not schema.min_input <= len(call.values) <= schema.max_input:
        raise OnnxError(f"{call.label}: {len(call.values)} inputs; it takes {schema.min_input} up")
    types = [_type_of(value).SerializeToString() for value in call.values]
    try:
        checker.check_node(call.proto, _context(call))  # onnx builds the body without checks
        content: bytes = schema.get_context_dependent_function_with_opset_version(
            max(versions), call.proto.SerializeToString(), types
        )
    except Exception as error:  # onnx raises errors of many types for invalid nodes
        raise OnnxError(f"{call.label}: {error}") from None
    return content


def _context(call: NodeCall) -> checker.C.CheckerContext:
    context = checker.C.CheckerContext()
    context.ir_version = IR_VERSION
    context.opset_imports = dict(call.scope.opsets)
    return context


def _type_of(value: Value | None) -> TypeProto:
    """Return ONNX's type of a value; an empty one if it is not known."""
    if isinstance(value, Known):
        return helper.make_tensor_type_proto(
            helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
    if isinstance(value, Tensor):
        shape = [size if isinstance(size, int) else None for size in value.shape]
        return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), shape)
    return TypeProto()


__all__ = ["function_body", "inline_function", "schema_body", "with_attributes"]
