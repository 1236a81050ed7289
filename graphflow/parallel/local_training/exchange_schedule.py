"""The turns after which fragments of the parameters are exchanged.

    period 6, fragments 3, delay 1         (s: sent, a: applied)
    turn        1  2  3  4  5  6  7  8
    fragment 0                 s  a
    fragment 1           s  a
    fragment 2     s  a                 s

After each multiple of the period, every fragment was exchanged equally often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphflow.ir.op import Node


class TurnExchanges(NamedTuple):
    """The fragments that something happens to around one turn.

    Attributes:
        begins: fragments whose round begins before the turn.
        sent: fragments that are exchanged after the turn.
    """

    begins: tuple[int, ...]
    sent: tuple[int, ...]


def schedule_exchanges(
    done: int, window: int, period: int, fragments: int, delay: int
) -> tuple[TurnExchanges, ...]:
    """Return what happens around each turn of a window.

    Args:
        done: the number of turns before the window.
        window: the number of turns in the window.
        period: the number of turns between two exchanges of a fragment.
        fragments: the number of fragments.
        delay: the number of turns between sending a fragment and applying the result. Without a
            delay, a round begins where all replicas have the same parameters; with one, only the
            first round does.
    """
    shifts = [fragment * period // fragments for fragment in range(fragments)]
    found = []
    for turn in range(done, done + window):
        begins = (
            fragment
            for fragment, shift in enumerate(shifts)
            if turn == 0 or (not delay and (turn + shift) % period == 0)
        )
        sent = (
            fragment for fragment, shift in enumerate(shifts) if (turn + 1 + shift) % period == 0
        )
        found.append(TurnExchanges(tuple(begins), tuple(sent)))
    return tuple(found)


def split_parameters(parameters: Sequence[Node], fragments: int) -> list[list[Node]]:
    """Return the parameters in fragments of about the same bytes, in order, none of them empty.

    Args:
        parameters: at least as many as fragments.
    """
    sizes = [float(node.specs[0].nbytes) for node in parameters]
    found: list[list[Node]] = [[]]
    held = 0.0
    for i, (node, size) in enumerate(zip(parameters, sizes, strict=True)):
        wanted = sum(sizes) * len(found) / fragments
        missing = fragments - len(found)
        is_full = held + size / 2 >= wanted or len(parameters) - i <= missing
        if found[-1] and missing and is_full:
            found.append([])
        found[-1].append(node)
        held += size
    return found


__all__ = ["TurnExchanges", "schedule_exchanges", "split_parameters"]
