"""The README's code runs, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert float(first) < 2.0, "a hundred steps of Adam learn something"
    assert any("plan of" in line for line in rest) and any("matmul" in line for line in rest)
    assert "Where each node runs" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert (tmp_path / "checkpoint" / "manifest.json").is_file()
    assert (tmp_path / "steps").is_dir()


def test_every_link_of_the_readme_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
