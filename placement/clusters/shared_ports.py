"""Ports: what several pairs of devices share on their way to each other."""

from __future__ import annotations

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ClusterError


@checks_arguments(ClusterError)
@dataclass(frozen=True)
class Port:
    """A port through which some devices reach others, together no faster than its bandwidth.

    A network card, the uplink of a PCIe switch, or a device's port on the NVLink switch.

    Args:
        inside, outside: Devices, or workers ("/worker:0": all its devices). outside None: all that
            are not inside.
        bandwidth: Bytes/s in each direction.
        duplex: Both directions have the bandwidth; else they share it.
        besides: Those outside that are reached otherwise.
    """

    name: str
    inside: tuple[str, ...]
    outside: tuple[str, ...] | None
    bandwidth: float
    duplex: bool = True
    besides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "inside", tuple(self.inside))
        object.__setattr__(self, "besides", tuple(self.besides))
        if self.outside is not None:
            object.__setattr__(self, "outside", tuple(self.outside))
