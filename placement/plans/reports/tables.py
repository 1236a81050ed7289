"""Tables for people: rows of text, printed in columns or written as HTML; and what cells say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from unicodedata import east_asian_width

from graphflow.base.formatting import show_seconds
from graphflow.base.html_escape import escape
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.view.text import printable

SHOWN = 20
"""Rows of a list that may be long, when it is printed."""

_CELL = "padding:2px 14px 2px 0;white-space:nowrap;border-top:1px solid #8884;text-align:"


@dataclass(frozen=True)
class TextTable:
    """A title, heads of columns, rows of cells; the first `left` columns are aligned left."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1

    def __str__(self) -> str:
        lines = [self.heads, *self.rows] if any(self.heads) else list(self.rows)
        clean = [[" ".join(printable(cell).split()) for cell in line] for line in lines]
        widths = [max(map(_width, column)) for column in zip(*clean, strict=True)]
        told = [
            "  ".join(
                cell + " " * (width - _width(cell))
                if i < self.left
                else " " * (width - _width(cell)) + cell
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in clean
        ]
        return "\n".join([*([self.title] if self.title else []), *(f"  {line}" for line in told)])

    def html(self) -> str:
        """The table as an HTML element that scrolls where it is too wide; cells are escaped."""

        def line(tag: str, cells: Sequence[str]) -> str:
            made = (
                f'<{tag} style="{_CELL}{"left" if i < self.left else "right"}">'
                f"{escape(printable(cell))}</{tag}>"
                for i, cell in enumerate(cells)
            )
            return f"<tr>{''.join(made)}</tr>"

        head = line("th", self.heads) if any(self.heads) else ""
        body = "".join(line("td", row) for row in self.rows)
        title = f"<p><b>{escape(printable(self.title))}</b></p>" if self.title else ""
        style = "border-collapse:collapse;font-variant-numeric:tabular-nums"
        table = f'<table style="{style}">{head}{body}</table>'
        return f'{title}<div style="overflow-x:auto">{table}</div>'


def _width(text: str) -> int:
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


class Printed(ABC):
    """Base of values that print themselves as a headline and tables, in a terminal or notebook."""

    @property
    @abstractmethod
    def _headline(self) -> str:
        """One line."""

    @abstractmethod
    def _tables(self) -> Iterable[TextTable]:
        """Yield the tables in the order in which they are read."""

    def __str__(self) -> str:
        return "\n".join([self._headline, *map(str, self._tables())])

    def _repr_html_(self) -> str:
        headline = escape(printable(self._headline))
        return f"<p>{headline}</p>" + "".join(table.html() for table in self._tables())


def seconds_cell(value: float | None) -> str:
    """A time; empty if there is none."""
    return "" if value is None else show_seconds(value)


def off_by(predicted: float, measured: float | None) -> str:
    """Return how much longer than predicted something took: "+12 %"."""
    if measured is None or predicted <= 0:
        return ""
    return f"{100 * (measured / predicted - 1):+.0f} %"


def busy_share(busy: float, makespan: float) -> str:
    """Seconds, and their share of a step."""
    share = f" ({100 * busy / makespan:.0f} %)" if makespan > 0 else ""
    return show_seconds(busy) + share


def more(count: int) -> str:
    """Return the end of a title for a list that is shown in part."""
    return f" ({count}, the first {SHOWN})" if count > SHOWN else ""
