"""Typed values of TOML tables, and errors that name file, line and key."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from graphflow.base.argument_checks import did_you_mean
from graphflow.errors import ClusterError
from graphflow.placement.clusters.devices import MAX_DEVICES

UNLIKELY: dict[str, tuple[float, float, str, str]] = {
    "memory": (2**16, inf, "bytes", 'memory = "16GB" for 16 gigabytes'),
    "flops": (1e6, inf, "flop/s", "flops = 1.0e12 for a teraflop/s"),
    "bandwidth": (1e3, inf, "bytes/s", "bandwidth = 1.0e9 for a gigabyte/s"),
    "backbone": (1e3, inf, "bytes/s", "backbone = 1.0e9 for a gigabyte/s"),
    "launch": (0.0, 1.0, "seconds", "launch = 5.0e-6 for 5 µs"),
    "latency": (0.0, 1.0, "seconds", "latency = 1.0e-4 for 100 µs"),
}
"""By key: the smallest and the largest plausible value, its unit, and an example."""


class TableReader:
    """Checks the values of a cluster file's tables.

    The text is kept, so that an error can name the line: TOML parsers do not keep line numbers.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.splitlines()

    def check_count(self, count: Any, place: tuple[str | None, int], key: str) -> None:
        """Fail unless `count` is a number of devices that a cluster may have."""
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_DEVICES:
            self.fail(
                f"count must be a whole number from 1 to {MAX_DEVICES}, not {count!r}", *place, key
            )

    def check_unit(self, table: dict[str, Any], section: str | None, index: int) -> None:
        """Fail if a number is surely in another unit than its key's."""
        for key, value in table.items():
            number = value if type(value) in (int, float) else 0  # others are refused elsewhere
            least, most, unit, example = UNLIKELY.get(key, (0.0, inf, "", ""))
            if 0 < number < inf and not least <= number <= most:
                told = f"{key} = {value!r} is {value:g} {unit}; write {example}"
                self.fail(told, section, index, key)

    def check_keys(
        self, table: dict[str, Any], known: tuple[str, ...], section: str | None, index: int
    ) -> None:
        """Fail if a table has a key that is not among `known`."""
        for key in table:
            if key not in known:
                hint = did_you_mean(key, known) or f"known here: {', '.join(known)}"
                self.fail(f"unknown key {key!r}; {hint}", section, index, key)
        self.check_unit(table, section, index)

    def get_typed(
        self,
        table: dict[str, Any],
        key: str,
        wanted: Any,
        default: Any,
        section: str | None,
        index: int,
    ) -> Any:
        """Return the value of a key, or `default`; fail if it is of another type."""
        value = table.get(key, default)
        if value is default:
            return value
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            name = (
                "a number"
                if isinstance(wanted, tuple)
                else {bool: "true or false", str: "a string", dict: "a table"}[wanted]
            )
            self.fail(f"{key!r} must be {name}, not {value!r}", section, index, key)
        return value

    def fail_unknown(
        self, what: str, name: Any, known: list[str], place: tuple[str, int], key: str
    ) -> NoReturn:
        """Fail because nothing has that name; the error suggests a name."""
        hint = did_you_mean(name, known) or f"there are: {', '.join(known) or 'none'}"
        self.fail(f"no {what} {name!r}; {hint}", *place, key, str(name))

    def tables(self, data: dict[str, Any], key: str) -> list[dict[str, Any]]:
        """Return the tables of an array of tables, [[key]]; fail if it is none."""
        value = data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
            self.fail(f"{key!r} must be tables: write [[{key}]]", None, 0, key)
        return value

    def fail(
        self, message: str, section: str | None, index: int, key: str | None, word: str = ""
    ) -> NoReturn:
        """Raise ClusterError with the file, the line of a key, and a message.

        `word` is in the line that is meant, if the value of the key has several lines.
        """
        raise self.error(message, section, index, key, word)

    def error(
        self, message: str, section: str | None, index: int, key: str | None, word: str = ""
    ) -> ClusterError:
        """Return the error that `fail` raises."""
        line = self.line(section, index, key)
        if line and word:  # a list may have several lines
            rest = enumerate(self.lines[line - 1 :], start=line)
            line = next((number for number, text in rest if word in text), line)
        where = f"{self.path}, line {line}" if line else str(self.path)
        return ClusterError(f"{where}: {message}")

    def line(self, section: str | None, index: int, key: str | None) -> int | None:
        """Return the line (from 1) of a key in the index-th table of a section.

        If the key is not found, return the line of the table.
        """
        header = -1
        current, seen = None, {}  # type: str | None, dict[str, int]
        for number, text in enumerate(self.lines, start=1):
            match = re.match(r"\s*\[\[?\s*([\w.\-]+)\s*\]\]?", text)
            if match:
                current = match[1]
                seen[current] = seen.get(current, -1) + 1
                if current == section and seen[current] == index:
                    header = number
            inside = current == section and (section is None or seen[section] == index)
            if key and (inside or match) and re.search(rf"(?<![\w.]){re.escape(key)}\s*=", text):
                return number
            if key and match and section is None and match[1].split(".")[0] == key:
                return number
        return header if header > 0 else None
