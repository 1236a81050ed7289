"""The project's own source files, read once for the tests that look at them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from unicodedata import normalize

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ops", "placement", "runtime")


@dataclass(frozen=True)
class Source:
    """One file of the package: its module as it is imported, its path, its text."""

    module: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree: parsing them all takes seconds, and not every test looks."""
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of it: a dozen tests look through them."""
        return tuple(ast.walk(self.tree))

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"


@cache
def sources() -> tuple[Source, ...]:
    """Every file under `graphflow`, those behind the three links included, each once."""
    found = []
    for path in _files(ROOT / "graphflow"):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        found.append(Source(dotted.removesuffix(".__init__"), path, text))
    return tuple(found)


def having(files: Iterable[Source], *words: str) -> Iterator[Source]:
    """Those in whose text one of some words stands, however its letters are written: only they need
    to be parsed by who looks for such names."""
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
    """Each import statement with each full name it brings in, `a.b.c` for `from a.b import c`."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)
