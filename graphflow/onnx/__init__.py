"""ONNX models in and out: `m = gf.onnx.load("model.onnx")`, `gf.onnx.save("model.onnx", outputs)`.

Needs the extra `graphflow[onnx]`; `import graphflow` does not load it.
"""

from __future__ import annotations

from importlib.util import find_spec

from graphflow.errors import OnnxError

if find_spec("onnx") is None:
    raise OnnxError("gf.onnx needs the package onnx; install it: pip install 'graphflow[onnx]'")

from graphflow.onnx.model import Model, load, operators_known
from graphflow.onnx.saving import writers, writers_index, writers_nn
from graphflow.onnx.saving.export import save

__all__ = ["Model", "load", "operators_known", "save", "writers", "writers_index", "writers_nn"]
