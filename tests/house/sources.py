"""The source files of the project, parsed once for the tests that inspect them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from unicodedata import normalize

ROOT = Path(__file__).resolve().parents[2]
LINKED_PACKAGES = ("ops", "placement", "runtime")


@dataclass(frozen=True)
class Source:
    """A file of the package: its module name, path and text."""

    module: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree, parsed on first use: parsing all files takes seconds."""
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the syntax tree; a dozen tests iterate over them."""
        return tuple(ast.walk(self.tree))

    def locate(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"


def sources() -> tuple[Source, ...]:
    """Return every file under `graphflow`, those behind the three links included, each once."""
    return _read_folder("graphflow")


def sources_of_tests() -> tuple[Source, ...]:
    """Return every file under `tests`."""
    return _read_folder("tests")


@cache
def _read_folder(folder: str) -> tuple[Source, ...]:
    found = []
    for path in _files(ROOT / folder):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        found.append(Source(dotted.removesuffix(".__init__"), path, text))
    return tuple(found)


def sources_with(files: Iterable[Source], *words: str) -> Iterator[Source]:
    """Yield the files that contain one of some words, in any Unicode form.

    Only these need to be parsed by a test that looks for the names.
    """
    for source in files:
        text = source.text if source.text.isascii() else normalize("NFKC", source.text)
        if any(word in text for word in words):
            yield source


def _files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _files(entry)
        elif entry.suffix == ".py":
            yield entry


def imports(source: Source) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Yield each import statement with each full name, `a.b.c` for `from a.b import c`."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)
