"""CuPy is imported whatever the user's home is: a stand-in makes its folder as CuPy does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from graphflow.errors import DeviceError
from graphflow.ops.kernels.cuda.cupy_module import import_cupy
from tests.house.sources import ROOT

CUPY = """
import os
_folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
if not os.path.isdir(_folder):
    os.makedirs(_folder, exist_ok=True)
"""
IMPORTS = """
import os
from graphflow.ops.kernels.cuda.cupy_module import import_cupy
import_cupy()
print(os.environ.get("CUPY_CACHE_DIR"), os.path.isdir(os.environ["CUPY_CACHE_DIR"]))
"""


def _find_cupy_cache(folder: Path, **environment: str) -> Path:
    """Where CuPy keeps kernels in a process with such an environment; it is there."""
    (folder / "cupy.py").write_text(CUPY)
    told = {"PYTHONPATH": f"{ROOT}:{folder}", "TMPDIR": str(folder), **environment}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=told, cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    place, is_there = done.stdout.split()
    assert is_there == "True"
    return Path(place)


def test_cupy_keeps_kernels_in_the_users_home_where_it_can(tmp_path: Path) -> None:
    assert _find_cupy_cache(tmp_path, HOME=str(tmp_path)) == tmp_path / ".cupy" / "kernel_cache"


def test_a_folder_that_the_user_has_named_is_left_alone(tmp_path: Path) -> None:
    named = tmp_path / "named"
    assert _find_cupy_cache(tmp_path, HOME="/dev/null", CUPY_CACHE_DIR=str(named)) == named


def test_without_a_home_kernels_are_kept_beside_our_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert _find_cupy_cache(tmp_path, HOME="/dev/null", GRAPHFLOW_CACHE=str(own)) == own / "cupy"


def test_where_nothing_can_be_kept_kernels_go_with_the_process(tmp_path: Path) -> None:
    place = _find_cupy_cache(tmp_path, HOME="/dev/null", GRAPHFLOW_CACHE="/dev/null")
    assert place.parent == tmp_path and place.name.startswith("graphflow-cupy-")
    assert not place.exists()


def test_a_cupy_that_cannot_be_imported_is_told_from_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cupy.py").write_text("raise OSError('libcuda is of another version')")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    with pytest.raises(DeviceError, match="CuPy cannot be imported: OSError: libcuda is of"):
        import_cupy()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"pip install 'graphflow\[gpu\]'"):
        import_cupy()
