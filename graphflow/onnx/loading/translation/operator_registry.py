"""The registry of ONNX operators: functions that translate an operator to nodes, by opset version.

How to add an operator: write one function in its family's file in `graphflow/onnx/operators/`

    @operator("Softmax", since=13)
    def softmax_13(call: Call) -> Outputs:
        return softmax(call.tensor(0), axis=call.attr("axis", -1))

- `since` is the opset that introduced this meaning of the operator. A model's opset selects the
  newest entry that is not newer than itself. Write entries for older opsets only if they differ.
- `call.tensor(i)` is an input as a tensor (`call.optional(i)`: None if it is left out), and
  `call.tensors()` are all inputs. `call.attr(name, default)` is an attribute.
- Read an input that decides shapes with `call.known_array(i)` (an array of numbers) or
  `call.sizes(i)` (a list of sizes, which may be symbolic). If the value is not known yet, the call
  raises a signal. The importer specialises the model by the value, and calls the function again.
- Return a tensor, or a list of them (None for outputs that nothing reads; see `call.wants(i)`).
- Raise `call.unsupported_error("what, and what instead")` for a use that has no translation.
- Operators whose output is no tensor, or whose shape depends on data, belong to `host_nodes.py`.
- An operator without an entry is expanded if ONNX's schema has a function body for it.
- A new file is imported in the `__init__.py` of its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.ir.op import Tensor
from graphflow.onnx.loading.reading.domains import normal_domain
from graphflow.onnx.loading.reading.value_kinds import Known
from graphflow.onnx.loading.translation.node_call import NodeCall

Output = Tensor | Known | Any
Outputs = Output | Sequence[Output | None]
Handler = Callable[[NodeCall], Outputs]

_HANDLERS: dict[tuple[str, str], list[tuple[int, Handler]]] = {}


def operator(*names: str, since: int = 1, domain: str = "") -> Callable[[Handler], Handler]:
    """Register a function that translates operators, from opset `since` on."""

    def enter(handler: Handler) -> Handler:
        for name in names:
            versions = _HANDLERS.setdefault((domain, name), [])
            versions.append((since, handler))
            versions.sort(key=lambda version: version[0])
        return handler

    return enter


def handler_of(domain: str, name: str, version: int) -> Handler | None:
    """Return the translation of an operator under an opset; None if there is none."""
    found: Handler | None = None
    for since, handler in _HANDLERS.get((normal_domain(domain), name), ()):
        if since <= version:
            found = handler
    return found
