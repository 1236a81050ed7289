"""Sessions with checkpoint=: when checkpoints are written, taken up and left alone; what is kept
for doing steps again. Faults of real processes are in tests/faults."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import (
    ArgumentError,
    CheckpointError,
    NonFiniteError,
    StaleEpoch,
    StateLost,
    WorkerLost,
)
from graphflow.execution.variable_store import VariableStore
from graphflow.recovery import recoverer as recovery_module
from graphflow.recovery.checkpoint_policy import CheckpointInterval
from graphflow.recovery.replay_log import ReplayLog
from graphflow.runtime.checkpoint import load
from graphflow.runtime.checkpoint.folder import read_manifest
from graphflow.runtime.host.host_interface import LocalHosts
from graphflow.runtime.wire.step_values import step_of


def build_counter(name: str = "count") -> tuple[gf.Tensor, gf.Tensor]:
    count = gf.variable(np.zeros(3, "float32"), name=name)
    return count, gf.assign(count, count + 1.0)


def list_files(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def wait_for_checkpoint(s: gf.Session) -> None:
    """When no checkpoint is being written any more."""
    assert s._recovery is not None
    s._recovery.wait()


# Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10min", 600), ("30s", 30), ("2h", 7200), ("500ms", 0.5), ("1.5 h", 5400), (" 1d ", 86400)],
)
def test_a_time_has_a_unit(text: str, seconds: float) -> None:
    assert CheckpointInterval.parse(text) == CheckpointInterval(seconds=seconds)


def test_a_checkpoint_is_due_at_multiples_of_steps_or_after_a_time() -> None:
    steps, times = CheckpointInterval.parse(10), CheckpointInterval.parse("5s")
    assert [s for s in range(1, 25) if steps.is_due(s - 1, s, 0.0)] == [10, 20]
    assert steps.is_due(8, 21, 0.0) and not steps.is_due(11, 19, 1e9)
    assert times.is_due(3, 4, 5.0) and not times.is_due(3, 4, 4.9) and not times.is_due(4, 4, 9.0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"every": 0}, "every"),
        ({"every": -3}, "every"),
        ({"every": True}, "every"),
        ({"every": np.int64(0)}, "every"),
        ({"every": np.float64(2.0)}, "every"),
        ({"every": np.True_}, "every"),
        ({"every": 2.5}, "every"),
        ({"every": "10"}, "10min"),
        ({"every": "0s"}, "every"),
        ({"every": "soon"}, "10min"),
        ({"every": "-1s"}, "every"),
        ({"keep": 0}, "keep"),
        ({"keep": 1.5}, "keep"),
        ({"keep": True}, "keep"),
        ({"keep": np.float32(2)}, "keep"),
        ({"rejoin": -1}, "rejoin"),
        ({"rejoin": float("inf")}, "rejoin"),
        ({"rejoin": "1s"}, "rejoin"),
        ({"rejoin": True}, "rejoin"),
        ({"rejoin": 10**400}, "rejoin"),
        ({"checkpoint": 3}, "directory"),
        ({"checkpoint": ""}, "directory"),
        ({"checkpoint": ["a"]}, "directory"),
        ({"checkpoint": None, "every": 5}, "checkpoint="),
        ({"checkpoint": None, "keep": 5}, "checkpoint="),
        ({"checkpoint": None, "rejoin": 5}, "checkpoint="),
    ],
)
def test_a_wrong_argument_is_told_before_anything_is_written(
    wrong: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=told):
        gf.Session(**{"checkpoint": tmp_path / "c", **wrong})
    assert not list_files(tmp_path)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    _, add = build_counter()
    with gf.Session(
        checkpoint=tmp_path, every=np.int64(2), keep=np.uint8(1), rejoin=np.float32(0.5),
        deadline=np.float32(30),  # type: ignore[arg-type]
    ) as s:  # fmt: skip
        for _ in range(5):
            s.run(add)
            wait_for_checkpoint(s)
        assert list_files(tmp_path) == ["session.json", "step-00000004"]


def test_a_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "c")
    for place in (tmp_path / "link", tmp_path / "link" / "c"):
        with pytest.raises(CheckpointError, match=r"link is a link to .*disk/c, where nothing is"):
            gf.Session(checkpoint=place)
    assert list_files(tmp_path) == ["link"]
    (tmp_path / "disk" / "c").mkdir(parents=True)
    with gf.Session(checkpoint=tmp_path / "link"):
        assert list_files(tmp_path / "disk" / "c") == ["session.json"]


def test_a_directory_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot keep checkpoints"):
        gf.Session(checkpoint=tmp_path / "file")
    with gf.Session() as s:
        s.save(tmp_path / "one")
        with pytest.raises(ArgumentError, match="checkpoint="):
            s.save()
    with pytest.raises(CheckpointError, match=r"one checkpoint.*s\.load"):
        gf.Session(checkpoint=tmp_path / "one")


# Written --------------------------------------------------------------------------------------


def test_checkpoints_are_written_every_so_many_steps_and_the_last_few_stay(tmp_path: Path) -> None:
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path / "a" / "c", every=10, keep=2) as s:
        for number in range(45):
            assert s.step == number
            s.run(add)
            wait_for_checkpoint(s)
        assert list_files(tmp_path / "a" / "c") == [
            "session.json",
            "step-00000030",
            "step-00000040",
        ]
        for step in (30, 40):
            there = load(tmp_path / "a" / "c" / f"step-{step:08d}")
            assert there.step == step and there.variables["count"].tolist() == [step] * 3
    assert (
        list_files(tmp_path / "a" / "c")[-1] == "step-00000045"
    )  # a session that ends well leaves all


def test_a_manifest_tells_step_epoch_fingerprint_position_and_digests(tmp_path: Path) -> None:
    import hashlib

    from safetensors.numpy import load_file

    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=5) as s:
        for _ in range(5):
            s.run(add)
    folder = tmp_path / "step-00000005"
    told = json.loads((folder / "manifest.json").read_text())
    assert (told["format"], told["step"], told["epoch"]) == (2, 5, 1)
    assert told["position"] == {"steps": 5}
    assert told["fingerprint"] == read_manifest(folder).fingerprint
    (shard,) = told["shards"]
    data = (folder / shard["file"]).read_bytes()
    assert shard["sha256"] == hashlib.sha256(data).hexdigest() and shard["bytes"] == len(data)
    assert shard["variables"] == ["count"]
    assert load_file(folder / shard["file"])["count"].tolist() == [5, 5, 5]


def test_by_time_too_and_only_where_there_was_a_step(tmp_path: Path) -> None:
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every="100ms", keep=100) as s:
        begun = time.monotonic()
        while len(list_files(tmp_path)) < 3 and time.monotonic() < begun + 30:
            s.run(add)
        wait_for_checkpoint(s)
        written = len(list_files(tmp_path)) - 1
        assert 2 <= written <= (time.monotonic() - begun) / 0.1 + 1


def test_saving_when_one_wishes_needs_no_folder(tmp_path: Path) -> None:
    count, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every="1h") as s:
        s.run(add)
        s.save()
        s.set(count, [7, 8, 9])
        s.save()  # of the same step: it takes the other's place
        assert list_files(tmp_path) == ["session.json", "step-00000001"]
        assert load(tmp_path / "step-00000001").variables["count"].tolist() == [7, 8, 9]
        s.set(count, [3, 2, 1])
    assert load(tmp_path / "step-00000001").variables["count"].tolist() == [3, 2, 1]
    with gf.Session(checkpoint=tmp_path, every="1h") as s:
        s.set(count, [4, 5, 6])
    assert load(tmp_path / "step-00000001").variables["count"].tolist() == [4, 5, 6]


def test_the_short_way_of_steps_counts_too(tmp_path: Path) -> None:
    x = gf.placeholder("float32", (None,))
    count, _ = build_counter()
    step = gf.assign(count, count + gf.sum(x))
    with gf.Session(checkpoint=tmp_path, every=7, keep=100) as s:
        for _ in range(30):
            s.run(step, {x: np.ones(2, "float32")})
            wait_for_checkpoint(s)
        assert len(list_files(tmp_path)) == 1 + 4
        assert s.get(count).tolist() == [60] * 3


def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What lets shards be written, which wait for it from here on."""
    from graphflow.runtime.checkpoint import folder

    go_on, original = threading.Event(), folder.write_shard

    def wait_then_call(*arguments: Any) -> Any:
        assert go_on.wait(30)
        return original(*arguments)

    monkeypatch.setattr("graphflow.runtime.checkpoint.remote.write_shard", wait_then_call)
    return go_on


def test_one_that_is_due_while_another_is_written_is_left_out_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = held_back(monkeypatch)
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=5, keep=100) as s:
        for _ in range(19):
            s.run(add)
        told = [r.getMessage() for r in caplog.records if "checkpoint.skipped" in r.getMessage()]
        assert len(told) == 2 and "step=10" in told[0] and "step=15" in told[1]
        go_on.set()
        wait_for_checkpoint(s)
        s.run(add)
        wait_for_checkpoint(s)
        assert list_files(tmp_path) == ["session.json", "step-00000005", "step-00000020"]


def test_steps_too_quick_for_their_checkpoints_do_not_flood_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=1) as s:
        for _ in range(300):
            s.run(add)
    told = [r.getMessage() for r in caplog.records if "checkpoint.skipped" in r.getMessage()]
    assert len(told) <= 10 and all(str(tmp_path) in line for line in told)


def test_what_is_written_beside_steps_that_go_on_is_the_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = held_back(monkeypatch)
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=5) as s:
        for _ in range(8):
            s.run(add)
        go_on.set()
        wait_for_checkpoint(s)
        assert load(tmp_path / "step-00000005").variables["count"].tolist() == [5] * 3


@pytest.mark.fault(36)
def test_a_checkpoint_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, add = build_counter()
    full = False
    write = os.write

    def write_if_space(file: int, data: Any) -> int:
        if full and threading.current_thread().name == "graphflow-checkpoint":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(os, "write", write_if_space)
    with gf.Session(checkpoint=tmp_path, every=5) as s:
        for number in range(20):
            full = 9 <= number < 15
            s.run(add)
            wait_for_checkpoint(s)
            if number == 9:
                assert "No space left" in str(s.checkpoint_error)  # at once, not at the next step
                s.run(gf.constant(1.0))
                assert s.checkpoint_error is not None
                assert "No space left" in str(s.checkpoint_error)
                assert list_files(tmp_path) == ["session.json", "step-00000005"]
        wait_for_checkpoint(s)
        assert s.checkpoint_error is None
        assert s.step == 21
    assert any("checkpoint.failed" in r.getMessage() for r in caplog.records)
    full = True
    s = gf.Session(checkpoint=tmp_path)
    s.run(add)
    with pytest.raises(CheckpointError, match="No space left"):
        s.save()
    assert s.run(add)[0] == 22
    with pytest.raises(CheckpointError, match="No space left"):
        s.close()  # there is no later one
    s.close()


@pytest.mark.fault(43)
def test_a_step_that_makes_nan_is_never_in_a_checkpoint(tmp_path: Path) -> None:
    x = gf.placeholder("float32", ())
    w = gf.variable(1.0, name="w")
    step = gf.assign(w, gf.log(w * x))
    with gf.Session(checkpoint=tmp_path, every=1, keep=100, check_finite=True) as s:
        s.run(step, {x: 2.0})
        wait_for_checkpoint(s)
        before = list_files(tmp_path)
        for _ in range(3):
            with pytest.raises(NonFiniteError):
                s.run(step, {x: -1.0})
        wait_for_checkpoint(s)
        assert list_files(tmp_path) == before and s.step == 1
    assert np.isfinite(load(tmp_path / list_files(tmp_path)[-1]).variables["w"])


# Taken up -------------------------------------------------------------------------------------


def _model() -> tuple[gf.Tensor, gf.Tensor, gf.Tensor]:
    with gf.random.seed(3):
        x = gf.placeholder("float32", (None, 4), name="x")
        w = gf.variable(gf.init.glorot((4, 4)), name="w")
        loss = gf.mean(gf.square(gf.nn.dropout(x @ w, 0.3) - gf.random.normal((4,))))
        return x, loss, gf.optim.Adam(0.1).minimize(loss)


def test_a_loop_over_the_steps_that_are_left_gives_the_same_bits(tmp_path: Path) -> None:
    feeds = np.random.default_rng(0).normal(size=(20, 5, 4)).astype("float32")

    def run(until: int, **options: Any) -> dict[int, bytes]:
        x, loss, train = _model()
        with gf.Session(**options) as s:
            return {
                number: s.run([loss, train], {x: feeds[number]})[0].tobytes()
                for number in range(s.step, until)
            }

    parts = [run(until, checkpoint=tmp_path, every=3) for until in (4, 11, 20, 20)]
    assert [sorted(part) for part in parts] == [
        list(range(4)), list(range(4, 11)), list(range(11, 20)), [],
    ]  # fmt: skip
    assert {**parts[0], **parts[1], **parts[2]} == run(20)


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.fault(38)
def test_a_damaged_checkpoint_is_left_out_and_the_one_before_is_taken_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=5) as s:
        for _ in range(10):
            s.run(add)
            wait_for_checkpoint(s)
    _damage(tmp_path / "step-00000010" / "worker-0.safetensors")
    with gf.Session(checkpoint=tmp_path, every=5) as s:
        assert s.step == 5
        for _ in range(4):
            s.run(add)
    ignored = [r.getMessage() for r in caplog.records if "checkpoint.ignored" in r.getMessage()]
    assert "step-00000010" in ignored[0] and "digest" in ignored[0]
    with gf.Session(checkpoint=tmp_path, every=5) as s:  # newer than the damaged one by its epoch
        assert s.step == 9 and s.get(count).tolist() == [9] * 3


@pytest.mark.fault(40)
def test_a_checkpoint_of_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    _, add = build_counter("a")
    with gf.Session(checkpoint=tmp_path) as s:
        s.run([add, build_counter("b")[1]])
    other = gf.variable(np.zeros((2, 2), "float32"), name="a")
    more = gf.variable(0, name="c")
    told = (
        r"a is float32\(2, 2\) and float32\(3,\) in the checkpoint.*missing.*c int64.*unexpected.*b"
    )
    with gf.Session(checkpoint=tmp_path) as s:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=told):
                s.run([other, more])
    stranger = gf.variable(np.zeros(3, "float32"), name="elsewhere")
    with gf.Session(checkpoint=tmp_path) as s, pytest.raises(CheckpointError, match="elsewhere"):
        s.run(stranger)
    assert load(tmp_path / "step-00000001").step == 1


def test_a_variable_that_is_new_begins_with_its_own_value(tmp_path: Path) -> None:
    count, add = build_counter()
    with gf.Session(checkpoint=tmp_path) as s:
        s.run(add)
    fresh = gf.variable(5.0, name="fresh")
    with gf.Session(checkpoint=tmp_path) as s:
        with pytest.raises(
            CheckpointError, match=r"missing in the checkpoint: fresh.*strict=False"
        ):
            s.run([count, fresh])
        s.run(count)  # all values are in use now: another variable is no part of the checkpoint
        assert s.run([count, fresh])[1] == 5
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path / "other") as s:
        s.run(add)
    with gf.Session(checkpoint=tmp_path / "other", strict=False) as s:
        assert s.run([count, fresh])[1] == 5


def test_the_newest_checkpoint_of_a_directory_that_fits_is_loaded(tmp_path: Path) -> None:
    count, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=1, keep=10) as s:
        for _ in range(3):
            s.run(add)
            wait_for_checkpoint(s)
    _damage(tmp_path / "step-00000003" / "worker-0.safetensors")
    with gf.Session() as s:
        s.run(count)
        s.load(tmp_path)
        assert s.step == 2 and s.get(count).tolist() == [2] * 3
        s.load(tmp_path / "step-00000001")
        assert s.step == 1
    with gf.Session() as s:
        s.run(gf.variable([1], name="count"))
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
            s.load(tmp_path)


def test_going_back_by_hand_makes_what_follows_the_newest(tmp_path: Path) -> None:
    count, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=2, keep=10) as s:
        for _ in range(6):
            s.run(add)
            wait_for_checkpoint(s)
        s.load(tmp_path / "step-00000002")
        s.set(count, [100, 100, 100])
        s.run(add)
    with gf.Session(checkpoint=tmp_path) as s:
        assert s.step == 3 and s.get(count).tolist() == [101] * 3


def read_newest_checkpoint(s: gf.Session, root: Path) -> tuple[int, float]:
    """What a crash just now would leave to go on from: step, and value of the counter."""
    wait_for_checkpoint(s)
    there = s._recovery.writer.store.newest(pytest.fail)  # type: ignore[union-attr]
    assert there is not None and there[0].parent == root
    return there[1].step, float(there[1].variables["count"][0])


@pytest.mark.parametrize("loses", [False, True], ids=["here", "workers"])
@pytest.mark.parametrize("every", [2, "1ms"])
def test_after_going_back_checkpoints_are_written_as_often_as_before(
    every: int | str, loses: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if loses:
        request.getfixturevalue("losing")
    count, add = build_counter()
    root = tmp_path / "c"
    with gf.Session(checkpoint=root, every=every, keep=2) as s:
        s.run(add)
        s.save(tmp_path / "best")
        for _ in range(8):
            s.run(add)
            wait_for_checkpoint(s)
        s.load(tmp_path / "best")
        assert read_newest_checkpoint(s, root) == (1, 1.0)
        s.set(count, [100, 100, 100])
        for step in range(2, 12):  # over all steps of the line before, and beyond
            time.sleep(0.002)
            s.run(add)
            last = step if every != 2 or step % 2 == 0 else step - 1
            assert read_newest_checkpoint(s, root) == (last, 100.0 + last - 1 if last > 1 else 1.0)
        assert [name for name in list_files(root) if "step" in name][-1] in (
            "step-00000010", "step-00000011",
        )  # fmt: skip


def test_what_is_written_after_going_back_is_not_pushed_out_by_higher_steps(tmp_path: Path) -> None:
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=1, keep=2) as s:
        for _ in range(6):
            s.run(add)
            wait_for_checkpoint(s)
        s.load(tmp_path / "step-00000005")
        assert list_files(tmp_path)[1:] == ["step-00000005", "step-00000006"]
        s.save(tmp_path / "best")
        s.run(add)
        s.load(tmp_path / "best")
        assert read_newest_checkpoint(s, tmp_path) == (5, 5.0)
        assert list_files(tmp_path)[2:] == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize("loses", [False, True], ids=["here", "workers"])
def test_a_checkpoint_is_loaded_though_the_disk_is_full_and_written_when_the_next_is_due(
    loses: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if loses:
        request.getfixturevalue("losing")
    _, add = build_counter()
    root = tmp_path / "c"
    with gf.Session(checkpoint=root, every=2) as s:
        s.run(add)
        s.save(tmp_path / "best")
        for _ in range(5):
            s.run(add)
            wait_for_checkpoint(s)
        with pytest.MonkeyPatch.context() as patch:
            _fill_disk(root, patch)
            s.load(tmp_path / "best")
            assert s.step == 1 and "No space left" in str(s.checkpoint_error)
        assert read_newest_checkpoint(s, root) == (6, 6.0)  # nothing else could be written
        s.run(add)
        assert read_newest_checkpoint(s, root) == (2, 2.0) and s.checkpoint_error is None


def test_ctrl_c_while_a_checkpoint_is_loaded_leaves_it_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, add = build_counter()
    root, load_state = tmp_path / "c", VariableStore.load

    def interrupt_then_load(*what: Any, **how: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        load_state(*what, **how)

    with gf.Session(checkpoint=root, every="1h") as s:
        s.run(add)
        s.save(tmp_path / "best")
        s.run(add)
        s.save()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(VariableStore, "load", interrupt_then_load)
            s.load(tmp_path / "best")
        assert s.step == 1 and read_newest_checkpoint(s, root) == (1, 1.0)


def test_who_takes_a_directory_over_fences_who_had_it(tmp_path: Path) -> None:
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=2) as first:
        first.run(add)
        with gf.Session(checkpoint=tmp_path, every=2) as second:
            second.run(add)
            with pytest.raises(StaleEpoch, match="taken over"):
                for _ in range(4):
                    first.run(add)
                    wait_for_checkpoint(first)
            second.run(add)
        there = list_files(tmp_path)
        with pytest.raises(StaleEpoch):
            first.save()
    assert list_files(tmp_path) == there == ["session.json", "step-00000002"]


def test_what_a_crash_left_goes_with_the_next_start(tmp_path: Path) -> None:
    begun = (".step-00000003.partial", ".step-00000002.gone", ".session.json.partial")
    for name in begun:
        (tmp_path / f"{name}-{'0f' * 8}").mkdir()
        (tmp_path / f"{name}-{'0f' * 8}" / "worker-0.safetensors").write_text("half")
    (tmp_path / "mine.txt").write_text("stays")
    with gf.Session(checkpoint=tmp_path):
        assert list_files(tmp_path) == ["mine.txt", "session.json"]


def test_a_session_that_fails_writes_no_last_checkpoint_and_lets_go(tmp_path: Path) -> None:
    _, add = build_counter()
    with pytest.raises(ZeroDivisionError), gf.Session(checkpoint=tmp_path) as s:
        s.run(add)
        raise ZeroDivisionError
    assert list_files(tmp_path) == ["session.json"]
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("graphflow-checkpoint")]


# What is kept for doing steps again ------------------------------------------------------------


class Losing:
    """A session over one worker whose steps lose it when they are told to, without any process.

    Attributes:
        at: which steps of a session do, counted from 1 and with those that are done again.
        steps: the session's own numbers of the steps that did.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: set[int] = set()
        self.steps: list[int] = []
        self.opened = 0
        attempts: Counter[int] = Counter()
        step, losing = LocalHosts.step, self

        def lose_worker_or_step(
            hosts: Any, program: str, number: int, *rest: Any, **more: Any
        ) -> Any:
            attempts[id(hosts)] += 1
            if attempts[id(hosts)] in losing.at:
                losing.at.discard(attempts[id(hosts)])
                losing.steps.append(step_of(number))
                raise WorkerLost("worker 0 was lost", worker=0)
            return step(hosts, program, number, *rest, **more)

        def reopen(hosts: Any, cluster: Any, epoch: int, patience: Any) -> Any:
            losing.opened += 1
            hosts._host.close("")
            hosts._host.open("")
            return cluster

        monkeypatch.setattr(LocalHosts, "can_be_lost", True)
        monkeypatch.setattr(LocalHosts, "step", lose_worker_or_step)
        monkeypatch.setattr(LocalHosts, "direct_step", lambda *_: None)
        monkeypatch.setattr(LocalHosts, "reopen", reopen)


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Losing:
    return Losing(monkeypatch)


def test_feeds_are_kept_as_they_were(losing: Losing, tmp_path: Path) -> None:
    x = gf.placeholder("float32", (2,))
    total = gf.variable(np.zeros(2, "float32"), name="total")
    step = gf.assign(total, total + x)
    feed = np.zeros(2, "float32")
    with gf.Session(checkpoint=tmp_path, every="1h") as s:
        for number in range(6):
            feed[:] = number  # the caller's own array, again and again
            losing.at = {6} if number == 5 else set()
            told = s.run(step, {x: feed})
        assert losing.opened == 1 and told.tolist() == [15, 15]


def test_steps_that_are_done_again_draw_the_same_numbers(losing: Losing, tmp_path: Path) -> None:
    feeds = np.random.default_rng(1).normal(size=(14, 5, 4)).astype("float32")

    def run(s: gf.Session, lost_at: int = 0) -> list[bytes]:
        x, loss, train = _model()
        told = []
        for number, feed in enumerate(feeds):
            losing.at = {lost_at} if number == lost_at - 1 else set()
            told.append(s.run([loss, train], {x: feed})[0].tobytes())
        return told

    with gf.Session() as s:
        wanted = run(s)
    for lost_at in (3, 9):  # before there is a checkpoint, and two steps after one
        losing.opened = 0
        with gf.Session(checkpoint=tmp_path / str(lost_at), every=7) as s:
            assert run(s, lost_at) == wanted and losing.opened == 1


def test_what_was_set_between_steps_is_set_again_in_its_place(
    losing: Losing, tmp_path: Path
) -> None:
    count, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every="1h") as s:
        s.set(count, [10, 20, 30])
        s.run(add)
        s.set(count, s.get(count) * 2)
        s.run(add)
        losing.at = {3}
        assert s.run(add).tolist() == [24, 44, 64]
        s.save(tmp_path / "own")
        s.set(count, [0, 0, 0])
        s.load(tmp_path / "own")
        losing.at = {7}
        assert [s.run(add)[0] for _ in range(3)] == [25, 26, 27]
        assert losing.opened == 2


def test_beyond_its_budget_a_checkpoint_is_written_early(
    losing: Losing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_module, "REPLAY_BYTES", 10_000)
    x = gf.placeholder("float32", (None,))
    total = gf.variable(0.0, name="total")
    step = gf.assign(total, total + gf.sum(x))
    with gf.Session(checkpoint=tmp_path, every="1h", keep=100) as s:
        assert s._recovery is not None
        for number in range(40):
            losing.at = {35} if number == 30 else set()
            s.run(step, {x: np.ones(500, "float32")})
            assert s._recovery._replay_log.nbytes < 40_000
        assert s.get(total) == 40 * 500 and losing.opened <= 1
        assert len(list_files(tmp_path)) > 5


def test_with_a_full_disk_training_goes_on_without_a_way_back(
    losing: Losing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(recovery_module, "REPLAY_BYTES", 10_000)
    x = gf.placeholder("float32", (None,))
    total = gf.variable(0.0, name="total")
    step = gf.assign(total, total + gf.sum(x))
    write = os.write

    def write_unless_checkpoint(file: int, data: Any) -> int:
        if threading.current_thread().name == "graphflow-checkpoint":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", write_unless_checkpoint)
    with gf.Session(checkpoint=tmp_path, every="1h") as s:
        assert s._recovery is not None
        for _ in range(60):
            s.run(step, {x: np.ones(500, "float32")})
            wait_for_checkpoint(s)
            assert s._recovery._replay_log.nbytes < 60_000
        assert s.checkpoint_error is not None
        assert any("recovery.lost" in r.getMessage() for r in caplog.records)
        losing.at = set(range(1000))
        with pytest.raises(StateLost, match="no checkpoint leads to step 60"):
            s.run(step, {x: np.ones(500, "float32")})


def test_a_damaged_base_is_left_for_the_one_before(losing: Losing, tmp_path: Path) -> None:
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=4) as s:
        for _ in range(10):
            s.run(add)
            wait_for_checkpoint(s)
        _damage(tmp_path / "step-00000008" / "worker-0.safetensors")
        losing.at = {11}
        assert s.run(add).tolist() == [11] * 3
        assert losing.opened == 1


def _fill_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", raise_disk_full)


def _replace_manifest(make: Callable[[Path], None]) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def trouble(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (root / "session.json").unlink()
        make(root / "session.json")

    return trouble


TROUBLES: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "a full disk": _fill_disk,
    "a note that is gone": _replace_manifest(lambda path: None),
    "a folder in place of the note": _replace_manifest(Path.mkdir),
    "a link that leads to itself": _replace_manifest(lambda path: path.symlink_to(path)),
    "a note that makes no sense": _replace_manifest(lambda path: void(path.write_text("{}"))),
}


def void(_: object) -> None:
    """Nothing."""


@pytest.mark.fault(36)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_worker_that_is_lost_while_nothing_can_be_noted_is_replaced(
    trouble: str, losing: Losing, tmp_path: Path
) -> None:
    """The last checkpoint is there, and that is all that a recovery needs."""
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=4) as s:
        for _ in range(6):
            s.run(add)
            wait_for_checkpoint(s)
        with pytest.MonkeyPatch.context() as patch:
            TROUBLES[trouble](tmp_path, patch)
            losing.at = {7}
            assert s.run(add).tolist() == [7] * 3
            assert s.run(add).tolist() == [8] * 3
            wait_for_checkpoint(s)
        if (tmp_path / "session.json").is_dir():
            (tmp_path / "session.json").rmdir()
        elif (tmp_path / "session.json").is_symlink():
            (tmp_path / "session.json").unlink()
        s.save()
        assert json.loads((tmp_path / "session.json").read_text())["epoch"] == 2
        assert read_manifest(tmp_path / "step-00000008").epoch == 2
    assert losing.opened == 1
    with gf.Session(checkpoint=tmp_path) as s:
        assert s.step == 8


def test_a_folder_that_was_removed_is_there_again_with_the_next_checkpoint(
    losing: Losing, tmp_path: Path
) -> None:
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path / "c", every="1h") as s:
        for _ in range(3):
            s.run(add)
        shutil.rmtree(tmp_path / "c")
        losing.at = {4}
        assert s.run(add).tolist() == [4] * 3  # from the beginning: nothing was written before
        s.save()
        assert list_files(tmp_path / "c") == ["session.json", "step-00000004"]
        for _ in range(2):
            s.run(add)
            s.save()
        shutil.rmtree(tmp_path / "c")
        losing.at = set(range(1, 1000))
        with pytest.raises(StateLost, match="is no checkpoint"):
            s.run(add)


# Interrupted ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["run", "set"])
def test_ctrl_c_after_the_deed_and_before_its_note_leaves_a_way_back(
    how: str, losing: Losing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, add = build_counter()
    note, raising = ReplayLog.add, [True]

    def interrupt_or_note(self: Any, entry: Any) -> None:
        if raising and raising.pop():
            raise KeyboardInterrupt
        note(self, entry)

    with gf.Session(checkpoint=tmp_path, every="1h") as s:
        raising.clear()
        monkeypatch.setattr(ReplayLog, "add", interrupt_or_note)
        s.run(add)
        raising.append(True)
        with pytest.raises(KeyboardInterrupt):
            s.run(add) if how == "run" else s.set(count, [2, 2, 2])
        assert s.run(add).tolist() == [3] * 3
        losing.at = {4 if how == "run" else 3}
        assert s.run(add).tolist() == [4] * 3
        assert losing.opened == 1


def test_ctrl_c_while_a_checkpoint_begins_leaves_one_that_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, add = build_counter()
    start = threading.Thread.start

    def interrupt_then_start(thread: threading.Thread) -> None:
        signal.raise_signal(signal.SIGINT)
        start(thread)

    with gf.Session(checkpoint=tmp_path / "c", every=2) as s:
        s.run(add)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", interrupt_then_start)
            s.run(add)
        wait_for_checkpoint(s)
        assert list_files(tmp_path / "c") == ["session.json", "step-00000002"]
        s.run(add)
        s.save()


def test_ctrl_c_while_a_checkpoint_is_loaded_comes_after_it_and_leaves_a_way_back(
    losing: Losing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, add_one), (other, add_other) = build_counter("one"), build_counter("other")
    write = LocalHosts.write

    def interrupt_then_write(hosts: Any, *what: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        write(hosts, *what)

    with gf.Session(checkpoint=tmp_path / "c", every="1h") as s:
        s.run([add_one, add_other])
        s.save(tmp_path / "first")
        s.run([add_one, add_other])
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(LocalHosts, "write", interrupt_then_write)
            s.load(tmp_path / "first")
        assert [s.get(v)[0] for v in (one, other)] == [1, 1] and s.step == 1
        s.run([add_one, add_other])
        losing.at = {4}
        assert [value[0] for value in s.run([add_one, add_other])] == [3, 3]
    assert losing.opened == 1


def test_after_ctrl_c_training_goes_on_though_the_disk_is_full(
    losing: Losing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, add = build_counter()
    step, numbers = LocalHosts.step, []

    def step_then_interrupt(hosts: Any, program: str, number: int, *rest: Any, **more: Any) -> Any:
        numbers.append(number)
        told = step(hosts, program, number, *rest, **more)
        if len(numbers) == 2:
            raise KeyboardInterrupt
        return told

    monkeypatch.setattr(LocalHosts, "step", step_then_interrupt)
    with gf.Session(checkpoint=tmp_path, every=5) as s:
        s.run(add)
        with pytest.raises(KeyboardInterrupt):
            s.run(add)
        with pytest.MonkeyPatch.context() as patch:
            _fill_disk(tmp_path, patch)
            assert s.run(add).tolist() == [3] * 3
            assert s.run(add).tolist() == [4] * 3
            assert "No space left" in str(s.checkpoint_error)
        s.run(add)  # a checkpoint is due, and leads on
        wait_for_checkpoint(s)
        losing.at = {6}
        assert s.run(add).tolist() == [6] * 3
    assert losing.opened == 1


def test_a_checkpoint_that_was_loaded_may_be_saved_over(losing: Losing, tmp_path: Path) -> None:
    """What was done since it was loaded would be done to what is there now, twice."""
    count, add = build_counter()
    with gf.Session(checkpoint=tmp_path / "c", every="1h") as s:
        s.run(add)
        s.save(tmp_path / "best")
        s.run(add)
        s.load(tmp_path / "best")
        assert s.step == 1
        s.run(add)
        s.save(tmp_path / "best")
        s.run(add)
        losing.at = {5}
        assert s.run(add).tolist() == [4] * 3
        assert losing.opened == 1 and s.step == 4
        s.load(tmp_path / "best")
        shutil.rmtree(tmp_path / "best")
        losing.at = {9}
        assert s.run(add).tolist() == [3] * 3
        assert losing.opened == 2 and s.get(count).tolist() == [3] * 3


def test_losses_without_end_are_given_up(losing: Losing, tmp_path: Path) -> None:
    count, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=4) as s:
        s.run(add)
        losing.at = set(range(2, 1000))
        with pytest.raises(WorkerLost, match="10 recoveries in a row"):
            s.run(add)
        losing.at = set()
        assert s.run(add).tolist() == [2, 2, 2]
        assert s.get(count).tolist() == [2, 2, 2]


def test_a_step_has_the_sessions_own_number_on_every_attempt(
    losing: Losing, tmp_path: Path
) -> None:
    """After failed steps, a checkpoint that was loaded, steps that were done again, a trace."""
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=100) as s:
        for attempt in (1, 3, 6):  # each step after those before were done again
            losing.at = {attempt}
            s.run(add)
        assert losing.steps == [0, 1, 2]
        s.save(tmp_path / "own")
        for _ in range(4):
            s.run(add)
        s.load(tmp_path / "own")
        losing.at = set(range(1000))
        with pytest.raises(WorkerLost):
            s.run(add)
        assert s.step == 3 and set(losing.steps[3:]) == {3}
        losing.at = set()
        with s.trace() as trace:
            s.run(add)
            s.run(add)
        assert [step.number for step in trace.steps] == [3, 4] and s.step == 5


def test_a_future_is_recovered_too(losing: Losing, tmp_path: Path) -> None:
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=3) as s:
        losing.at = {4, 9}
        futures = [s.run_async(add) for _ in range(12)]
        assert [float(f.result(60)[0]) for f in futures] == list(range(1, 13))
        assert losing.opened == 2


def test_without_checkpoints_a_lost_worker_says_how_to_have_them(losing: Losing) -> None:
    _, add = build_counter()
    with gf.Session() as s:
        losing.at = {1}
        with pytest.raises(WorkerLost):
            s.run(add)
        with pytest.raises(StateLost, match="checkpoint="):
            s.run(add)


def test_the_log_tells_of_each_recovery(
    losing: Losing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "graphflow.session")
    _, add = build_counter()
    with gf.Session(checkpoint=tmp_path, every=2) as s:
        for _ in range(3):
            s.run(add)
            wait_for_checkpoint(s)
        losing.at = {4}
        s.run(add)
    told = " ".join(r.getMessage() for r in caplog.records)
    for event in ("checkpoint.written", "session.recovering", "session.recovered", "replayed=1"):
        assert event in told


def test_a_callable_guard_asks_nothing_of_sessions_without_checkpoints() -> None:
    with gf.Session() as s:
        done: Callable[[], int] = lambda: 3  # noqa: E731
        assert s._recovery.retry_on_loss(done) == 3 and s.checkpoint_error is None and s.step == 0
