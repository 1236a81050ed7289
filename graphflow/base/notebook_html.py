"""Small HTML tables by which values show themselves in notebooks.

Names come from users and files. Each text is escaped, and each control character is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphflow.base.html_escape import escape

SHOWN_ROWS = 30
"""Rows of a table; a line says how many others there are."""

_MOST_CHARACTERS = 80
_CELL = "padding:2px 14px 2px 0;text-align:left;border-top:1px solid #8884"


def html_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a title and a table as HTML that needs no style sheet and no script.

    Args:
        title: a line above the table.
        heads: of the columns; () for none.
        rows: texts of cells, or what converts to them; those beyond `SHOWN_ROWS` are counted.
    """
    every = list(rows)
    head = _format_row("th", heads) if heads else ""
    body = "".join(_format_row("td", row) for row in every[:SHOWN_ROWS])
    left = len(every) - SHOWN_ROWS
    end = f"<p>and {left} more</p>" if left > 0 else ""
    return (
        f"<p><b>{_format_text(title)}</b></p>"
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse">{head}{body}</table>'
        f"</div>{end}"
    )


def _format_row(tag: str, cells: Iterable[object]) -> str:
    made = (f'<{tag} style="{_CELL}">{_format_text(cell)}</{tag}>' for cell in cells)
    return f"<tr>{''.join(made)}</tr>"


def _format_text(value: object) -> str:
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    short = text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
    return escape(short)
