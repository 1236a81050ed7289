"""What becomes of a session whose newest checkpoint is damaged, not all there, or of a newer
format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf


def trained(folder: Path, steps: int) -> None:
    w = gf.variable(np.zeros(4, "float32"), name="w")
    step = gf.assign(w, w + 1.0)
    with gf.Session(checkpoint=folder, every=1) as s:
        while s.step < steps:
            s.run(step)


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
