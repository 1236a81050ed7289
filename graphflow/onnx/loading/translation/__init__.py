"""Translate ONNX nodes: their inputs and attributes, the operators by version, what is folded."""
