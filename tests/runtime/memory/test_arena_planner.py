from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from graphflow.ops.kernels.jit.array_address import ALIGNMENT
from graphflow.runtime.memory.arena_planner import BufferLifetime, plan_arena

lives = st.builds(
    lambda birth, length, nbytes: BufferLifetime(birth, birth + length, nbytes),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 5000),
)


@given(st.lists(lives, max_size=40))
def test_blocks_that_live_at_the_same_time_never_overlap(blocks: list[BufferLifetime]) -> None:
    arena = plan_arena(blocks)
    spans = [(o, o + b.nbytes, b) for o, b in zip(arena.offsets, blocks, strict=True)]
    for i, (start, end, a) in enumerate(spans):
        assert start % ALIGNMENT == 0
        assert 0 <= start <= end <= arena.nbytes
        for other_start, other_end, b in spans[:i]:
            if a.birth <= b.death and b.birth <= a.death:
                assert end <= other_start or other_end <= start


@given(st.lists(lives, max_size=40))
def test_an_arena_is_no_larger_than_its_blocks_and_no_smaller_than_those_alive(
    blocks: list[BufferLifetime],
) -> None:
    arena = plan_arena(blocks)
    rounded = [-(-max(b.nbytes, 1) // ALIGNMENT) * ALIGNMENT for b in blocks]
    needed = max(
        (
            sum(s for b, s in zip(blocks, rounded, strict=True) if b.birth <= t <= b.death)
            for t in range(61)
        ),
        default=0,
    )
    assert needed <= arena.nbytes <= sum(rounded)


def test_a_block_is_taken_again_when_its_owner_is_dead() -> None:
    blocks = [
        BufferLifetime(0, 1, 1000),
        BufferLifetime(1, 2, 1000),
        BufferLifetime(2, 3, 1000),
        BufferLifetime(3, 4, 1000),
    ]
    arena = plan_arena(blocks)
    assert arena.offsets == (0, 1024, 0, 1024)
    assert arena.nbytes == 2048


def test_no_blocks_need_no_arena() -> None:
    assert plan_arena([]).nbytes == 0


def test_a_chain_that_is_all_alive_and_then_dies_backwards_is_laid_out_in_linear_time() -> None:
    """The lives of a deep graph and its gradients: 50,000 at once (0.3 s; quadratic: minutes)."""
    deep = 50_000
    blocks = [BufferLifetime(i, 2 * deep - i, 64) for i in range(deep)]
    blocks += [BufferLifetime(deep + i, deep + i + 1, 64) for i in range(deep)]
    begin = time.process_time()
    arena = plan_arena(blocks)
    assert time.process_time() - begin < 10
    assert arena.nbytes <= 64 * (deep + 2)
