"""Sections of parallel branches: where they begin and end, and which are worth it."""

from __future__ import annotations

from graphflow.runtime.memory.branch_planning import ScheduledKernel, find_parallel_sections


def test_a_section_ends_where_its_branches_meet() -> None:
    units: list[ScheduledKernel | None] = [
        ScheduledKernel(3, 9e4, ()), ScheduledKernel(5, 9e4, ()),
        ScheduledKernel(6, 9e4, (0,)), ScheduledKernel(8, 9e4, (1,)),
        ScheduledKernel(9, 9e4, (2, 3)), ScheduledKernel(11, 9e4, (4,)),
    ]  # fmt: skip
    (found,) = find_parallel_sections(units)
    assert (found.first, found.last) == (3, 8)
    ours = found.branches
    assert ours[3] == ours[6] != ours[5] == ours[8]


def test_other_operations_end_a_section_and_small_branches_make_none() -> None:
    apart: list[ScheduledKernel | None] = [
        ScheduledKernel(0, 9e4, ()),
        None,
        ScheduledKernel(2, 9e4, ()),
        None,
    ]
    assert find_parallel_sections(apart) == []
    small: list[ScheduledKernel | None] = [ScheduledKernel(i, 100.0, ()) for i in range(50)]
    assert find_parallel_sections(small) == []
    lopsided: list[ScheduledKernel | None] = [
        ScheduledKernel(0, 9e5, ()),
        ScheduledKernel(1, 9e4, ()),
    ]
    assert find_parallel_sections(lopsided) == []
