"""Kernel warm-up: a program's kernels run once on zeros, ahead of the program's first step.

Convolutions, pooling, attention and others compile machine code when they first run. The program
itself does not run: no loop, no op with a side effect, no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from graphflow.ir.graph import bind_attrs
from graphflow.ir.op import Node
from graphflow.ir.spec import TensorSpec
from graphflow.runtime.program.code_generator import CpuCode
from graphflow.runtime.program.generated_call_support import out_kernel


def warm_up_kernels(code: CpuCode) -> None:
    """Run each distinct plain kernel of a program and its bodies once."""
    done: set[str] = set()
    for part, node in _plain_kernels(code):
        inputs = [part.layout.specs[t] for t in node.inputs]
        attrs = bind_attrs(node.attrs, part.bindings)
        key = f"{node.op.name} {inputs} {sorted(attrs.items(), key=str)}"
        if key in done:
            continue
        done.add(key)
        kernel = out_kernel(node.op, np, inputs, attrs, part.plain)
        outs = tuple(_zeros(part.layout.specs[t]) for t in node.outputs)
        try:
            kernel(outs if len(outs) > 1 else outs[0], *map(_zeros, inputs))
        except Exception:  # a kernel may refuse zeros: a singular matrix
            continue


def _plain_kernels(code: CpuCode) -> Iterator[tuple[CpuCode, Node]]:
    for node in code.plain_kernel_nodes:
        if node.op.pure and not node.op.random and (node.op.into or node.op.kernel):
            yield code, node
    for body in code.body_codes:
        yield from _plain_kernels(body)


def _zeros(spec: TensorSpec) -> np.ndarray[Any, Any]:
    """Return zeros of a spec, whose sizes are numbers."""
    return np.zeros(spec.shape, spec.dtype)
