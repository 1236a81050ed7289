"""The reference of the site has an entry for each public name, command and variable."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import graphflow as gf
from graphflow.base.environment import DESCRIPTIONS
from tests.house.sources import ROOT, sources


def load_pages() -> ModuleType:
    """Return docs/reference_pages.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "reference_pages", ROOT / "docs/reference_pages.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each page of the reference, by its name."""
    folder = tmp_path_factory.mktemp("reference")
    load_pages().write_pages(folder)
    return {page.stem: page.read_text(encoding="utf-8") for page in folder.iterdir()}


def test_each_public_name_has_an_entry(pages: dict[str, str]) -> None:
    namespaces = load_pages().NAMESPACES
    modules = {name for name in gf.__all__ if isinstance(getattr(gf, name), ModuleType)}
    assert modules <= {*namespaces}, "each public module has a page"
    missing = []
    for namespace in namespaces:
        module = load_pages().module_of(namespace)
        page = pages[f"gf.{namespace}" if namespace else "gf"]
        for name in getattr(module, "__all__", ()):
            if isinstance(getattr(module, name), ModuleType):
                continue
            if not re.search(rf"[.`]{re.escape(name)}[`\n]", page):
                missing.append(f"{namespace}.{name}")
    assert missing == []


def test_each_public_name_has_a_docstring_of_its_own(pages: dict[str, str]) -> None:
    reference = load_pages()
    bare = []
    for namespace in reference.NAMESPACES:
        module = reference.module_of(namespace)
        for name in reference.public_names(namespace):
            value = getattr(module, name)
            if callable(value) and not (value.__doc__ or "").strip():
                bare.append(f"{namespace}.{name}")
    assert bare == []


def test_each_variable_and_command_is_described(pages: dict[str, str]) -> None:
    named = re.compile(r"\bGRAPHFLOW_[A-Z][A-Z_]*\b")
    found = {name for source in sources() for name in named.findall(source.text)}
    assert found == {*DESCRIPTIONS}
    assert all(f"`{name}`" in pages["environment"] for name in DESCRIPTIONS)
    commands = (
        "worker",
        "run",
        "plan",
        "status",
        "devices",
        "calibrate",
        "doctor",
        "cache",
        "keys new",
    )
    assert all(f"`graphflow {command}`" in pages["cli"] for command in commands)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(module, reason="pip install '.[docs]', or run make docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "gf.nn.html").stat().st_size > 50_000
