"""The cases of onnx's backend suite that are not run, each with its reason; docs/models/onnx.md
publishes them."""

from __future__ import annotations

_RANDOM = "draws random numbers, and the standard names no generator"
_RUNNER = "the suite's comparison fails on scalars; tests/onnx/test_backend.py compares it"

EXCLUDED: dict[str, str] = {
    "test_bernoulli": _RANDOM,
    "test_bernoulli_double": _RANDOM,
    "test_bernoulli_seed": _RANDOM,
    "test_bernoulli_expanded": _RANDOM,
    "test_bernoulli_double_expanded": _RANDOM,
    "test_bernoulli_seed_expanded": _RANDOM,
    "test_training_dropout": _RANDOM,
    "test_training_dropout_mask": _RANDOM,
    "test_training_dropout_default": _RANDOM,
    "test_training_dropout_default_mask": _RANDOM,
    "test_loop16_seq_none": _RUNNER,
}
