"""Checkpoints on a disk that loses its power: what was written is there, the rest is as before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphflow.runtime.checkpoint import Checkpoint, load, save
from graphflow.runtime.checkpoint.remote import write_under
from graphflow.runtime.checkpoint.store import CheckpointStore
from tests.runtime.checkpoint.disk import Disk

KINDS = {"a": ("float32", (4,)), "b": ("int64", (3,))}


def values(step: int) -> dict[str, Any]:
    return {"a": np.full(4, step, "float32"), "b": np.full(3, step, "int64")}


def steps_of(checkpoint: Checkpoint) -> set[int]:
    """The step that a checkpoint says, and those that its variables do."""
    return {checkpoint.step, *(int(v.flat[0]) for v in checkpoint.variables.values())}


def write_checkpoint(store: CheckpointStore, step: int) -> None:
    """A checkpoint in two shards, one from here and one as a worker writes it."""
    draft = store.begin(step)
    own = values(step)
    draft.write("worker-0.safetensors", {"a": own["a"]})
    name = "worker-1.safetensors"
    shard = write_under(store.root, draft.folder.name, name, {"b": own["b"]}, step)
    assert shard is not None
    draft.add(shard)
    draft.commit(KINDS)
    store.prune()


@pytest.mark.fault(37)
@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.slow)])  # seconds each
def test_a_directory_of_checkpoints_has_after_a_power_failure_what_was_written(
    keep: int, tmp_path: Path
) -> None:
    """In a directory that did not exist before; the same step is written twice, too."""
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    begun, done, epoch, secret = 0, 0, 0, ""
    looked = set()

    def fails() -> None:
        for tree in disk.leavings(tmp_path / "left"):
            store = CheckpointStore(tree / "runs" / "c", keep)
            skipped: list[str] = []
            newest = store.newest(skipped.append)
            assert not skipped
            assert store.epoch > epoch, "what is fenced now would not be then"
            assert store.token == secret or not secret, "workers would not know it"
            step = newest[1].step if newest is not None else 0
            assert newest is None or steps_of(newest[1]) == {step}
            assert done <= step <= begun, f"{step} is left, {done} was there"
            looked.add(step)
        shutil.rmtree(tmp_path / "left")

    with disk.watch(fails):
        store = CheckpointStore(tmp_path / "disk" / "runs" / "c", keep)
        epoch, secret = store.epoch, store.token
        for step in (1, 2, 2):
            begun = step
            write_checkpoint(store, step)
            done = step
        epoch = store.advance()
        begun = 3
        write_checkpoint(store, 3)
    assert looked == {0, 1, 2, 3}
    assert {*disk.calls} == {"open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir"}


@pytest.mark.fault(37)
def test_a_checkpoint_that_is_saved_over_is_the_old_or_the_new_after_a_power_failure(
    tmp_path: Path,
) -> None:
    place = tmp_path / "disk" / "mine"
    save(Checkpoint(values(1), 1), place)
    disk = Disk(tmp_path / "disk")
    done, looked = 1, set()

    def fails() -> None:
        for tree in disk.leavings(tmp_path / "left"):
            there = load(tree / "mine")
            assert steps_of(there) == {there.step} and done <= there.step <= done + 1
            looked.add(there.step)
        shutil.rmtree(tmp_path / "left")

    with disk.watch(fails):
        for step in (2, 3):
            save(Checkpoint(values(step), step), place)
            done = step
    assert looked == {1, 2, 3}


def test_a_disk_keeps_what_was_synced_and_may_forget_the_rest(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    (root / "old").write_bytes(b"old")
    disk = Disk(root)

    def list_remains() -> set[tuple[tuple[str, bytes], ...]]:
        found = set()
        for tree in disk.leavings(tmp_path / "left", more=200):
            files = sorted(tree.iterdir())
            found.add(tuple((each.name, each.read_bytes()) for each in files))
        shutil.rmtree(tmp_path / "left")
        return found

    old = ("old", b"old")
    with disk.watch(lambda: None):
        file = os.open(root / "new", os.O_CREAT | os.O_WRONLY)
        os.write(file, b"word")
        states = [b"", b"wo", b"\0" * 4, b"word"]
        assert list_remains() == {(old,), *(tuple(sorted([old, ("new", each)])) for each in states)}
        os.fsync(file)
        assert list_remains() == {(old,), (("new", b"word"), old)}
        os.close(file)
        folder = os.open(root, os.O_RDONLY)
        os.fsync(folder)
        assert list_remains() == {(("new", b"word"), old)}
        os.rename(root / "new", root / "old")
        assert list_remains() == {(("new", b"word"), old), (("old", b"word"),)}
        os.fsync(folder)
        os.close(folder)
        assert list_remains() == {(("old", b"word"),)}
