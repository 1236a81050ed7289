"""`graphflow doctor`: a healthy machine passes, and each broken part is named with its remedy."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from graphflow.cli import machine_checks
from graphflow.cli.machine_checks import CHECKS, FAILURE, OK, WARNING, Finding
from graphflow.cli.main import main
from graphflow.ops.kernels.jit import amx_permission


def find(check: str) -> list[Finding]:
    return list(dict(CHECKS)[check]())


def test_a_machine_that_runs_these_tests_has_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {each["check"] for each in findings} == {name for name, _ in CHECKS} | {"calibration"}
    assert all(each["state"] in (OK, WARNING) for each in findings)
    assert all(each["remedy"] for each in findings if each["state"] == WARNING)


def _fail(*arguments: Any, **options: Any) -> NoReturn:
    raise OSError(13, "Permission denied")


def _few_files(patch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY
    limits = {resource.RLIMIT_NOFILE: (256, 8192), resource.RLIMIT_AS: (unlimited, unlimited)}
    patch.setattr(resource, "getrlimit", limits.__getitem__)


def _switch_amx_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(amx_permission, "describe_obstacle", lambda: None)
    patch.setenv("GRAPHFLOW_AMX", "off")


def _little_address_space(patch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (9999, 9999), resource.RLIMIT_AS: (1 << 30, 1 << 30)}
    patch.setattr(resource, "getrlimit", limits.__getitem__)


@pytest.mark.parametrize(
    ("check", "breaks", "state", "text", "remedy"),
    [
        ("environment", lambda p: p.setenv("GRAPHFLOW_JIT", "maybe"), FAILURE, "maybe", "unset"),
        ("environment", lambda p: p.setenv("GRAPHFLOW_DEVICES", "gup"), FAILURE, "no 'gup'",
         "correct"),
        ("environment", lambda p: p.setenv("GRAPHFLOW_DEVICE", "cpu"), WARNING,
         "reads no GRAPHFLOW_DEVICE", "'GRAPHFLOW_DEVICES'"),
        ("BLAS", lambda p: p.setenv("OPENBLAS_CORETYPE", "Prescott"), WARNING, "Prescott", "unset"),
        ("LLVM", lambda p: p.setenv("GRAPHFLOW_JIT", "off"), WARNING, "numpy computes", "unset"),
        ("AMX", _switch_amx_off, WARNING, "computed in float32", "unset GRAPHFLOW_AMX"),
        ("shared memory", lambda p: p.setattr(os, "memfd_create", _fail), WARNING,
         "Permission denied", "seccomp"),
        ("shared memory", lambda p: p.setenv("GRAPHFLOW_SHARED_MEMORY", "off"), WARNING,
         "sockets", "unset"),
        ("ports", lambda p: p.setattr(socket, "create_server", _fail), FAILURE,
         "Permission denied", "loopback"),
        ("cache", lambda p: p.setenv("GRAPHFLOW_CACHE", "/proc/none"), WARNING,
         "cannot be written", "GRAPHFLOW_CACHE"),
        ("clock", lambda p: p.setattr(machine_checks, "_SLOW_CLOCK", 0.0), WARNING,
         "slower", "tsc"),
        ("ulimit", _few_files, WARNING, "256 open files", "ulimit -n 4096"),
        ("ulimit", _little_address_space, WARNING, "1 GiB of address space", "unlimited"),
        ("processor", lambda p: p.setattr(machine_checks, "_LOW_MEMORY", 1 << 60), WARNING,
         "of memory", "cgroup"),
        ("versions", lambda p: p.setattr("sys.platform", "win32"), FAILURE, "graphflow", "WSL2"),
    ],
)  # fmt: skip
def test_a_broken_part_is_named_with_its_remedy(
    check: str,
    breaks: Callable[[pytest.MonkeyPatch], None],
    state: str,
    text: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(each.state == OK for each in find(check))
    breaks(monkeypatch)
    finding = find(check)[0]
    assert finding.state == state
    assert text in finding.text and remedy in finding.remedy


def test_a_key_that_others_can_read_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHFLOW_KEYS", str(tmp_path))
    main(["keys", "new", "box1", "--role", "worker"])
    assert find("keys")[0].state == OK
    (tmp_path / "box1.secret").chmod(0o644)
    assert "can be read by others" in find("keys")[0].text
    monkeypatch.setattr("graphflow.cli.doctor.run_checks", lambda: find("keys"))
    capsys.readouterr()
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "✗ keys" in told and "→ see docs/deployment/security.md" in told
    assert "1 to fix" in told


def test_cores_of_several_numa_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "graphflow.placement.clusters.machine.host_facts.numa_nodes", lambda: ((0, 1), (2, 3))
    )
    assert "in 2 NUMA nodes" in find("processor")[0].text


def test_a_check_that_raises_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "CHECKS", (("one", _fail), ("two", dict(CHECKS)["clock"])))
    first, second = machine_checks.run_checks()
    assert (first.check, first.state) == ("one", FAILURE) and "Permission denied" in first.text
    assert second.check == "clock"


def test_a_pause_of_the_process_does_not_make_the_clock_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, readings = time.monotonic_ns, 0

    def pause_once() -> int:
        nonlocal readings
        readings += 1
        return read() + (10**9 if readings == 2 else 0)

    monkeypatch.setattr(time, "monotonic_ns", pause_once)
    assert find("clock")[0].state == OK and readings > 2
