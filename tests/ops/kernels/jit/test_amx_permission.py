"""AMX is used where the processor has it, Linux permits it and the user has not switched it off."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from graphflow.errors import ArgumentError
from graphflow.ops.kernels.jit import amx_permission
from graphflow.ops.kernels.jit.amx_permission import describe_obstacle, may_use_amx


class _Processor:
    """A compiler for a processor with some features."""

    def __init__(self, features: str) -> None:
        self.features = features


COMPLETE = "+amx-tile,+amx-bf16,+avx512bf16,+avx512bw"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A Linux machine whose processor has all features and whose kernel permits tiles."""
    monkeypatch.delenv("GRAPHFLOW_AMX", raising=False)
    monkeypatch.setattr(amx_permission, "compiler", lambda: _Processor(COMPLETE))
    monkeypatch.setattr(amx_permission, "is_x86", lambda: True)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(amx_permission, "_request_permission", lambda: 0)
    describe_obstacle.cache_clear()
    yield monkeypatch
    describe_obstacle.cache_clear()


def test_permission_is_asked_once(machine: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    machine.setattr(amx_permission, "_request_permission", lambda: asked.append(1) or 0)
    assert may_use_amx() and may_use_amx() and len(asked) == 1


@pytest.mark.parametrize("missing", COMPLETE.split(","))
def test_a_processor_without_a_feature_is_not_asked(
    missing: str, machine: pytest.MonkeyPatch
) -> None:
    features = COMPLETE.replace(missing, missing.replace("+", "-"))
    machine.setattr(amx_permission, "compiler", lambda: _Processor(features))
    machine.setattr(amx_permission, "_request_permission", lambda: pytest.fail("asked"))
    assert not may_use_amx() and missing[1:] in str(describe_obstacle())


def test_a_refusal_is_told(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(amx_permission, "_request_permission", lambda: errno.EPERM)
    assert not may_use_amx() and "refuses" in str(describe_obstacle())


def test_other_processors_have_none(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(amx_permission, "is_x86", lambda: False)
    assert not may_use_amx() and "no x86" in str(describe_obstacle())


def test_other_systems_give_no_permission(machine: pytest.MonkeyPatch) -> None:
    machine.setattr("sys.platform", "darwin")
    assert not may_use_amx() and "only Linux" in str(describe_obstacle())


def test_the_switch_is_read_at_each_call(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("GRAPHFLOW_AMX", "off")
    assert not may_use_amx()
    machine.setenv("GRAPHFLOW_AMX", "on")
    assert may_use_amx()
    machine.setenv("GRAPHFLOW_AMX", "never")
    with pytest.raises(ArgumentError, match="GRAPHFLOW_AMX"):
        may_use_amx()
