"""Pages: their Python runs, and prints what they say; the files that they name are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from fnmatch import filter as matching
from pathlib import Path

import pytest

from tests.house.sources import ROOT, sources

SLOW = pytest.mark.slow  # it plans for dozens of clusters, and for a thousand GPUs
PAGES = ["parallel", "pipelines", "layers", pytest.param("whatif", marks=SLOW)]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n```\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 2
    script = tmp_path / f"{page}.py"
    script.write_text("\n".join(code for code, _ in blocks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=100,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for _, printed in blocks:
        assert printed in done.stdout


def test_every_link_of_the_docs_leads_somewhere() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


FOLDERS = "tests|benchmarks|examples|docs|graphflow|ops|placement|runtime"
MADE = "benchmarks/results/"  # by whoever runs a benchmark


def test_every_path_that_a_page_names_is_there() -> None:
    named = re.compile(rf"`((?:{FOLDERS})/[\w*./-]+)(?:::\w+)?`")
    for page in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "SECURITY.md"]:
        for path in named.findall(page.read_text(encoding="utf-8")):
            there = path.startswith(MADE) or any(ROOT.glob(path)) or (ROOT / f"{path}.py").exists()
            assert there, f"{page.name}: {path}"


def test_every_file_in_the_rooms_of_the_architecture_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = text.partition("## Rooms")[2].partition("## Decisions")[0]
    files = {source.path.name for source in sources()}
    named = set(re.findall(r"[\w*]+\.py", rooms))
    assert len(named) > 100
    assert [name for name in sorted(named) if not matching(files, name)] == []
