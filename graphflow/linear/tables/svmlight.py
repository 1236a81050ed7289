"""Rows of svmlight files, block by block: text in, pieces of a CSR matrix out."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from io import BufferedReader
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import LinearModelError
from graphflow.linear.tables import decimal_loops, svmlight_loops
from graphflow.linear.tables.svmlight_loops import (
    ENTRIES,
    HARD,
    HIGHEST,
    IS_UNSORTED,
    LOWEST,
    MOST_COLUMNS,
    ROWS,
)
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

BLOCK = 1 << 18
"""Bytes of text that are read at a time; lines may be longer."""
_SHOWN = 80


@dataclass(frozen=True)
class TextRows:
    """Some rows of a file.

    Attributes:
        targets: (rows,) float64.
        offsets: (rows + 1,) int64, from 0; where each row's entries begin.
        columns, values: (entries,) int32 as in the text, float64; sorted in each row, each column
            once.
        lowest, highest: the extreme columns; of no entries, `MOST_COLUMNS` and -1.
    """

    targets: Any
    offsets: Any
    columns: Any
    values: Any
    lowest: int
    highest: int


def byte_range(path: str, part: int, parts: int) -> tuple[int, int]:
    """Return where a part's lines begin and end, in bytes.

    Part k of K begins after the first newline from k · size / K on, and ends where the next begins.
    """
    size = os.stat(path).st_size
    with open(path, "rb") as file:

        def begin(k: int) -> int:
            if k == 0 or k == parts:
                return size if k else 0
            file.seek(k * size // parts)
            file.readline()
            return min(file.tell(), size)

        return begin(part), begin(part + 1)


def read_blocks(path: str, first: int, stop: int) -> Iterator[TextRows]:
    """Read the lines between two positions, `BLOCK` bytes or a line at a time.

    Raises:
        LinearModelError: a line is broken, or has NaN or infinity; names the file, the line's
            number, and the line.
    """
    text, held, at = np.empty(BLOCK, np.uint8), 0, first
    with open(path, "rb") as file:
        file.seek(first)
        while at < stop or held:
            if held + 1 >= len(text):  # a line longer than the text
                text = np.concatenate([text, np.empty(len(text), np.uint8)])
            more = _fill(file, text, held, min(len(text) - 1 - held, stop - at))
            if more == 0:  # the last line has no newline
                text[held], more = 10, 1
                stop = at
            else:
                at += more
            whole = _last_newline(text, held, held + more) + 1
            held += more
            if whole:
                yield _parse(path, text, whole, at - held)
                text[: held - whole] = text[whole:held].copy()
                held -= whole


def _fill(file: BufferedReader, text: Any, start: int, size: int) -> int:
    return file.readinto(memoryview(text)[start : start + size]) if size else 0


def _last_newline(text: Any, start: int, stop: int) -> int:
    return int(text[:stop].tobytes().rfind(b"\n", start))


def _parse(path: str, text: Any, stop: int, start: int) -> TextRows:
    """Return the rows of whole lines.

    Args:
        stop: where the lines end in the text.
        start: where the text begins in the file.
    """
    rows, entries = stop // 2 + 1, stop // 4 + 2
    targets, offsets = np.empty(rows), np.empty(rows + 1, np.int64)
    columns, values = np.empty(entries, np.int32), np.empty(entries)
    hard, counts = np.empty(3 * (rows + entries), np.int64), np.zeros(6, np.int64)
    counts[LOWEST], counts[HIGHEST], offsets[0] = MOST_COLUMNS, -1, 0
    broken = native(svmlight_loops, "read_rows")(
        text, stop, *_powers_of_ten(), targets, offsets, columns, values, hard, counts
    )
    for place, first, last in hard[: 3 * counts[HARD]].reshape(-1, 3).tolist():
        word = text[first:last].tobytes()
        try:
            number = float(word)
        except ValueError:
            raise _broken_line(path, text, first, stop, start, word, "no number") from None
        if not math.isfinite(number):
            raise _broken_line(path, text, first, stop, start, word, "not finite")
        if place < 0:
            targets[-1 - place] = number
        else:
            values[place] = number
    if broken >= 0:
        raise _broken_line(path, text, broken, stop, start)
    rows, entries = int(counts[ROWS]), int(counts[ENTRIES])
    block = TextRows(
        targets[:rows].copy(), offsets[: rows + 1].copy(), columns[:entries].copy(),
        values[:entries].copy(), int(counts[LOWEST]), int(counts[HIGHEST]),
    )  # fmt: skip
    return _merge_columns(block) if counts[IS_UNSORTED] else block


def _merge_columns(block: TextRows) -> TextRows:
    """Return rows with sorted columns; values of the same column are added."""
    from scipy.sparse import csr_matrix

    x = csr_matrix(
        (block.values, block.columns, block.offsets), (len(block.targets), block.highest + 1)
    )
    x.sum_duplicates()
    return TextRows(
        block.targets, x.indptr.astype(np.int64), x.indices.astype(np.int32), x.data,
        block.lowest, block.highest,
    )  # fmt: skip


@cache
def _powers_of_ten() -> tuple[Any, Any]:
    """Return the powers of ten of `decimal_loops`, each as a sum of two float64."""
    exact = [Fraction(10) ** k for k in range(decimal_loops.LEAST, decimal_loops.MOST + 1)]
    powers = np.array([float(each) for each in exact])
    tails = [float(each - Fraction(near)) for each, near in zip(exact, powers, strict=True)]
    return powers, np.array(tails)


def _broken_line(
    path: str, text: Any, at: int, stop: int, start: int, word: bytes = b"", fault: str = ""
) -> LinearModelError:  # fmt: skip
    """Return the error for a line, of which `at` is a position."""
    data = text[:stop].tobytes()
    first = data.rfind(b"\n", 0, at) + 1
    line = data[first : data.find(b"\n", first)].decode("utf-8", "replace").strip()
    shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
    number = _count_lines(path, start + first) + 1
    reason = f"; {word[:_SHOWN].decode('utf-8', 'replace')!r} is {fault}" if fault else ""
    return LinearModelError(
        f"{path}, line {number}: {shown!r} is not 'target column:value column:value …' with "
        f"columns from 0 to {MOST_COLUMNS}{reason}; correct the line"
    )


def _count_lines(path: str, stop: int) -> int:
    """Return the newlines before a position of a file."""
    lines = 0
    with open(path, "rb") as file:
        while stop > 0 and (data := file.read(min(BLOCK, stop))):
            lines += data.count(b"\n")
            stop -= len(data)
    return lines


__all__ = ["BLOCK", "TextRows", "byte_range", "read_blocks"]
