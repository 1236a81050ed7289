"""The wheel that users install: its contents, and a session that runs from it alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path

import pytest

from graphflow._version import __version__
from tests.house.sources import LINKED_PACKAGES, ROOT

COMMAND = "graphflow_command.py"  # beside the package, which it loads
SESSION = """
import numpy as np, graphflow as gf

def main():
    x = gf.placeholder("float32", (None, 4), name="x")
    with gf.device("/worker:0"):
        a = x * 2.0
    with gf.device("/worker:1"):
        b = a + 1.0
    with gf.Session(gf.Cluster.local(workers=2)) as s:
        print(s.run(b, {x: np.ones((3, 4), "float32")}).sum())
    print(gf.__file__)

if __name__ == "__main__":
    main()
"""


def _output(command: Sequence[object], cwd: Path) -> str:
    """Run a command that must succeed, without this interpreter's paths; return its output."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"PYTHONNOUSERSITE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _build(kind: str, source: Path, destination: Path) -> Path:
    command = [sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", destination]
    _output([*command, source], cwd=destination)
    (built,) = destination.glob("graphflow-*")
    return built


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("--wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and nothing else of this project.

    A path file adds the libraries that it depends on, so no network is needed. Their folders come
    after its own. Path files inside them, such as an editable install of this project, are ignored.
    """
    root = tmp_path_factory.mktemp("environment")
    _output([sys.executable, "-m", "venv", "--without-pip", root], cwd=root)
    python = root / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    _output([*pip, wheel], cwd=root)
    (packages,) = root.glob("lib/python*/site-packages")
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "lent_libraries.pth").write_text("\n".join(sorted(lent)) + "\n", encoding="utf-8")
    return root


def test_the_wheel_holds_the_four_packages_under_one_name(wheel: Path) -> None:
    names = _names(wheel)
    assert {f"graphflow/{package}/__init__.py" for package in LINKED_PACKAGES} <= names
    assert {"graphflow/__init__.py", "graphflow/py.typed"} <= names
    information = f"graphflow-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"graphflow", COMMAND, information}


def test_the_wheel_holds_every_source_file(wheel: Path) -> None:
    files = {
        str(path.relative_to(ROOT))
        for folder in ("graphflow", *(f"graphflow/{package}" for package in LINKED_PACKAGES))
        for path in (ROOT / folder).rglob("*.py")
    } | {COMMAND}
    assert {name for name in _names(wheel) if name.endswith(".py")} == files


def test_the_wheel_names_its_entry_point_and_its_licence(wheel: Path) -> None:
    information = f"graphflow-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{information}/entry_points.txt").decode()
        licence = archive.read(f"{information}/licenses/LICENSE").decode()
        metadata = HeaderParser().parsestr(archive.read(f"{information}/METADATA").decode())
    assert "graphflow = graphflow_command:main" in entry_points
    assert licence.lstrip().startswith("Apache License")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == "<3.15,>=3.11"


@pytest.mark.slow
def test_a_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    for folder in ("sdist", "unpacked", "again"):
        (tmp_path / folder).mkdir()
    sdist = _build("--sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert _names(_build("--wheel", unpacked, tmp_path / "again")) == _names(wheel)


def test_two_workers_run_a_session_from_the_wheel_alone(environment: Path, tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(SESSION, encoding="utf-8")
    total, origin = _output([environment / "bin" / "python", script], cwd=tmp_path).splitlines()
    assert total == "36.0"
    assert Path(origin).is_relative_to(environment)


def test_the_wheel_installs_the_command_line(environment: Path, tmp_path: Path) -> None:
    usage = _output([environment / "bin" / "graphflow", "--help"], cwd=tmp_path)
    for command in ("worker", "run", "plan", "devices", "calibrate"):
        assert command in usage


def test_the_citation_names_this_version() -> None:
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {__version__}" in lines
