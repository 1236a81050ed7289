"""Tables for people: rows of text, printed in columns or written as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from unicodedata import east_asian_width

from graphflow.placement.view.text import printable

_CELL = "padding:2px 14px 2px 0;border-top:1px solid #8884;text-align:"


@dataclass(frozen=True)
class Table:
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
        """The table as an HTML element; cells are escaped."""

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
        return f'{title}<table style="{style}">{head}{body}</table>'


def _width(text: str) -> int:
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)
