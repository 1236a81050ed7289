"""The example that brings a network, run as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx

from tests.onnx.models import perceptron

EXAMPLE = Path(__file__).parents[2] / "examples/bring_a_network.py"


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=EXAMPLE.parents[1],
    )  # fmt: skip


def test_it_runs_a_network_on_one_worker_and_two(tmp_path: Path) -> None:
    path = tmp_path / "perceptron.onnx"
    onnx.save(perceptron(), path)
    result = ran(str(path), "--runs", "1")
    assert result.returncode == 0, result.stderr
    assert "bit-equal" in result.stdout and "predicted" in result.stdout
    assert "relative to ONNX's reference" in result.stdout


def test_it_says_in_a_line_what_it_cannot_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"  # tests/examples tries one that is missing
    broken.write_bytes(b"not a model")
    result = ran(str(broken))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr and broken.name in result.stderr
