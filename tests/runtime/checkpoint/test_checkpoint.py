"""Checkpoints: what is written is what is read; damage is told; a crash leaves the old one."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import graphflow as gf
from graphflow.errors import CheckpointError, ProtocolError, StaleEpoch, VariableError
from graphflow.ir.spec import BFLOAT16, DTYPES
from graphflow.runtime.checkpoint import Checkpoint, differences, files, load, save, store
from graphflow.runtime.checkpoint.folder import CheckpointDraft, read_manifest
from graphflow.runtime.checkpoint.manifest import fingerprint
from graphflow.runtime.checkpoint.remote import write_under
from graphflow.runtime.checkpoint.store import CheckpointStore, newest

STATE, MANIFEST = "worker-0.safetensors", "manifest.json"
names = st.text(min_size=1, max_size=8).filter(lambda n: n != "__metadata__" and n.isprintable())


@st.composite
def _arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(DTYPES))
    known = "uint16" if dtype == "bfloat16" else dtype  # as many bits
    array = draw(
        hnp.arrays(known, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    ).view(dtype)
    return array.T if draw(st.booleans()) else array


@settings(max_examples=60)
@given(variables=st.dictionaries(names, _arrays(), max_size=4), step=st.integers(0, 2**60))
def test_every_array_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, variables: dict[str, Any], step: int
) -> None:
    folder = tmp_path_factory.mktemp("c") / "checkpoint"
    save(Checkpoint(variables, step), folder)
    back = load(folder)
    assert back.step == step and set(back.variables) == set(variables)
    for name, value in variables.items():
        got = back.variables[name]
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert got.tobytes() == value.tobytes()
    assert [p.name for p in folder.parent.iterdir()] == ["checkpoint"]


def _make_checkpoint(value: float = 1.0) -> Checkpoint:
    return Checkpoint({"w": np.full(4, value, "float32")}, 3)


def test_any_reader_of_safetensors_opens_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    save(_make_checkpoint(), tmp_path / "c")
    assert load_file(tmp_path / "c" / STATE)["w"].tolist() == [1, 1, 1, 1]
    assert json.loads((tmp_path / "c" / MANIFEST).read_text())["variables"] == {
        "w": ["float32", [4]]
    }


def test_numpy_reads_16_bit_floats_once_it_knows_them(tmp_path: Path) -> None:
    """As docs/operations/checkpoints.md says: without graphflow, after `import ml_dtypes`."""
    save(Checkpoint({"b": np.arange(3).astype(BFLOAT16)}, 0), tmp_path / "c")
    script = f"""
import sys
from safetensors.numpy import load_file
import ml_dtypes
found = load_file({str(tmp_path / "c" / STATE)!r})["b"]
assert "graphflow" not in sys.modules
print(found.dtype, found.tolist())
"""
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert ran.stdout == "bfloat16 [0.0, 1.0, 2.0]\n"
    page = (
        Path(__file__).resolve().parents[3] / "docs" / "operations" / "checkpoints.md"
    ).read_text()
    assert "after `import ml_dtypes`" in page


def test_complex_numbers_are_pairs_of_floats_and_16_bit_floats_themselves(tmp_path: Path) -> None:
    from safetensors import safe_open

    z = np.array([[1 + 2j, 3 - 4j]], "complex64")
    save(Checkpoint({"z": z, "b": np.ones(3, BFLOAT16)}, 0), tmp_path / "c")
    with safe_open(tmp_path / "c" / STATE, "numpy") as file:
        assert file.get_tensor("z").tolist() == [[[1, 2], [3, -4]]]
        assert file.get_slice("b").get_dtype() == "BF16"
        assert json.loads(file.metadata()["complex"]) == ["z"]
    back = load(tmp_path / "c").variables
    assert back["z"].tolist() == z.tolist() and back["b"].dtype == BFLOAT16


def test_saving_over_a_checkpoint_replaces_it_and_leaves_nothing_beside(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        save(_make_checkpoint(value), tmp_path / "a" / "b")
    assert load(tmp_path / "a" / "b").variables["w"][0] == 3
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_relative_folders_are_taken_from_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(_make_checkpoint(), "here/")
    assert load("./here").step == 3
    with pytest.raises(CheckpointError, match="no checkpoint"):
        save(_make_checkpoint(), ".")
    with pytest.raises(CheckpointError, match="not a valid folder name"):
        save(_make_checkpoint(), "")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointError, match="a folder that is gone"):
        save(_make_checkpoint(), "anywhere")


# What is no checkpoint ------------------------------------------------------------------------


def _remove_folder(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def _remove_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _flip_bit(name: str, at: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(bytes(data))

    return damage


def _truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def _manifest(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest.update(changes)
        (folder / MANIFEST).write_text(
            json.dumps({k: v for k, v in manifest.items() if v is not None})
        )

    return damage


def _replace_by_file(folder: Path) -> None:
    _remove_folder(folder)
    folder.write_text("x")


DAMAGES = {
    "missing": (_remove_folder, "no checkpoint"),
    "a file": (_replace_by_file, "cannot read"),
    "no state": (_remove_file(STATE), "missing"),
    "no manifest": (_remove_file(MANIFEST), "no checkpoint"),
    "a flipped bit": (_flip_bit(STATE, -1), "digest"),
    "a flipped bit in the header": (_flip_bit(STATE, 12), "digest"),
    "a truncated state": (_truncate(STATE, 10), "has 10 bytes"),
    "an empty state": (_truncate(STATE, 0), "has 0 bytes"),
    "a truncated manifest": (_truncate(MANIFEST, 20), "cannot read"),
    "a manifest that is no text": (
        lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe"),
        "cannot read",
    ),
    "a manifest that is a list": (lambda f: (f / MANIFEST).write_text("[]"), "cannot read"),
    "no digest": (_manifest(digest=None), "cannot read"),
    "a newer format": (_manifest(format=99, digest=None), "format 99.*update graphflow"),
    "a format that is no number": (_manifest(format="x"), "cannot read"),
}


LIES: dict[str, dict[str, Any]] = {
    "a step below zero": {"step": -1},
    "a step that no machine counts to": {"step": 10**30},
    "a step that is no whole number": {"step": 1.5},
    "a step that is a truth": {"step": True},
    "an epoch of text": {"epoch": "2"},
    "no variables": {"variables": None},
    "a size below zero": {"variables": {"w": ["float32", [-2]]}},
    "a size that no memory has": {"variables": {"w": ["float32", [10**12]]}},
    "a dtype of objects": {"variables": {"w": ["O", [2]]}},
    "sizes of text": {"variables": {"w": ["float32", "22"]}},
    "pieces of nothing": {"pieces": {"v": [["w", [[0, 2]]]]}},
    "a piece beyond its variable": {"pieces": {"w": [["w", [[1, 3]]]]}},
    "a piece of another number of axes": {"pieces": {"w": [["w", [[0, 2], [0, 1]]]]}},
    "a piece that ends before it begins": {"pieces": {"w": [["w", [[2, 0]]]]}},
    "a piece of text": {"pieces": {"w": [["w", [["0", 2]]]]}},
    "a piece without a name": {"pieces": {"w": [[None, [[0, 2]]]]}},
    "too few pieces": {
        "variables": {"w": ["float32", [10**12]]}, "pieces": {"w": [["w", [[0, 2]]]]},
    },
    "a shard without a name": {"shards": [{"file": None}]},
    "a shard of another folder": {"shards": [{"file": "../c/worker-0.safetensors"}]},
    "a shard of a name with a zero": {"shards": [{"file": "a\0b"}]},
    "a shard of half a letter": {"shards": [{"file": "\ud800"}]},
    "a shard of nothing known": {"shards": [{"variables": ["w", []]}]},
    "a shard of so many bytes": {"shards": [{"bytes": -1}]},
}  # fmt: skip


@pytest.mark.fault(38, 40)
@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_lies_is_refused_though_its_digest_is_right(
    name: str, tmp_path: Path
) -> None:
    """Not only damage: whoever writes a manifest writes its digest, too."""
    from graphflow.runtime.checkpoint.manifest import _digest

    save(Checkpoint({"w": np.ones(2, "float32")}, 4), tmp_path / "c")
    told = json.loads((tmp_path / "c" / MANIFEST).read_text())
    del told["digest"]
    lie = dict(LIES[name])
    if "shards" in lie:
        lie["shards"] = [{**told["shards"][0], **lie["shards"][0]}]
    told |= lie
    (tmp_path / "c" / MANIFEST).write_text(json.dumps({**told, "digest": _digest(told)}))
    with pytest.raises(CheckpointError, match="cannot read checkpoint"):
        load(tmp_path / "c")


def test_a_manifest_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    save(Checkpoint({"w": np.ones(2, "float32")}, 4), tmp_path / "c")
    text = (tmp_path / "c" / MANIFEST).read_text()
    (tmp_path / "c" / MANIFEST).write_text(text.replace('"step": 4', '"step": 3, "step": 4'))
    with pytest.raises(CheckpointError, match="duplicate key"):
        load(tmp_path / "c")


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    damage, told = DAMAGES[name]
    w = gf.variable([1.0, 2.0], name="w")
    with gf.Session() as s:
        s.run(gf.assign(w, w + 1))
        s.save(tmp_path / "c")
        s.run(gf.assign(w, w * 10))
        damage(tmp_path / "c")
        with pytest.raises(CheckpointError, match=told) as caught:
            s.load(tmp_path / "c")
        assert str(tmp_path / "c") in str(caught.value)
        assert s.get(w).tolist() == [20, 30]
        assert s.run(w).tolist() == [20, 30]


def test_a_folder_that_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("precious")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        save(_make_checkpoint(), tmp_path / "thesis")
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(CheckpointError):
            save(_make_checkpoint(), place)
    assert (tmp_path / "thesis" / "chapter1").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "thesis"]


def test_an_empty_folder_and_what_a_link_leads_to_are_places_for_a_checkpoint(
    tmp_path: Path,
) -> None:
    large = tmp_path / "large disk"
    (large / "empty").mkdir(parents=True)
    latest = tmp_path / "latest"
    latest.symlink_to(large / "empty")
    for value in (1.0, 2.0):
        save(_make_checkpoint(value), latest)
        assert load(latest).variables["w"][0] == load(large / "empty").variables["w"][0] == value
    assert latest.is_symlink() and [p.name for p in large.iterdir()] == ["empty"]


@pytest.mark.parametrize("what", ["pipe", "link to nothing", "link to a folder", "file"])
def test_whatever_has_the_name_of_a_checkpoint_makes_room_and_is_not_waited_for(
    what: str, tmp_path: Path
) -> None:
    root, target = tmp_path / "root", tmp_path / "root" / "step-00000003"
    root.mkdir()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("precious")
    if what == "pipe":
        os.mkfifo(target)
    elif what == "file":
        target.write_text("x")
    else:
        target.symlink_to(tmp_path / ("thesis" if "folder" in what else "nothing"))
    kept = CheckpointStore(root, keep=1)
    draft = kept.begin(3)
    draft.write(STATE, _make_checkpoint().variables)
    draft.commit(_make_checkpoint().signatures)
    assert load(target).step == 3
    assert sorted(p.name for p in root.iterdir()) == ["session.json", "step-00000003"]
    assert (tmp_path / "thesis" / "chapter1").read_text() == "precious"


def test_a_name_that_the_format_keeps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rename"):
        save(Checkpoint({"__metadata__": np.ones(1)}, 0), tmp_path / "c")


# Crashes --------------------------------------------------------------------------------------


class _Crash(BaseException):
    """The process ends here."""


CALLS = ["mkdir", "open", "write", "fsync", "rename"]
CHANGING = [*CALLS, "unlink", "rmdir"]


def _fail_at_call(call: str, number: int, error: BaseException) -> Callable[..., Any]:
    original, seen = getattr(os, call), 0

    def fail_at_number(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == number:
            raise error
        return original(*args, **kwargs)

    return fail_at_number


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), _Crash()], ids=["full", "crash"]
)
@pytest.mark.parametrize(("call", "number"), [("mkdir", 1), *itertools.product(CALLS[1:], (1, 2))])
def test_whatever_stops_a_save_the_old_checkpoint_is_there(
    call: str, number: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "c"
    save(_make_checkpoint(1.0), target)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _fail_at_call(call, number, error))
        with pytest.raises(CheckpointError if isinstance(error, OSError) else _Crash):
            save(_make_checkpoint(2.0), target)
    assert load(target).variables["w"][0] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def _exit_at_call(patch: pytest.MonkeyPatch, at: tuple[int, str]) -> list[str]:
    """Let the process end at a call that changes the disk: before it, after it, or, where it
    writes, in its midst. The calls are noted."""
    calls: list[str] = []

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and args[1] & os.O_NONBLOCK:  # to read, which changes nothing
                return original(*args, **kwargs)
            calls.append(name)
            number, when = at
            here = len(calls) == number + 1
            if here and when == "before":
                os._exit(9)
            if here and when == "torn" and name == "write":
                original(args[0], bytes(args[1])[: len(args[1]) // 2])
                os._exit(9)
            result = original(*args, **kwargs)
            if here and when == "after":
                os._exit(9)
            return result

        return call

    for name in CHANGING:
        patch.setattr(os, name, wrap(name, getattr(os, name)))
    return calls


def _is_killed_at(work: Callable[[], None], at: tuple[int, str]) -> bool:
    """Do some work in a process that ends at a call; whether it came so far."""
    child = os.fork()
    if child == 0:
        try:
            _exit_at_call(pytest.MonkeyPatch(), at)
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 9


def _points(work: Callable[[], None]) -> list[tuple[int, str]]:
    with pytest.MonkeyPatch.context() as patch:
        calls = _exit_at_call(patch, (-1, ""))
        work()
    assert {"mkdir", "write", "fsync", "rename"} <= set(calls)
    return [
        (number, when)
        for number, call in enumerate(calls)
        for when in ("before", "after", *(["torn"] if call == "write" else []))
    ]


@pytest.mark.fault(37)
def test_a_process_killed_at_any_call_of_a_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    target = tmp_path / "run[1]"
    two = {"worker-0.safetensors": ["w"], "worker-1.safetensors": ["b"]}

    def write(value: float) -> None:
        both = {"w": np.full(4, value, "float32"), "b": np.full((2, 3), value, "int8")}
        save(Checkpoint(both, int(value)), target, two)

    write(1.0)
    points = _points(lambda: write(1.0))
    found = []
    for at in points:
        write(1.0)
        assert _is_killed_at(lambda: write(2.0), at), at
        there = load(target)
        found.append(there.step)
        assert {int(v.flat[0]) for v in there.variables.values()} == {there.step}, at
    assert sorted(found) == found and set(found) == {1, 2}  # the old, and from some call on the new
    write(3.0)
    assert [p.name for p in tmp_path.iterdir()] == [
        target.name
    ]  # no crash leaves anything for long


@pytest.mark.slow
@pytest.mark.fault(37)
def test_a_directory_of_checkpoints_survives_a_kill_at_any_call(tmp_path: Path) -> None:
    """Writing the third of two that are kept: the newest that is there is always whole."""

    def third(root: Path) -> None:
        store = CheckpointStore(root, keep=2)
        draft = store.begin(3)
        draft.write("worker-0.safetensors", {"w": np.full(4, 3, "float32")})
        draft.commit({"w": ("float32", (4,))})
        store.prune()

    def two(name: str) -> Path:
        root = tmp_path / name
        for step in (1, 2):
            save(Checkpoint({"w": np.full(4, step, "float32")}, step), root / f"step-{step:08d}")
        return root

    whole = two("whole")
    found = []
    for at in _points(lambda: third(whole)):
        root = two(f"{at[0]}{at[1]}")
        assert _is_killed_at(partial(third, root), at), at
        skipped: list[str] = []
        newest = CheckpointStore(root, keep=2).newest(skipped.append)
        assert newest is not None
        there = newest[1]
        assert int(there.variables["w"][0]) == there.step, at
        assert not skipped, skipped
        for each in CheckpointStore(root, keep=2).folders():
            load(each)  # none is half removed
        found.append(there.step)
        left = [p.name for p in root.iterdir() if p.name.startswith(".")]
        assert not left, left
    assert sorted(found) == found and set(found) == {2, 3}


@pytest.mark.slow  # a process is forked for each call
@pytest.mark.fault(37)
def test_a_session_that_goes_back_survives_a_kill_at_any_call(tmp_path: Path) -> None:
    """While it loads, the line before is there or what is loaded; from then on only the latter, and
    what followed from it, though the line before has higher steps and some of the same."""
    count = gf.variable(np.zeros(3, "float32"), name="count")
    add = gf.assign(count, count + 1.0)
    loaded = mmap.mmap(-1, 1)  # shared with forks

    def train(s: gf.Session, steps: int) -> None:
        for _ in range(steps):
            s.run(add)
            s._recovery.wait()  # type: ignore[union-attr]

    def load_older_checkpoint(root: Path) -> None:
        with gf.Session(checkpoint=root, every=2) as s:
            s.load(tmp_path / "best")
            loaded[0] = 1
            s.set(count, [100, 100, 100])
            train(s, 2)

    with gf.Session(checkpoint=tmp_path / "before", every=2) as s:
        train(s, 3)
        s.save(tmp_path / "best")
        train(s, 2)
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    found = []
    for at in _points(lambda: load_older_checkpoint(tmp_path / "whole")):
        loaded[0] = 0
        root = tmp_path / f"{at[0]}{at[1]}"
        shutil.copytree(tmp_path / "before", root)
        assert _is_killed_at(partial(load_older_checkpoint, root), at), at
        there = newest(root, pytest.fail)
        assert there is not None
        step, value = there[1].step, int(there[1].variables["count"][0])
        new = step == value == 3 or value == 100 + step - 3
        assert new or (step == value == 5 and not loaded[0]), (at, step, value)
        found.append((new, step))
    assert sorted(found) == found
    assert list(dict.fromkeys(found)) == [(False, 5), (True, 3), (True, 4), (True, 5)]


@pytest.mark.fault(37)
def test_what_a_session_is_about_to_put_in_place_while_another_takes_over_is_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was there first has looked whether the directory is still its own, and writes."""
    first = CheckpointStore(tmp_path, keep=2)
    draft = first.begin(1)
    draft.write("worker-0.safetensors", {"w": np.full(4, 1, "float32")})
    shutil_rmtree = files.shutil.rmtree

    def meanwhile(folder: Path, **options: Any) -> None:
        for place in sorted(Path(folder).iterdir())[:1]:
            place.unlink()  # half removed
        with pytest.raises(OSError):
            draft.commit({"w": ("float32", (4,))})
        shutil_rmtree(folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", meanwhile)
        second = CheckpointStore(tmp_path, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["session.json"]
    assert second.newest(pytest.fail) is None
    with pytest.raises(StaleEpoch):
        first.begin(2)


# Damage ---------------------------------------------------------------------------------------


def _two_shards(folder: Path, step: int) -> None:
    variables = {"a": np.full(3, step, "float32"), "b": np.full(5, step, "int64")}
    divided = {"worker-0.safetensors": ["a"], "worker-1.safetensors": ["b"]}
    save(Checkpoint(variables, step), folder, divided)


@pytest.mark.fault(38)
def test_every_flipped_bit_and_every_truncation_is_told(tmp_path: Path) -> None:
    _two_shards(tmp_path / "c", 7)
    for file in sorted((tmp_path / "c").iterdir()):
        whole = file.read_bytes()
        for at in range(0, len(whole), 5):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << (at % 8)
            file.write_bytes(bytes(damaged))
            try:
                back = load(tmp_path / "c")
            except CheckpointError:
                continue
            # Only what JSON does not care for, between its words, may change unseen.
            assert file.name == MANIFEST and back.step == 7, (file, at)
            assert back.variables["b"].tolist() == [7] * 5
        for size in (0, 1, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:size])
            with pytest.raises(CheckpointError, match="use an older one"):
                load(tmp_path / "c")
        file.write_bytes(whole)
    assert load(tmp_path / "c").step == 7


@pytest.mark.fault(38)
@pytest.mark.parametrize("file", [MANIFEST, "worker-1.safetensors"])
def test_what_is_no_file_or_far_too_large_is_told_and_not_waited_for(
    file: str, tmp_path: Path
) -> None:
    _two_shards(tmp_path / "step-00000001", 1)
    _two_shards(tmp_path / "step-00000002", 2)
    place = tmp_path / "step-00000002" / file
    place.unlink()
    os.mkfifo(place)
    writer = os.open(place, os.O_RDWR | os.O_NONBLOCK)  # one that says nothing
    ends = threading.Timer(1.0, os.close, (writer,))
    ends.start()
    with pytest.raises(CheckpointError, match="Not a regular file"):
        load(tmp_path / "step-00000002")
    skipped: list[str] = []
    there = CheckpointStore(tmp_path, keep=3).newest(skipped.append)
    assert there is not None and there[1].step == 1 and file in skipped[0]
    ends.join()
    place.unlink()
    place.touch()
    os.truncate(place, 1 << 40)
    with pytest.raises(CheckpointError, match=str(1 << 40)):
        load(tmp_path / "step-00000002")


@pytest.mark.fault(39)
def test_a_shard_that_is_missing_or_of_another_step_is_named(tmp_path: Path) -> None:
    _two_shards(tmp_path / "old", 100)
    _two_shards(tmp_path / "c", 120)
    shard = tmp_path / "c" / "worker-1.safetensors"
    shard.write_bytes((tmp_path / "old" / "worker-1.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"worker-1\.safetensors is of step 100, not 120"):
        load(tmp_path / "c")
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"shard worker-1\.safetensors is missing"):
        load(tmp_path / "c")


@pytest.mark.fault(38, 39, 40)
def test_the_newest_checkpoint_that_is_whole_is_taken_and_the_others_are_told(
    tmp_path: Path,
) -> None:
    for step in (1, 2, 3, 4, 5):
        _two_shards(tmp_path / f"step-{step:08d}", step)
    _flip_bit("worker-0.safetensors", -1)(tmp_path / "step-00000005")
    (tmp_path / "step-00000004" / "worker-1.safetensors").unlink()
    _manifest(format=99)(tmp_path / "step-00000003")
    skipped: list[str] = []
    there = CheckpointStore(tmp_path, keep=3).newest(skipped.append)
    assert there is not None and there[0].name == "step-00000002" and there[1].step == 2
    assert ["digest" in skipped[0], "missing" in skipped[1], "format 99" in skipped[2]] == [
        True
    ] * 3
    assert [f"step-0000000{n}" in told for n, told in zip((5, 4, 3), skipped, strict=True)]


@pytest.mark.parametrize("again", [False, True], ids=["a newer one", "the same step again"])
def test_who_reads_while_another_process_goes_on_writing_gets_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """One checkpoint is kept: what is being read is gone before its last shard."""
    _two_shards(tmp_path / "step-00000001", 1)
    _two_shards(tmp_path / "step-00000007", 7)
    (tmp_path / "step-00000007" / "worker-1.safetensors").unlink()
    steps = [1, 1, 1] if again else [2, 3, 4]

    def load_overtaken(folder: Path) -> Checkpoint:
        if not steps or folder.name == "step-00000007":
            return load(folder)
        step = steps.pop(0)
        _two_shards(tmp_path / f"step-{step:08d}", step)
        if not again:
            files.remove_folder(folder)
        raise CheckpointError("a shard is missing")

    monkeypatch.setattr(store, "load", load_overtaken)
    skipped: list[str] = []
    found = newest(tmp_path, skipped.append)
    assert found is not None and found[1].step == (1 if again else 4)
    (told,) = skipped
    assert "step-00000007" in told, "which nobody has touched"


def test_a_checkpoint_of_the_first_format_is_read(tmp_path: Path) -> None:
    import hashlib

    from safetensors.numpy import save as encoded

    data = encoded({"z": np.array([[1.0, 2.0]], "float32"), "w": np.ones(3, "float16")})
    manifest = {
        "format": 1,
        "step": 12,
        "sha256": {"state.safetensors": hashlib.sha256(data).hexdigest()},
        "variables": {"z": ["complex64", [1]], "w": ["float16", [3]]},
    }
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "state.safetensors").write_bytes(data)
    (tmp_path / "c" / MANIFEST).write_text(json.dumps(manifest))
    back = load(tmp_path / "c")
    assert back.step == 12
    assert back.variables["z"].tolist() == [1 + 2j] and back.variables["w"].dtype == "float16"


def test_a_fingerprint_knows_the_model_and_not_its_placement(tmp_path: Path) -> None:
    variables = {"a": np.ones(3, "float32"), "b": np.ones((2, 2), "int8")}
    divisions: list[dict[str, list[str]]] = [
        {"worker-0.safetensors": ["a", "b"]},
        {"worker-1.safetensors": ["b"], "worker-0.safetensors": ["a"]},
    ]
    prints = set()
    for number, divided in enumerate(divisions):
        save(Checkpoint(variables, 1), tmp_path / str(number), divided)
        prints.add(read_manifest(tmp_path / str(number)).fingerprint)
    assert len(prints) == 1
    for other in ({"a": ("float32", (4,))}, {"a": ("float32", (3,))}, {"c": ("float32", (3,))}):
        assert fingerprint(other) not in prints


def test_differences_are_listed_by_kind() -> None:
    wanted = {"w": ("float32", (3, 4)), "b": ("float32", (4,)), "m": ("int64", ())}
    there = {"w": ("float32", (3, 5)), "b": ("float16", (4,)), "x": ("bool", (1,))}
    told = differences(wanted, there)
    assert "w is float32(3, 4) and float32(3, 5) in the checkpoint" in told
    assert "b is float32(4,) and float16(4,) in the checkpoint" in told
    assert "missing in the checkpoint: m int64()" in told and "unexpected there: x bool(1,)" in told
    assert differences(wanted, wanted) == ""
    assert "and 12 more" in differences({}, {f"v{n}": ("bool", ()) for n in range(20)})


# What a worker writes -------------------------------------------------------------------------

FOLDER = ".step-00000007.partial-0123456789abcdef"
HOSTILE = [
    "..", "../c", "/etc", "a/b", "a\\b", "a\0b", "", ".", "step-00000007", FOLDER + "/..",
    FOLDER + "\n", FOLDER.upper(), "．．/x", "x" * 5000, ".step-00000007.partial-0123456789abcde/",
]  # fmt: skip


@pytest.mark.fault(34)
@pytest.mark.parametrize("name", HOSTILE, ids=lambda n: repr(n[:20]))
def test_a_name_from_the_wire_that_is_none_of_ours_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "root" / FOLDER).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for folder, file in ((name, "worker-0.safetensors"), (FOLDER, name)):
        with pytest.raises(ProtocolError, match="does not name"):
            write_under(tmp_path / "root", folder, file, {"w": np.ones(1)}, 7)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.fault(34)
def test_a_worker_follows_no_link_and_overwrites_nothing(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / FOLDER).symlink_to(elsewhere)
    shard = "worker-0.safetensors"
    assert write_under(root, FOLDER, shard, {"w": np.ones(1)}, 7) is None
    (root / FOLDER).unlink()
    (root / FOLDER).mkdir()
    (root / FOLDER / shard).symlink_to(elsewhere / "file")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_under(root, FOLDER, shard, {"w": np.ones(1)}, 7)
    assert not list(elsewhere.iterdir())
    assert write_under(None, FOLDER, shard, {"w": np.ones(1)}, 7) is None


# A directory of them --------------------------------------------------------------------------


def test_a_directory_keeps_the_last_few_and_a_new_start_takes_the_next_epoch(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path / "a" / "ckpt", keep=2)
    for step in (5, 10, 15, 10):
        draft = store.begin(step)
        draft.write("worker-0.safetensors", {"w": np.full(2, step, "float32")})
        draft.commit({"w": ("float32", (2,))})
        store.prune()
    assert [f.name for f in store.folders()] == ["step-00000015", "step-00000010"]
    again = CheckpointStore(tmp_path / "a" / "ckpt", keep=2)
    assert (again.session, again.epoch) == (store.session, store.epoch + 1)
    with pytest.raises(StaleEpoch, match="taken over"):
        store.begin(20)
    assert again.begin(20).epoch == again.epoch


def test_what_cannot_be_read_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _two_shards(tmp_path / f"step-{step:08d}", step)
    for step in (3, 4):
        (tmp_path / f"step-{step:08d}" / MANIFEST).write_text("torn")
    store = CheckpointStore(tmp_path, keep=2)
    store.prune()
    assert len(store.folders()) == 4
    newest = store.newest(lambda told: None)
    assert newest is not None and newest[1].step == 2


def test_a_checkpoint_whose_variables_are_in_no_shard_is_not_put_in_its_place(
    tmp_path: Path,
) -> None:
    draft = CheckpointStore(tmp_path, keep=2).begin(3)
    draft.write("worker-0.safetensors", {"w": np.ones(2, "float32")})
    kinds = dict.fromkeys(("w", "b"), ("float32", (2,)))
    with pytest.raises(CheckpointError, match="no shard holds b"):
        draft.commit(kinds)
    draft.discard()
    assert [each.name for each in tmp_path.iterdir()] == ["session.json"]


def test_the_note_of_a_session_is_for_its_owner_alone(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, keep=1)
    assert (tmp_path / "session.json").stat().st_mode & 0o777 == 0o600


DRAWN = "0123456789abcdef"
THEIRS = [
    ".thesis.old-2023", ".bashrc.old-1", ".data.partial-download", ".x.gone-away",
    f".thesis.old-{DRAWN}", f".best.partial-{DRAWN}", f".best.old-{DRAWN}", f".best.gone-{DRAWN}",
    f".session.json.old-{DRAWN}", f".session.json.bak.partial-{DRAWN}", f".step-1.partial-{DRAWN}",
    f".step-00000001.partial-{DRAWN[1:]}", f".step-00000001.old-{DRAWN}0",
    f".step-00000001.gone-{DRAWN.upper()}", f".step-00000001.kept-{DRAWN}",
    f"step-00000001.partial-{DRAWN}", f".step-0000000a.old-{DRAWN}", f"x.step-00000001.old-{DRAWN}",
    f".step-00000001.old-{DRAWN}\n", f".step-00000001.x.old-{DRAWN}",
    f"..step-00000001.old-{DRAWN}",
]  # fmt: skip
"""Names that look like those of what a crash left of a session, and are none."""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_nothing_in_the_directory_of_a_session_is_touched_but_its_own(
    kind: str, tmp_path: Path
) -> None:
    for name in THEIRS:
        if kind == "file":
            (tmp_path / name).write_text(name)
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "precious").write_text(name)
    count = gf.variable(np.zeros(3, "float32"), name="count")
    add = gf.assign(count, count + 1.0)
    for _ in range(2):
        with gf.Session(checkpoint=tmp_path, every=1, keep=1) as s:
            s.run(add)
            s.save()
    assert {p.name for p in tmp_path.iterdir()} == {*THEIRS, "session.json", "step-00000002"}
    for name in THEIRS:
        place = tmp_path / name if kind == "file" else tmp_path / name / "precious"
        assert place.read_text() == name


def test_what_another_process_saves_in_the_directory_of_a_session_comes_to_its_end(
    tmp_path: Path,
) -> None:
    draft = CheckpointDraft.begin(tmp_path / "best", 3)
    for step in (1, 2):
        store = CheckpointStore(tmp_path, keep=1)
        store.begin(step).discard()
    draft.write(STATE, _make_checkpoint().variables)
    draft.commit(_make_checkpoint().signatures)
    assert load(tmp_path / "best").step == 3


def test_a_save_removes_what_a_crash_left_of_its_own_place_and_nothing_else(tmp_path: Path) -> None:
    theirs = [".best.partial-download", ".best.old-1", f".best2.partial-{DRAWN}", ".best.gone-by"]
    for name in [*theirs, f".best.partial-{DRAWN}", f".best.old-{DRAWN}"]:
        save(_make_checkpoint(), tmp_path / name)
    assert load(tmp_path / "best").step == 3  # it had made room
    save(_make_checkpoint(), tmp_path / "best")
    assert {p.name for p in tmp_path.iterdir()} == {*theirs, "best"}


def test_a_directory_for_checkpoints_is_no_checkpoint_and_no_file(tmp_path: Path) -> None:
    _two_shards(tmp_path / "one", 3)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="one checkpoint"):
        CheckpointStore(tmp_path / "one", keep=1)
    with pytest.raises(CheckpointError, match="cannot keep checkpoints"):
        CheckpointStore(tmp_path / "file", keep=1)
    for wrong in (None, 3, b"x", "a\0b"):
        with pytest.raises(CheckpointError):
            CheckpointStore(wrong, keep=1)  # type: ignore[arg-type]


# Sessions -------------------------------------------------------------------------------------


@pytest.fixture
def model() -> Iterator[tuple[gf.Tensor, gf.Tensor, gf.Tensor]]:
    with gf.random.seed(7):
        x = gf.placeholder("float32", (None, 3), name="x")
        w = gf.variable(gf.init.glorot((3, 2)), name="w")
        hidden = gf.nn.dropout(gf.tanh(x @ w + gf.variable(np.zeros(2, "float32"), name="b")), 0.5)
        loss = gf.mean(gf.square(hidden - gf.random.normal((2,))))
        yield x, loss, gf.optim.Adam(0.1).minimize(loss)


def _train(s: gf.Session, model: tuple[gf.Tensor, ...], steps: int) -> list[float]:
    x, loss, train = model
    feed = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
    return [float(s.run([loss, train], {x: feed})[0]) for _ in range(steps)]


def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    model: tuple[gf.Tensor, ...], tmp_path: Path
) -> None:
    with gf.Session() as s:
        wanted = _train(s, model, 10)
    with gf.Session() as s:
        first = _train(s, model, 5)
        s.save(tmp_path / "c")
        _train(s, model, 2)
        s.load(tmp_path / "c")
        assert first + _train(s, model, 5) == wanted
    with gf.Session() as s:
        s.load(tmp_path / "c")
        assert _train(s, model, 5) == wanted[5:]
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"])) as s:
        _train(s, model, 3)
        s.load(tmp_path / "c")
        assert _train(s, model, 5) == wanted[5:]


def test_a_checkpoint_that_does_not_fit_the_variables_changes_nothing(tmp_path: Path) -> None:
    w, b = gf.variable([1.0, 2.0], name="w"), gf.variable([3.0], name="b")
    with gf.Session() as s:
        s.run(gf.assign(w, w + 1))
        s.save(tmp_path / "only w")
    with gf.Session() as s:
        s.run([gf.assign(w, w * 5), gf.assign(b, b * 5)])
        with pytest.raises(CheckpointError, match=r"missing in the checkpoint: b float32\(1,\)"):
            s.load(tmp_path / "only w")
        assert s.run([w, b])[0].tolist() == [5, 10]
    for other in (gf.variable([1.0, 2.0, 3.0], name="w"), gf.variable([1, 2], name="w")):
        with gf.Session() as s:
            s.run(gf.assign(other, other + other))
            with pytest.raises(CheckpointError, match=r"'w' \(made at .*test_checkpoint\.py:\d+\)"):
                s.load(tmp_path / "only w")
            assert np.array_equal(s.get(other), 2 * np.asarray(other.node.attrs["initial"]))


def test_a_loaded_value_that_does_not_fit_is_told_when_the_variable_is_first_used(
    tmp_path: Path,
) -> None:
    w = gf.variable([1.0, 2.0], name="w")
    with gf.Session() as s:
        s.run(w)
        s.save(tmp_path / "c")
    other = gf.variable([1.0, 2.0, 3.0], name="w")
    with gf.Session() as s:
        s.load(tmp_path / "c")
        for use in (lambda: s.run(other), lambda: s.run(other), lambda: s.get(other)):
            with pytest.raises(CheckpointError, match="'w'"):
                use()
        s.set(other, [7, 8, 9])
        assert s.run(other).tolist() == s.get(other).tolist() == [7, 8, 9]


def test_variables_of_a_checkpoint_that_are_not_used_are_kept(tmp_path: Path) -> None:
    w, b = gf.variable([1.0, 2.0], name="w"), gf.variable([3.0], name="b")
    with gf.Session() as s:
        s.run([gf.assign(w, w + 1), gf.assign(b, b + 1)])
        s.save(tmp_path / "first")
    with gf.Session() as s:
        s.load(tmp_path / "first")
        s.run(w)
        s.save(tmp_path / "second")
    with gf.Session() as s:
        s.load(tmp_path / "second")
        assert s.get(b).tolist() == [4] and s.get(w).tolist() == [2, 3]


def test_values_set_before_any_step_are_saved(tmp_path: Path) -> None:
    w = gf.variable([1.0, 2.0], name="w")
    with gf.Session() as s:
        s.set(w, [5, 6])
        s.save(tmp_path / "c")
        with pytest.raises(VariableError):
            s.set(w, [5, 6, 7])
        assert s.run(w).tolist() == [5, 6]
    assert load(tmp_path / "c").variables["w"].tolist() == [5, 6]
