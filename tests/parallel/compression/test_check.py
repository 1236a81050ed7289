"""check_filter says what is wrong with a user's filter, with numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.spec import TensorSpec

check, Filter = gf.parallel.check_filter, gf.parallel.Filter
CALLS = itertools.count()


@dataclass(frozen=True)
class Sign(Filter):
    """The signs of the numbers, and their mean magnitude."""

    feedback: bool = True

    def encode(self, tensor: gf.Tensor, state: Any) -> Any:
        return ((tensor > 0).astype("int8"), gf.mean(abs(tensor))), state

    def decode(self, parts: Any, spec: TensorSpec) -> gf.Tensor:
        signs, scale = parts
        return (signs.astype(spec.dtype) * 2 - 1) * scale


@dataclass(frozen=True)
class Half(Filter):
    """The numbers in 16 bits: a base for filters that do one thing wrong."""

    def encode(self, tensor: gf.Tensor, state: Any) -> Any:
        return (tensor.astype("float16"),), state

    def decode(self, parts: Any, spec: TensorSpec) -> gf.Tensor:
        return parts[0].astype(spec.dtype)


@dataclass(frozen=True)
class RandomSkip(Half):
    """Some numbers, chosen at random."""

    keep: float
    rescale: bool
    feedback: bool

    def encode(self, tensor: gf.Tensor, state: Any) -> Any:
        chosen = gf.random.bernoulli(self.keep, tensor.shape)
        scaled = tensor / self.keep if self.rescale else tensor
        return super().encode(gf.where(chosen, scaled, 0.0), state)


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (gf.parallel.FixedPoint(4), (7, 3)),
        (gf.parallel.FixedPoint(8), (64, 32)),
        (gf.parallel.TopK(0.01), (64, 32)),
        (gf.parallel.PowerSGD(2), (64, 8, 4)),
        (Sign(), (64, 32)),
        (Half(), (64, 32)),
        (RandomSkip(0.25, rescale=False, feedback=True), (64, 32)),
        (RandomSkip(0.25, rescale=True, feedback=False), (64, 32)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("replicas", [2, 3])
def test_sound_filters_pass(rule: Filter, shape: tuple[int, ...], replicas: int) -> None:
    found = check(rule, shape, replicas=replicas)
    assert found.ratio < 0.8 and found.lost >= 0
    assert f"{replicas} replicas: each receives" in str(found) and f"{found.ratio:.2%}" in str(
        found
    )


def test_feedback_with_rescaling_explodes_and_is_refused() -> None:
    with pytest.raises(gf.errors.ArgumentError, match=r"keeps [23]\.\d+ .* residual grows"):
        check(RandomSkip(0.25, rescale=True, feedback=True), rounds=20)


@pytest.mark.parametrize(
    "rule",
    [
        gf.parallel.TopK(0.01, feedback=False),
        Sign(feedback=False),
        RandomSkip(0.5, rescale=False, feedback=False),
    ],
    ids=repr,
)
def test_a_bias_without_feedback_is_refused(rule: Filter) -> None:
    with pytest.raises(gf.errors.ArgumentError, match=r"it is off by 0\.\d+ of its norm"):
        check(rule)


class Cut(Half):
    """Loses all rows but the first."""

    def encode(self, tensor: gf.Tensor, state: Any) -> Any:
        return super().encode(tensor[0], state)


class Widened(Half):
    """Gives another dtype back."""

    def decode(self, parts: Any, spec: TensorSpec) -> gf.Tensor:
        return parts[0].astype("float64")


class Unscaled(Half):
    """Divides by the largest magnitude, 0 included."""

    def encode(self, tensor: gf.Tensor, state: Any) -> Any:
        scale = gf.max(abs(tensor))
        return ((tensor / scale).astype("float16"), scale), state

    def decode(self, parts: Any, spec: TensorSpec) -> gf.Tensor:
        return super().decode(parts, spec) * parts[1]


class Clock(Half):
    """Adds what no step determines."""

    def encode(self, tensor: gf.Tensor, state: Any) -> Any:
        noise = gf.host_call(_noise, spec=gf.spec("float32", ()))
        return super().encode(tensor + noise.astype(tensor.dtype), state)


def _noise() -> Any:
    return np.float32(1e-3 * next(CALLS))


class Plain(Half):
    """Sends everything as it is."""

    def encode(self, tensor: gf.Tensor, state: Any) -> Any:
        return (tensor, tensor), state

    def decode(self, parts: Any, spec: TensorSpec) -> gf.Tensor:
        return parts[0]


class Forgetful(Half):
    """Has a state, and returns none."""

    def initial(self, spec: TensorSpec) -> Any:
        return (np.zeros(3, "float32"),)

    def encode(self, tensor: gf.Tensor, state: Any) -> Any:
        return super().encode(tensor, ())


class Growing(Half):
    """Sends as many parts as there are numbers that are not 0."""

    def encode(self, tensor: gf.Tensor, state: Any) -> Any:
        count = gf.placeholder("float16", (None,))
        return (tensor.astype("float16"), count), state


class Silent(Filter):
    """Lacks encode."""


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Cut(), r"the sum must have the specs \(float32\(64, 32\)\), not \(float32\(32,?\)\)"),
        (Widened(), "not .float64"),
        (Unscaled(), "zeros give numbers that are not finite"),
        (Clock(), "other bits when they are exchanged again"),
        (Plain(), "saves nothing: a replica receives 16,384 bytes with it and 8,192 without"),
        (Forgetful(), r"the next state must have the specs \(float32\(3,?\)\), not \(\)"),
        (Growing(), "must have sizes that are known before a step runs"),
        (Silent(), "Silent has no encode"),
        (Half, "must be a gf.parallel.Filter"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_a_wrong_filter_is_told_what_is_wrong(rule: Any, text: str) -> None:
    with pytest.raises(gf.errors.ArgumentError, match=text) as caught:
        check(rule)
    assert "check_filter at " in str(caught.value) and "test_check.py:" in str(caught.value)


def test_shapes_to_which_a_filter_does_not_apply_are_refused() -> None:
    with pytest.raises(gf.errors.ArgumentError, match="does not apply to float32"):
        check(gf.parallel.PowerSGD(4), (100,))


@pytest.mark.parametrize(("replicas", "rounds"), [(1, 9), (2, 1), (2.0, 9)])
def test_counts_are_checked(replicas: Any, rounds: Any) -> None:
    with pytest.raises(gf.errors.ArgumentError, match="must be an int from 2 to"):
        check(Half(), replicas=replicas, rounds=rounds)
