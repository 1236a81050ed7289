"""Ops, nodes and tensors, and the scopes in which they are built: what other folders import.

Applying an op makes a `Node`, which refers to its inputs and remembers the user's line; a node's
outputs are `Tensor`s, which carry Python's operators.
"""

from __future__ import annotations

from graphflow.base.argument_checks import validate_arguments
from graphflow.base.source_location import Location, error_location, user_location, with_location
from graphflow.ir.declarations.op_declaration import (
    Cost,
    Op,
    Rows,
    Sample,
    Sharding,
    WeightLayout,
    sample,
    set_elementwise_runner,
    set_float32_runner,
)
from graphflow.ir.declarations.registry import FUNCTIONS, REGISTRY, function, owner_module, register
from graphflow.ir.nodes.node import Node, Tensor, next_serial
from graphflow.ir.nodes.node_building import make_node
from graphflow.ir.nodes.scopes import (
    Autocast,
    NameScope,
    RandomStreams,
    autocast,
    current_prefix,
    current_scope,
    derivative_scope,
    device,
    name_scope,
    next_stream,
    origin_scope,
    prefix_of,
    prefix_scope,
    replacement_scope,
    seed_scope,
    source_scope,
)
from graphflow.ir.nodes.tensor_conversion import (
    DEFAULT_DTYPES,
    as_tensor,
    autocast_inputs,
    promote_inputs,
)

__all__ = [
    "DEFAULT_DTYPES", "FUNCTIONS", "REGISTRY", "Autocast", "Cost", "Location", "NameScope", "Node",
    "Op", "RandomStreams", "Rows", "Sample", "Sharding", "Tensor", "WeightLayout", "as_tensor",
    "autocast", "autocast_inputs", "validate_arguments", "current_prefix", "current_scope",
    "derivative_scope", "device", "function", "error_location", "make_node", "name_scope",
    "next_serial", "next_stream", "origin_scope", "owner_module", "prefix_of", "prefix_scope",
    "promote_inputs", "register", "replacement_scope", "sample", "seed_scope",
    "set_elementwise_runner", "set_float32_runner", "source_scope", "with_location",
    "user_location",
]  # fmt: skip
