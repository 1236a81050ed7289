"""Lines of svmlight files as rows of a CSR matrix: plain Python that runs as machine code.

A line is `target column:value column:value … # comment`. A `qid:` before the columns is left out.
"""

from __future__ import annotations

from typing import Any

from graphflow.linear.tables.decimal_loops import read_number

NEWLINE, COLON, HASH = 10, 58, 35
MOST_COLUMNS = 2147483647
ROWS, ENTRIES, HARD, LOWEST, HIGHEST, IS_UNSORTED = range(6)
"""Places in `counts`."""


def read_rows(
    text: Any, stop: int, powers: Any, tails: Any, targets: Any, offsets: Any, columns: Any,
    values: Any, hard: Any, counts: Any,
) -> int:  # fmt: skip
    """Read whole lines; return the position of the first broken one, or -1.

    Args:
        text: bytes; the last one before `stop` is a newline.
        powers, tails: of `read_number`.
        targets, offsets, columns, values: the rows, written; `offsets[0]` is set.
        hard: (place, start, stop) of numbers that Python has to read; place is that of a value, or
            -1 - row of a target; written.
        counts: written, see `ROWS` and others. The lowest and highest column are kept if they are
            more extreme.
    """
    at = row = place = found = 0
    lowest, highest = int(counts[LOWEST]), int(counts[HIGHEST])
    unsorted = 0
    broken = -1
    while at < stop:
        line = at
        at = skip_blanks(text, at)
        if int(text[at]) == NEWLINE:
            at += 1
            continue
        if int(text[at]) == HASH:
            at = find_end(text, at) + 1
            continue
        after = read_number(text, at, powers, tails, targets, row)
        if after < 0 or not is_separator(int(text[after])):
            after = skip_token(text, at)
            note_hard(hard, found, -1 - row, at, after)
            found += 1
        at = skip_blanks(text, after)
        if int(text[at]) == 113 and int(text[at + 1]) == 105 and int(text[at + 2]) == 100:  # qid
            at = skip_blanks(text, skip_token(text, at))
        last = -1
        while int(text[at]) != NEWLINE and int(text[at]) != HASH:
            column, start = 0, at
            digit = int(text[at]) - 48
            while digit >= 0 and digit <= 9:
                column = column * 10 + digit
                at += 1
                digit = int(text[at]) - 48
            if at == start or at - start > 10 or int(text[at]) != COLON or column > MOST_COLUMNS:
                broken = line
                break
            at += 1
            after = read_number(text, at, powers, tails, values, place)
            if after < 0 or not is_separator(int(text[after])):
                after = skip_token(text, at)
                note_hard(hard, found, place, at, after)
                found += 1
            columns[place] = column
            if column <= last:
                unsorted = 1
            last = column
            lowest, highest = min(lowest, column), max(highest, column)
            place += 1
            at = after
            while is_blank(int(text[at])):
                at += 1
        if broken >= 0:
            break
        if int(text[at]) == HASH:
            at = find_end(text, at)
        at += 1
        row += 1
        offsets[row] = place
    counts[ROWS] = row
    counts[ENTRIES] = place
    counts[HARD] = found
    counts[LOWEST] = lowest
    counts[HIGHEST] = highest
    counts[IS_UNSORTED] = unsorted
    return broken


def note_hard(hard: Any, found: int, place: int, start: int, stop: int) -> None:
    """Write down a number that Python has to read."""
    hard[3 * found] = place
    hard[3 * found + 1] = start
    hard[3 * found + 2] = stop


def is_blank(byte: int) -> bool:
    """Return True for blanks other than a newline."""
    return byte == 32 or byte == 9 or byte == 13 or byte == 11 or byte == 12


def is_separator(byte: int) -> bool:
    """Return True for bytes that may follow a number."""
    return byte == NEWLINE or (byte == HASH or is_blank(byte))


def skip_blanks(text: Any, at: int) -> int:
    """Return the position of the next byte that is no blank."""
    while is_blank(int(text[at])):
        at += 1
    return at


def skip_token(text: Any, at: int) -> int:
    """Return the position after a word."""
    while not is_separator(int(text[at])):
        at += 1
    return at


def find_end(text: Any, at: int) -> int:
    """Return the position of the newline that ends a line."""
    while int(text[at]) != NEWLINE:
        at += 1
    return at
