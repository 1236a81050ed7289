"""Sharing of a segment's native calls among the threads of a device.

A long call is cut into shares, which are one entry of the driver's table: a job for the threads
(`ops/kernels/jit/thread_team.py`). So threads meet without Python between them. If an epilogue runs
block by block, each thread computes some blocks of the product and the epilogue's rows of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.jit.array_address import align_up
from graphflow.ops.kernels.jit.compiler import KernelTask, TaskShare
from graphflow.ops.kernels.jit.thread_team import MOST_SHARES, ThreadTeam
from graphflow.runtime.memory.scratch_use import shares_of
from graphflow.runtime.native_calls.gemm_epilogues import BlockCall


@dataclass(frozen=True)
class CallPart:
    """Some rows of a call, as one thread computes them.

    Attributes:
        call: number of the call.
        share: its rows, and what differs from the whole.
        scratch: number of the scratch memory that it uses; 0: the call's own.
    """

    call: int
    share: TaskShare
    scratch: int = 0


@dataclass(frozen=True)
class WorkSharing:
    """The threads that share the long calls of a program.

    Attributes:
        scratch: allocates so many bytes of scratch memory, which the device's programs share.
    """

    team: ThreadTeam
    scratch: Callable[[int], Any]

    def shares(self, number: int, task: KernelTask) -> list[list[CallPart]]:
        """Return each share of a call; one if threads do not share it."""
        shares = shares_of(task, self.team.threads)
        return [[CallPart(number, share, i)] for i, share in enumerate(shares)]

    def shares_of_blocks(self, blocks: Sequence[BlockCall]) -> list[list[CallPart]] | None:
        """Return shares of a product and its epilogue, blocks of which take turns; None if there
        are fewer blocks than threads."""
        pairs = [blocks[i : i + 2] for i in range(0, len(blocks), 2)]
        threads = min(self.team.threads, MOST_SHARES)
        if len(pairs) < threads:
            return None
        edges = [len(pairs) * i // threads for i in range(threads + 1)]
        return [
            [
                CallPart(block.call, TaskShare(block.start, block.stop), i)
                for pair in pairs[first:last]
                for block in pair
            ]
            for i, (first, last) in enumerate(pairwise(edges))
        ]


def scratch_bytes(parts: Sequence[Sequence[CallPart]], tasks: Sequence[KernelTask]) -> int:
    """Return the bytes of scratch memory that the shares of a job need beside the calls' own."""
    need = max(align_up(tasks[part.call].scratch) for share in parts for part in share)
    return need * (len(parts) - 1)
