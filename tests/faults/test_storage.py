"""What becomes of checkpoints when disks are full, and files are damaged, missing or another's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import CheckpointError
from tests.faults.running import Script

FULL = """
import os, subprocess, sys, time, numpy as np, graphflow as gf
folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], check=True)
with gf.device("/worker:0"):
    a = gf.variable(np.zeros(100_000, "float32"), name="a")  # 0.4 MB each
with gf.device("/worker:1"):
    b = gf.variable(np.zeros(100_000, "float32"), name="b")
step = [gf.assign(a, a + 1.0), gf.assign(b, b + a)]
with gf.Session(gf.Cluster.local(workers=2, threads=1), checkpoint=folder + "/c", every=1, keep=2) as s:
    for _ in range(3):
        s.run(step)
    print("fine", s.checkpoint_error, flush=True)
    ballast = os.open(folder + "/ballast", os.O_CREAT | os.O_WRONLY)
    try:
        while True:
            os.write(ballast, bytes(1 << 12))
    except OSError:
        os.close(ballast)
    for _ in range(5):
        s.run(step)
    until = time.monotonic() + 20
    while s.checkpoint_error is None and time.monotonic() < until:
        s.run(step); time.sleep(0.05)
    print("error", type(s.checkpoint_error).__name__, s.checkpoint_error, flush=True)
    count = s.step
    assert s.get(a)[0] == count, (s.get(a)[0], count)
    print("went on", count, flush=True)
    os.unlink(folder + "/ballast")
    s.run(step)
print("left", sorted(os.listdir(folder + "/c")), flush=True)
with gf.Session(gf.Cluster.here(threads=1), checkpoint=folder + "/c", every=1) as s:
    print("resumed", s.step, s.get(a)[0], flush=True)
"""  # noqa: E501


@pytest.mark.fault(36)
def test_a_full_disk_costs_a_checkpoint_and_neither_the_one_before_nor_the_training(
    script: Callable[..., Script], tmp_path: Path
) -> None:
    if not shutil.which("unshare") or not shutil.which("mount"):
        pytest.skip("unshare or mount is not installed")
    private = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-r"]
    if os.system(f"{' '.join(private)} mount -t tmpfs tmpfs {tmp_path} 2>/dev/null") != 0:
        pytest.skip("a small tmpfs cannot be mounted here")
    run = script(FULL, str(tmp_path), inside=private)
    assert run.line("fine") == "fine None"
    error = run.line("error")
    assert error.startswith("error CheckpointError") and "No space left" in error, error
    run.line("went on")
    resumed = run.line("resumed").split()
    assert float(resumed[1]) == float(resumed[2]) >= 3.0
    assert run.wait() == 0, run.told()


def trained(folder: Path, steps: int, width: int = 4) -> gf.Tensor:
    w = gf.variable(np.zeros(width, "float32"), name="w")
    step = gf.assign(w, w + 1.0)
    with gf.Session(gf.Cluster.local(workers=2, threads=1), checkpoint=folder, every=1) as s:
        while s.step < steps:
            s.run(step)
    return w


def newest(folder: Path) -> Path:
    manifests = sorted(
        folder.glob("*/manifest.json"), key=lambda p: json.loads(p.read_text())["step"]
    )
    return manifests[-1].parent  # fmt: skip


def flip(checkpoint: Path) -> None:
    for shard in checkpoint.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)


def cut(checkpoint: Path) -> None:
    for shard in checkpoint.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-2])


def lose(checkpoint: Path) -> None:
    for shard in checkpoint.glob("*.safetensors"):
        shard.unlink()


def renew(checkpoint: Path) -> None:
    place = checkpoint / "manifest.json"
    manifest = json.loads(place.read_text())
    place.write_text(json.dumps({**manifest, "format": manifest["format"] + 1}))


@pytest.mark.parametrize("damage", [flip, cut, lose, renew])
@pytest.mark.fault(38, 39, 40)
def test_a_session_goes_on_from_the_checkpoint_before_a_damaged_one(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    trained(tmp_path, 3)
    damage(newest(tmp_path))
    w = gf.variable(np.zeros(4, "float32"), name="w")
    with gf.Session(checkpoint=tmp_path, every=1) as s:
        before = s.step
        assert 0 < before < 3
        assert s.run(gf.assign(w, w + 1.0)).tolist() == [before + 1.0] * 4


@pytest.mark.fault(40)
def test_a_checkpoint_of_other_shapes_is_refused_with_the_differences(tmp_path: Path) -> None:
    trained(tmp_path, 2, width=4)
    w = gf.variable(np.zeros(5, "float32"), name="w")
    with (
        pytest.raises(CheckpointError, match=r"w is float32\(5,\) and float32\(4,\)"),
        gf.Session(checkpoint=tmp_path, every=1) as s,
    ):
        s.run(gf.assign(w, w + 1.0))
