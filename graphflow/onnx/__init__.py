"""ONNX models in and out: `m = gf.onnx.load("model.onnx")`, `gf.onnx.save("model.onnx", outputs)`.

Needs the extra `graphflow[onnx]`; `import graphflow` does not load it.
"""

from __future__ import annotations

from graphflow.errors import OnnxError

try:
    import onnx as _onnx
except ImportError as error:
    raise OnnxError(
        f"gf.onnx needs the package onnx ({error}); install it: pip install 'graphflow[onnx]'"
    ) from error

from graphflow.onnx.model import Model, load

__all__ = ["Model", "load"]
