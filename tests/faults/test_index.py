"""None of the fifty faults of docs/operations/faults.md is forgotten.

Each has a test, and the table says which.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = frozenset(range(1, 51))


def find_marked_tests() -> Iterator[tuple[int, str]]:
    """Numbers of faults, and the tests that are marked with them."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.fault(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    for number in mark.args:
                        assert isinstance(number, ast.Constant), f"{path}: {node.name}"
                        yield number.value, f"{path.name}::{node.name}"


def rows() -> dict[int, str]:
    """The rows of the table, by number."""
    text = (ROOT / "docs" / "operations" / "faults.md").read_text(encoding="utf-8")
    return {int(found[1]): found[0] for found in re.finditer(r"^\| (\d+) \|.*$", text, re.M)}


def test_each_of_the_fifty_faults_has_a_test() -> None:
    found: dict[int, list[str]] = {}
    for number, test in find_marked_tests():
        found.setdefault(number, []).append(test)
    assert set(found) == FAULTS


def test_the_table_has_a_row_for_each_fault_and_names_tests_that_show_it() -> None:
    table, tests = rows(), list(find_marked_tests())
    assert set(table) == FAULTS
    for number, row in table.items():
        files = {test.partition("::")[0] for n, test in tests if n == number}
        named = {f"{name}.py" for name in re.findall(r"`(test_\w+)`", row)}
        assert named and named <= files, f"fault {number} is shown in {sorted(files)}"
