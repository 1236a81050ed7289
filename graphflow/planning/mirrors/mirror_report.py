"""The report of a session's mirrors: where they are, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from graphflow.base.formatting import show_bytes, show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.ir.spec import nbytes
from graphflow.planning.mirrors.mirrors import Mirrors
from graphflow.runtime.checkpoint.manifest import list_some


@dataclass(frozen=True)
class MirrorReport:
    """The mirrors of a session, to print: where they are, and what they cost.

    Attributes:
        places: for each variable that has one, its device and that of its mirror.
        missing: variables of which a single worker has the present value.
        memory: bytes of the mirrors on each device.
        sent: bytes that travel to each device for mirrors alone, in a step of the last fetches.
    """

    places: Mapping[str, tuple[str, str]]
    missing: tuple[str, ...]
    memory: Mapping[str, int]
    sent: Mapping[str, int]

    def describe_costs(self) -> list[str]:
        """Return a sentence about the memory and the bytes of a step for each device."""
        return [
            f"mirrors on {device}: {show_bytes(held)}, {show_bytes(self.sent.get(device, 0))} sent "
            "a step"
            for device, held in sorted(self.memory.items())
        ]

    def __str__(self) -> str:
        lines = [f"{show_count(len(self.places), 'variable')} with a mirror"]
        lines += [f"  {each}" for each in self.describe_costs()]
        if self.missing:
            lines.append(f"without a second copy: {list_some(self.missing)}")
        return "\n".join(lines)


def report_mirrors(mirrors: Mirrors, last: CompiledFetches | None) -> MirrorReport:
    """Report the mirrors of a session.

    Args:
        last: the fetches of the last step.
    """
    state = mirrors.state
    memory: Counter[str] = Counter()
    for node, place in state.mirrors.homes.items():
        memory[place] += nbytes(node.specs[0])
    return MirrorReport(
        {
            state.names[node]: (mirrors.holder(state.homes[node]), state.mirrors.homes[node])
            for node in state.mirrors.current
        },
        tuple(state.names[node] for node in mirrors.find_single_copies()),
        memory,
        {} if last is None else last.sent_to_mirrors,
    )
