"""Control flow: branches and loops whose way is known are read into the graph."""

from __future__ import annotations

from graphflow.onnx.call import Call, RunOnHost
from graphflow.onnx.registry import Outputs, operator


@operator("If")
def _if(call: Call) -> Outputs:
    """The branch that a known condition takes; else the model is specialised by the condition."""
    taken = bool(call.known(0).reshape(-1)[0])
    return call.inline("then_branch" if taken else "else_branch", [])


@operator("Scan")
def _scan(call: Call) -> Outputs:
    raise RunOnHost("Scan: its body is run as a model of its own, once per step")
