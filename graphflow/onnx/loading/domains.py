"""Domains of ONNX operators."""

from __future__ import annotations

ML = "ai.onnx.ml"
TRAINING = "ai.onnx.preview.training"


def normal_domain(domain: str) -> str:
    """The default domain has two names."""
    return "" if domain == "ai.onnx" else domain
