"""Files are written whole or not at all, and drafts of killed processes go."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from graphflow.base.atomic_write import check_atomic_write, write_atomically


def test_a_file_gets_the_content_and_the_permissions_of_a_new_file(tmp_path: Path) -> None:
    path, plain = tmp_path / "a [1].json", tmp_path / "plain"
    plain.write_text("")
    write_atomically(path, "old")
    write_atomically(path, "größer")
    assert path.read_text(encoding="utf-8") == "größer"
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert {each.name for each in tmp_path.iterdir()} == {path.name, "plain"}


def test_the_draft_of_a_killed_process_is_removed_an_hour_later(tmp_path: Path) -> None:
    path = tmp_path / "machine-a.json"
    for age, name in ((0.0, f".{path.name}.a.part"), (7200.0, f".{path.name}.b.part")):
        (tmp_path / name).write_text("{")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    write_atomically(path, b"{}")
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {path.name, f".{path.name}.a.part"}, "another process may still write that one"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_write_that_ends_early_leaves_the_file_as_it_was(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: object) -> None:
        raise error

    path = tmp_path / "machine-a.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(error):
        write_atomically(path, "new")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_a_folder_is_checked_without_a_trace(tmp_path: Path) -> None:
    check_atomic_write(tmp_path / "a")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        check_atomic_write(tmp_path / "missing" / "a")
