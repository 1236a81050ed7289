"""Domains of ONNX operators."""

from __future__ import annotations

ML = "ai.onnx.ml"
TRAINING = "ai.onnx.preview.training"


def normal_domain(domain: str) -> str:
    """Return the domain's name in our tables: the default domain has two, "" and "ai.onnx"."""
    return "" if domain == "ai.onnx" else domain
