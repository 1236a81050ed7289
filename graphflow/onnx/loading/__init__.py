"""ONNX models to graphs: read, check, fold shapes, import node by node."""
