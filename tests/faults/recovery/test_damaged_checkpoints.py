"""What becomes of a session whose newest checkpoint is damaged, not all there, or of a newer
format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import CheckpointError
from tests.faults.running import record_duration


def run_training(folder: Path, steps: int) -> None:
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
    run_training(tmp_path, 3)
    damage(newest(tmp_path))
    w = gf.variable(np.zeros(4, "float32"), name="w")
    with record_duration(
        {renew: 40, lose: 39}.get(damage, 38), f"{damage.__name__}: a session from before it"
    ):
        s = gf.Session(checkpoint=tmp_path, every=1)
    with s:
        before = s.step
        assert 0 < before < 3
        assert s.run(gf.assign(w, w + 1.0)).tolist() == [before + 1.0] * 4


@pytest.mark.fault(38, 39, 40)
def test_a_session_does_not_begin_anew_over_checkpoints_none_of_which_can_be_read(
    tmp_path: Path,
) -> None:
    run_training(tmp_path, 3)
    there = sorted(tmp_path.glob("step-*"))
    for each in there:
        flip(each)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read") as failure:
        gf.Session(checkpoint=tmp_path)
    assert all(each.name in str(failure.value) for each in there)
    assert sorted(tmp_path.glob("step-*")) == there, "nothing was removed"


INSTEAD: Mapping[str, Callable[[Path], object]] = {
    "nothing": lambda note: None,
    "no bytes": Path.touch,
    "no fields": lambda note: note.write_text("{}"),
    "garbage": lambda note: note.write_bytes(b"garbage"),
    "too much": lambda note: note.write_bytes(b" " * (1 << 17)),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to itself": lambda note: note.symlink_to(note),
    "a link to a device": lambda note: note.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("instead", INSTEAD)
def test_what_is_written_after_the_note_of_the_session_was_lost_counts_as_newer(
    tmp_path: Path, instead: str
) -> None:
    for steps in (2, 4, 6):  # three epochs
        run_training(tmp_path, steps)
    note = tmp_path / "session.json"
    note.unlink()
    INSTEAD[instead](note)
    run_training(tmp_path, 7)
    w = gf.variable(np.zeros(4, "float32"), name="w")
    with gf.Session(checkpoint=tmp_path) as s:
        assert s.step == 7 and s.get(w).tolist() == [7.0] * 4
