"""Object code on disk: kept, shared, damaged, bounded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from graphflow.ops.kernels.jit.object_cache import CacheUsage, ObjectCache, cache_folder

PROGRAM = """
import numpy as np
from graphflow.ir.op import REGISTRY
import graphflow
from graphflow.ops.kernels.jit.compiler import compiler
from graphflow.ops.kernels.fusion.region_kernels import run_op
y = run_op(REGISTRY["tanh"], np, [np.linspace(-3, 3, 50, dtype="float32")], {})
print(compiler().compiled, y.tobytes().hex())
"""


def child(folder: Path) -> tuple[int, str]:
    """How many kernels a new process compiles, and what it computes."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "GRAPHFLOW_CACHE": str(folder), "GRAPHFLOW_JIT": "on",
             "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    count, bits = done.stdout.split()
    return int(count), bits


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_compiled_and_rebuilds_what_is_damaged(
    tmp_path: Path,
) -> None:
    first = child(tmp_path)
    assert first[0] == 1
    assert child(tmp_path) == (0, first[1])
    (entry,) = (tmp_path / "kernels").iterdir()
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(content)
    assert child(tmp_path) == first
    entry.write_bytes(b"")
    assert child(tmp_path) == first
    assert child(tmp_path) == (0, first[1])


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ObjectCache(tmp_path / "file")
    store.put("key", b"data")
    assert store.get("key") is None and store.usage().entries == 0


def test_an_entry_is_what_was_put_and_one_key_is_not_another(tmp_path: Path) -> None:
    store = ObjectCache(tmp_path)
    assert store.get("a") is None
    store.put("a", b"one")
    store.put("b", b"two")
    assert (store.get("a"), store.get("b")) == (b"one", b"two")
    assert store.clear() == (CacheUsage(store.folder, 2, 2 * (32 + 3)), [])
    assert store.get("a") is None and store.usage().entries == 0


def test_what_cannot_be_removed_is_told_and_not_counted(tmp_path: Path) -> None:
    store = ObjectCache(tmp_path)
    assert store.clear() == (CacheUsage(store.folder, 0, 0), [])
    store.put("a", b"one")
    (store.folder / "b.kernel").mkdir()  # which no file's removal removes, root's neither
    usage, (error,) = store.clear()
    assert (usage.entries, usage.nbytes) == (1, 32 + 3)
    assert error.filename == str(store.folder / "b.kernel")
    assert [path.name for path in store.folder.iterdir()] == ["b.kernel"]


def test_what_several_keys_give_is_kept_once_and_gone_for_all_when_it_is_damaged(
    tmp_path: Path,
) -> None:
    store = ObjectCache(tmp_path)
    code = bytes(range(256)) * 40
    store.put_all(["a", "b", "c"], code)
    assert [store.get(key) for key in "abc"] == [code] * 3
    assert store.usage().nbytes < 2 * len(code) and store.usage().entries == 3
    (large,) = (p for p in (tmp_path / "kernels").iterdir() if p.stat().st_size > len(code))
    large.write_bytes(large.read_bytes()[:-1])
    assert [store.get(key) for key in "abc"] == [None] * 3
    store.put_all(["b", "d"], b"anew")
    assert [store.get(key) for key in "abcd"] == [None, b"anew", None, b"anew"]


def test_an_entry_that_leads_nowhere_is_none_even_out_of_the_folder(tmp_path: Path) -> None:
    store = ObjectCache(tmp_path)
    (tmp_path / "secret").write_bytes(b"x" * 100)
    for place in (b"../secret", b"", b"\xff\xfe", b"none.kernel", b"."):
        store.put("a", b"graphflow: in " + place)
        assert store.get("a") is None


def test_many_processes_that_write_little_keep_below_the_limit_together(tmp_path: Path) -> None:
    for i in range(40):
        ObjectCache(tmp_path, limit=1000).put(str(i), bytes(100))
    assert ObjectCache(tmp_path).usage().nbytes <= 1000


def test_the_entries_that_were_not_used_for_longest_make_room(tmp_path: Path) -> None:
    store = ObjectCache(tmp_path, limit=1000)
    for i in range(30):
        store.put(str(i), bytes(100))
        for path in (tmp_path / "kernels").iterdir():  # a second passes
            status = path.stat()
            os.utime(path, (status.st_atime - 1, status.st_mtime - 1))
        store.get("0")
    assert store.usage().nbytes <= 1000
    assert store.get("0") is not None and store.get("29") is not None
    assert store.get("5") is None


def test_threads_that_write_one_entry_leave_one_whole_entry(tmp_path: Path) -> None:
    data = bytes(range(256)) * 200
    stores = [ObjectCache(tmp_path) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda s=s: [s.put("k", data) for _ in range(50)]) for s in stores
    ]
    for thread in threads:
        thread.start()
    seen = [ObjectCache(tmp_path).get("k") for _ in range(200)]
    for thread in threads:
        thread.join()
    assert set(seen) <= {None, data}
    assert [p.suffix for p in (tmp_path / "kernels").iterdir()] == [".kernel"]


def test_the_users_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("GRAPHFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "graphflow"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
def test_code_from_a_folder_that_others_can_write_to_is_not_run(tmp_path: Path, mode: int) -> None:
    store = ObjectCache(tmp_path)
    store.put("key", b"code")
    assert store.get("key") == b"code"
    store.folder.chmod(mode)
    assert store.get("key") is None
    store.folder.chmod(0o755)
    assert store.get("key") == b"code"
