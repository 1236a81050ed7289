"""Files of a cache are written completely or not at all, and drafts of killed processes go."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from graphflow.placement.calibration import profile_file


def test_what_a_killed_process_left_half_written_is_swept_later(tmp_path: Path) -> None:
    path = tmp_path / "machine-a.json"
    for age, name in ((0.0, f".{path.name}.a.part"), (7200.0, f".{path.name}.b.part")):
        (tmp_path / name).write_text("{")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    profile_file.write_json(path, {"a": 1})
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {path.name, f".{path.name}.a.part"}, "another process may still write that one"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_write_that_ends_early_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(profile_file.json, "dump", interrupted)
    with suppress(KeyboardInterrupt):
        profile_file.write_json(tmp_path / "machine-a.json", {"a": 1})
    assert not list(tmp_path.iterdir())
