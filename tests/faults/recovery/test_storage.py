"""Checkpoints of real workers on disks that fill up, and by workers that see no disk of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import CheckpointError
from graphflow.runtime.checkpoint.folder import read_manifest
from tests.faults.recovery.test_recovery import local, pids
from tests.faults.running import Worker, cluster_file, have_ended, record_duration

MEGABYTE = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=20)
        wrong = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        wrong = str(error)
    if wrong:
        pytest.skip(f"a file system of one's own needs privileges: {wrong}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=20)


def build_large_step() -> tuple[gf.Tensor, gf.Tensor]:
    """A megabyte on each of two workers, and the step that changes both."""
    parts = []
    for worker in range(2):
        with gf.device(f"/worker:{worker}"):
            parts.append(gf.variable(np.zeros(MEGABYTE // 4, "float32"), name=f"part{worker}"))
    count = gf.assign(parts[0], parts[0] + 1.0)
    return parts[0], gf.sum(gf.assign(parts[1], parts[1] + gf.max(count)))


def wait_for_checkpoint(s: gf.Session) -> None:
    assert s._recovery is not None
    s._recovery.wait()


@pytest.mark.fault(36)
def test_a_full_disk_leaves_the_checkpoint_before_and_the_training_going(small_disk: Path) -> None:
    part, step = build_large_step()
    root = small_disk / "c"
    filler = small_disk / "filler"
    with local(checkpoint=root, every=5, keep=1) as s:
        for _ in range(5):
            s.run(step)
        wait_for_checkpoint(s)
        assert s.checkpoint_error is None
        filler.write_bytes(bytes(3 * MEGABYTE))  # room for half of the next one
        with record_duration(36, "five steps, and told"):
            for _ in range(5):
                s.run(step)
            wait_for_checkpoint(s)
        assert "No space left" in str(s.checkpoint_error)
        with pytest.raises(CheckpointError, match="No space left"):
            s.save()
        with suppress(OSError), (small_disk / "rest").open("wb", buffering=0) as rest:
            while True:
                rest.write(bytes(4096))  # not even the epoch can be noted any more
        os.kill(pids(s)[1], signal.SIGKILL)  # the checkpoint before is as good as it was
        with record_duration(36, "a worker killed, no byte left: the next step"):
            s.run(step)
        assert s.get(part)[0] == 11
        filler.unlink()
        (small_disk / "rest").unlink()
        for _ in range(4):
            s.run(step)
        wait_for_checkpoint(s)
        assert s.checkpoint_error is None and s.step == 15
        names = sorted(p.name for p in root.iterdir())
        assert names == ["session.json", "step-00000015"]


@pytest.mark.fault(36)
def test_a_session_whose_last_checkpoint_finds_a_full_disk_says_so_when_it_closes(
    small_disk: Path,
) -> None:
    part, step = build_large_step()
    root, rest = small_disk / "c", small_disk / "rest"
    with local(checkpoint=root, every=1) as s:
        s.run(step)
        wait_for_checkpoint(s)
        with suppress(OSError), rest.open("wb", buffering=0) as filled:
            while True:
                filled.write(bytes(4096))
        s.run(step)
        wait_for_checkpoint(s)  # that failed, in the background
        workers = pids(s)
        with pytest.raises(CheckpointError, match=r"No space left.*"):
            s.close()
        assert have_ended(workers, 5.0)
        s.close()
    assert sorted(p.name for p in root.iterdir()) == ["session.json", "step-00000001"]
    rest.unlink()
    with local(checkpoint=root, every=1) as s:
        assert s.step == 1 and s.get(part)[0] == 1


def test_a_worker_that_does_not_see_the_directory_sends_its_variables(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    root, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (near,) = workers(1, "--checkpoints", str(root))
    (far,) = workers(1, "--checkpoints", str(elsewhere))
    part, step = build_large_step()
    cluster = cluster_file(tmp_path, [near.address, far.address])
    with gf.Session(cluster, trial=False, checkpoint=tmp_path / "c", every=3) as s:
        for _ in range(3):
            s.run(step)
        wait_for_checkpoint(s)
        assert s.checkpoint_error is None
    manifest = read_manifest(tmp_path / "c" / "step-00000003")
    files = {shard.file: list(shard.variables) for shard in manifest.shards}
    assert files == {"worker-0.safetensors": ["part0"], "worker-1.safetensors": ["part1"]}
    assert not list(elsewhere.iterdir())
    with local(1, checkpoint=tmp_path / "c") as s:
        assert s.get(part)[0] == 3


@pytest.mark.slow  # a disk that is slow on purpose
def test_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's disk is slow: each write waits a moment."""
    part, step = build_large_step()
    slow = tmp_path / "sitecustomize.py"
    slow.write_text(
        "import os, threading, time\n"
        "write = os.write\n"
        "def slow(file, data):\n"
        "    if 'save' in threading.current_thread().name:\n"
        "        time.sleep(1.0)\n"
        "    return write(file, data)\n"
        "os.write = slow\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with local(checkpoint=tmp_path / "c", every=4) as s:
        for _ in range(4):
            s.run(step)
        started, steps = time.monotonic(), 0
        assert s._recovery is not None
        pending: Any = s._recovery.writer.pending
        while pending.outcome is None:
            s.run(step)
            steps += 1
        assert time.monotonic() - started > 1.0 and steps > 10
        wait_for_checkpoint(s)
        folder = tmp_path / "c" / "step-00000004"
        assert read_manifest(folder).step == 4
    from graphflow.runtime.checkpoint import load

    assert load(folder).variables["part0"][0] == 4  # as it was then
    assert part.spec.shape == (MEGABYTE // 4,)
