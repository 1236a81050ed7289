"""The registry of ONNX operators: op type and version -> how it becomes nodes of a graph.

How to add an operator: write one function in its family's file in `graphflow/onnx/operators/`

    @operator("Softmax", since=13)
    def softmax_13(call: Call) -> Outputs:
        return softmax(call.tensor(0), axis=call.attr("axis", -1))

- `since` is the opset in which this meaning of the operator began; a model's opset chooses the
  newest one that is not newer than itself. Write older ones only where they differ.
- `call.tensor(i)` is an input as a tensor (`call.optional(i)`: None where it is left out);
  `call.tensors()` are all of them. `call.attr(name, default)` is an attribute.
- An input that decides shapes is read with `call.known(i)` (an array of plain numbers) or
  `call.sizes(i)` (a list of sizes, which may be symbolic). If the value is not known yet, the
  model is specialised by it: the call does not return, and is made again when it is known.
- Return a tensor, or a list of them (None for outputs that nobody reads; see `call.wants(i)`).
- Raise `call.unsupported("what, and what instead")` for what cannot be done.
- Operators whose output is no tensor, or has a shape that depends on data, stand in
  `host_nodes.py`.
- What has no entry here but a function body in ONNX's schema is expanded by that.
- A new file is imported in the `__init__.py` of its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.ir.op import Tensor
from graphflow.onnx.loading.domains import normal_domain
from graphflow.onnx.loading.node_call import NodeCall
from graphflow.onnx.loading.value_kinds import Known

Output = Tensor | Known | Any
Outputs = Output | Sequence[Output | None]
Handler = Callable[[NodeCall], Outputs]

_HANDLERS: dict[tuple[str, str], list[tuple[int, Handler]]] = {}


def operator(*names: str, since: int = 1, domain: str = "") -> Callable[[Handler], Handler]:
    """Register how operators are translated, from opset `since` on."""

    def enter(handler: Handler) -> Handler:
        for name in names:
            versions = _HANDLERS.setdefault((domain, name), [])
            versions.append((since, handler))
            versions.sort(key=lambda version: version[0])
        return handler

    return enter


def handler_of(domain: str, name: str, version: int) -> Handler | None:
    """The translation of an operator under an opset, if there is one."""
    found: Handler | None = None
    for since, handler in _HANDLERS.get((normal_domain(domain), name), ()):
        if since <= version:
            found = handler
    return found
