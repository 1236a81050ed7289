"""KeyCache: positions that a receiver has already do not travel again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor
from graphflow.parallel.compression.filter import (
    CachedKeys,
    Filter,
    Parts,
    mark_used,
    used_rows_of,
)
from graphflow.parallel.compression.filters.selection import check_share
from graphflow.parallel.mesh.count_arguments import set_frozen_fields

NO_CODE = np.uint64(0)
"""The code of no message."""
_STEP, _FIRST, _SECOND = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""The constants of splitmix64."""


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class KeyCache(Filter):
    """Positions that are those of the message before are replaced by a 64-bit hash of all of them.

    It comes after a filter that sends positions, `[Kkt(0.1), KeyCache()]`, in the `filters` of a
    `gf.parallel.ParameterServer`. Both ends of a route remember the last positions for a window.
    So the first message of a window has them in any case, also if the window is repeated.

    Args:
        share: the share of messages whose positions plans and reports expect to travel.

    Raises:
        ArgumentError: share is outside of (0, 1].

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
        section 3.3.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        set_frozen_fields(self, share=check_share("KeyCache", "share", self.share))


def hash_keys(keys: Tensor, number: Tensor) -> Tensor:
    """Return a hash of all positions in use and of their order, uint64 of shape (), never 0.

    Args:
        keys: positions, shape (n,).
        number: how many at the front are in use, int64 of shape ().
    """
    size = int(keys.shape[0])
    places = np.arange(1, size + 1, dtype=np.uint64) * _STEP
    mixed = FUNCTIONS["astype"](keys, "uint64") + places
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed = mixed ^ (mixed >> np.uint64(31))
    used = FUNCTIONS["arange"](size) < number
    total = FUNCTIONS["sum"](FUNCTIONS["where"](used, mixed, NO_CODE))
    code: Tensor = total | np.uint64(1)
    return code


def omit_known_keys(cached: CachedKeys, parts: Parts, known: Tensor) -> tuple[Parts, Tensor]:
    """Return the message whose positions travel only if the receiver lacks them, and their code.

    Args:
        cached: which part the positions are.
        parts: the parts of a message.
        known: the code of the message before.
    """
    found = [*parts]
    part = found[cached.part]
    used = used_rows_of(part)
    size = int(part.shape[0])
    keys, number, expected = used or (part, as_tensor(np.int64(size)), size)
    code = hash_keys(keys, number)
    sent = FUNCTIONS["where"](code == known, np.int64(0), number)
    found[cached.part] = mark_used(keys, sent, max(1, round(cached.share * expected)))
    return (*found, code), code


def restore_keys(
    cached: CachedKeys, parts: Sequence[Tensor], keys: Tensor, known: Tensor
) -> tuple[Parts, Tensor, Tensor]:
    """Return the parts of a message with its positions, these positions, and their code.

    Args:
        cached: which part the positions are.
        parts: what `omit_known_keys` returned at the sender.
        keys: the positions of the message before.
        known: their code.
    """
    *found, code = parts
    keys = FUNCTIONS["where"](code == known, keys, found[cached.part])
    found[cached.part] = keys
    return tuple(found), keys, code


__all__ = ["NO_CODE", "KeyCache", "hash_keys", "omit_known_keys", "restore_keys"]
