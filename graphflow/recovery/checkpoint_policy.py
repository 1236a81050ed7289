"""The arguments of a session about checkpoints: where, how often, how many, and how they are
read."""

from __future__ import annotations

import math
import os
import re
from typing import Any

from graphflow.base.argument_checks import as_seconds, to_builtin
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.execution.checkpoint_matching import (
    Rename,
    check_rename,
)
from graphflow.runtime.checkpoint.store import CheckpointStore

EVERY, KEEP, REJOIN = "10min", 3, 10.0
"""Defaults of a session's arguments every, keep and rejoin (seconds)."""

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)")
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class CheckpointInterval:
    """The interval between checkpoints: a number of steps, or of seconds."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, every: Any) -> CheckpointInterval:
        """Return the interval for a number of steps, or for a time such as "10min".

        Raises:
            ArgumentError: anything else.
        """
        every = to_builtin(every)
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            return cls(steps=every)
        match = _TIME.fullmatch(every.strip()) if isinstance(every, str) else None
        time_between = float(match[1]) * _UNITS[match[2]] if match is not None else 0.0
        if not (0 < time_between < math.inf):
            raise ArgumentError(
                "every must be a positive number of steps, or a time such as '10min', '30s' or "
                f"'1h', not {every!r}"
            )
        return cls(seconds=time_between)

    def is_due(self, before: int, step: int, seconds: float) -> bool:
        """Return True if a checkpoint is due.

        Args:
            before: step of the last one.
            step: the present step.
            seconds: seconds since the last one.
        """
        if self.steps is not None:
            return step // self.steps > before // self.steps
        return self.seconds is not None and step > before and seconds >= self.seconds


@dataclass(frozen=True)
class CheckpointPolicy:
    """The user's choices for checkpoints.

    Attributes:
        folder: the directory.
        every: how often.
        keep: how many are kept.
        rejoin: seconds to wait for a lost worker of another machine.
        strict, rename: how the first checkpoint meets the model (see `checkpoint_matching`).
    """

    folder: str | os.PathLike[str]
    every: CheckpointInterval
    keep: int
    rejoin: float
    strict: bool
    rename: Rename

    @classmethod
    def from_arguments(
        cls, folder: Any, every: Any, keep: Any, rejoin: Any, strict: Any, rename: Any
    ) -> CheckpointPolicy | None:
        """Return the policy for a session's arguments; None without a checkpoint directory.

        Raises:
            ArgumentError: an argument is wrong, or makes no sense without a directory.
        """
        names = check_rename(strict, rename, again=True)
        if folder is None:
            given = {
                "every": every,
                "keep": keep,
                "rejoin": rejoin,
                "strict": None if strict else False,
            }
            for name, value in {**given, "rename": rename}.items():
                if value is not None:
                    raise ArgumentError(
                        f"{name}= needs a directory: give checkpoint=directory, too"
                    )
            return None
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ArgumentError(f"checkpoint must be a directory, not {folder!r}")
        keep = KEEP if keep is None else to_builtin(keep)
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ArgumentError(f"keep must be a positive number of checkpoints, not {keep!r}")
        waits = REJOIN if rejoin is None else as_seconds(rejoin)
        if waits is None:
            raise ArgumentError(f"rejoin must be a number of seconds from 0 on, not {rejoin!r}")
        return cls(
            folder,
            CheckpointInterval.parse(EVERY if every is None else every),
            keep,
            waits,
            strict,
            names,
        )

    def store(self) -> CheckpointStore:
        """Open the directory, and take it over from other processes.

        Raises:
            CheckpointError: it cannot be used.
        """
        return CheckpointStore(self.folder, self.keep)
