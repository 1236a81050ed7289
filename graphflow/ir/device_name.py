"""Device names such as `/worker:1/cpu:0`, and partial names as constraints: `gpu`, `/worker:1`."""

from __future__ import annotations

import re

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import DeviceError

_NAME = re.compile(r"(?:/worker:(?P<worker>\d+))?/?(?:(?P<kind>cpu|gpu)(?::(?P<index>\d+))?)?")


@dataclass(frozen=True, slots=True, order=True)
class DeviceName:
    """A device, or a constraint on devices: a part that is None matches any value."""

    worker: int | None = None
    kind: str | None = None
    index: int | None = None

    @staticmethod
    def parse(text: str) -> DeviceName:
        """Parse a full or partial name.

        Raises:
            DeviceError: not of the form `/worker:N/cpu:N`, or a part of it.
        """
        match = _NAME.fullmatch(text) if isinstance(text, str) and text else None
        if match is None:
            raise DeviceError(
                f"{text!r} is not a device name; {_suggest_name(text)}write '/worker:1/cpu:0', or "
                "a part: '/worker:1', 'gpu', 'cpu:1'"
            )
        worker, kind, index = match["worker"], match["kind"], match["index"]
        return DeviceName(
            int(worker) if worker else None, kind or None, int(index) if index else None
        )

    def refine(self, inner: DeviceName) -> DeviceName:
        """Return this constraint with the parts of `inner` in place of its own."""
        if inner.kind is not None and inner.kind != self.kind:
            index = inner.index
        else:
            index = self.index if inner.index is None else inner.index
        return DeviceName(
            self.worker if inner.worker is None else inner.worker,
            self.kind if inner.kind is None else inner.kind,
            index,
        )

    def matches(self, device: DeviceName) -> bool:
        """Return True if the device of a full name satisfies this constraint."""
        return all(
            want is None or want == have
            for want, have in (
                (self.worker, device.worker),
                (self.kind, device.kind),
                (self.index, device.index),
            )
        )

    def __bool__(self) -> bool:
        return self != DeviceName()

    def __str__(self) -> str:
        worker = "" if self.worker is None else f"/worker:{self.worker}"
        kind = "" if self.kind is None else self.kind
        index = "" if self.index is None else f":{self.index}"
        return f"{worker}/{kind}{index}" if worker and kind else worker + kind + index


def _suggest_name(text: object) -> str:
    """Return "did you mean …?" for a misspelt name, such as "gpu:0" for "cuda:0"; "" if unknown."""
    plain = str(text).lower().replace("cuda", "gpu").replace("device:", "").strip("/ ")
    plain = re.sub(r"(cpu|gpu|worker)[ _-]?(\d)", r"\1:\2", plain)
    plain = f"/{plain}" if plain.startswith("worker") else plain
    return f"did you mean {plain!r}? " if _NAME.fullmatch(plain) and plain != text else ""
