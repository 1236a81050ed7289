"""Strategies that send less than data parallelism and change the numbers of training.

`auto(exact=False)` tries them over some of the devices. What they change is said beside them.
`TopK` and `AsyncModel` are left out: the one wants another rate, the other the same batch for
several steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.parallel.compression.filters.fixed_point import FixedPoint
from graphflow.parallel.compression.filters.power_sgd import PowerSGD
from graphflow.parallel.data import Data
from graphflow.parallel.local_training.local_sgd import LocalSGD

BITS = 8
RANK = 4
_ROUNDED = f"rounded to {BITS} bits, which is right on average"


@dataclass(frozen=True)
class InexactStrategy:
    """A strategy that changes the numbers of training.

    Attributes:
        name: the strategy in a few words.
        strategy: the strategy.
        trade: what it gives up.
    """

    name: str
    strategy: Data | LocalSGD
    trade: str


def inexact_strategies(replicas: int, devices: Sequence[str] | None) -> list[InexactStrategy]:
    """Return the strategies that are tried over so many devices.

    Args:
        devices: their names; None: the first of the cluster.
    """
    few, low = FixedPoint(BITS), PowerSGD(RANK)
    return [
        InexactStrategy(
            f"data {replicas}, {BITS} bits",
            Data(replicas, devices=devices, compress=few),
            f"gradients are {_ROUNDED}",
        ),
        InexactStrategy(
            f"data {replicas}, rank {RANK}",
            Data(replicas, devices=devices, compress=low),
            f"gradients of matrices have rank {RANK}; the rest is added to later ones",
        ),
        InexactStrategy(f"local {replicas}", LocalSGD(replicas, devices=devices), "replicas"),
        InexactStrategy(
            f"local {replicas}, {BITS} bits",
            LocalSGD(replicas, devices=devices, compress=few),
            f"what they exchange is {_ROUNDED}; replicas",
        ),
    ]


def describe_drift(trade: str, period: int) -> str:
    """Return what replicas give up that exchange after so many steps."""
    if period == 1:
        return f"{trade} exchange parameters in each step"
    return f"{trade} train by themselves for {show_count(period, 'step')}"
