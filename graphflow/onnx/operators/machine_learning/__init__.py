"""Operators of `ai.onnx.ml`: features, linear models, support vector machines and trees."""

from graphflow.onnx.operators.machine_learning import features, svm, trees

__all__ = ["features", "svm", "trees"]
