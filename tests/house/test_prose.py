"""A docstring's first line stands alone: it says what is done or returned, or what a thing is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import pytest

from tests.house.sources import Source, sources

RELATIVE = re.compile(
    "(All that|Here|How|It|Its|None|Nothing|Of|So|That|There|They|Those|What|When|Where|Whether"
    "|Which|Who|Whoever|Whose)\\b(?!-)"
)
"""Words that leave a sentence without a subject of its own, as in "What is known of it."."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def dependent_first_lines(files: Iterable[Source]) -> list[str]:
    found = []
    for source in files:
        for node in source.nodes:
            if isinstance(node, Documented) and not _is_property(node):
                line = (ast.get_docstring(node) or "").partition("\n")[0]
                if RELATIVE.match(line):
                    found.append(f"{source.path}: {getattr(node, 'name', 'the module')}: {line}")
    return found


def _is_property(node: Documented) -> bool:
    """A property is a noun, which a clause may stand for."""
    decorators = [] if isinstance(node, ast.Module) else node.decorator_list
    return any("property" in ast.unparse(each) for each in decorators)


def test_first_lines_of_docstrings_name_their_subject() -> None:
    assert dependent_first_lines(sources()) == [], (
        "begin with a verb (functions) or a noun phrase (classes, modules)"
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('def f():\n  """What is known of it."""', 1),
        ('class A:\n  """Whoever asks."""', 1),
        ('"""Where each node runs."""', 1),
        ('class A:\n  @property\n  def f(self):\n    """How many there are."""', 0),
        ('def f():\n  """Return what is known of the node."""', 0),
        ('"""In-memory tables."""', 0),
    ],
)
def test_the_rule_sees_what_it_forbids(text: str, count: int) -> None:
    (source, *_) = sources()
    assert len(dependent_first_lines([Source("a", source.path, text)])) == count
