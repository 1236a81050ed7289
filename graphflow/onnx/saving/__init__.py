"""Graphs to ONNX models: one writer for each op."""
