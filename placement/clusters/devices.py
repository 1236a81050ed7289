"""The parts of a cluster: devices, the workers that they belong to, links.

They are plain data, checked when made. Calibration fills in numbers that are None.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from graphflow.base.addresses import HIGHEST_PORT, TCP, TCP_FORM, is_loopback, parse_address
from graphflow.base.argument_checks import checks_arguments, to_builtin
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ClusterError, DeviceError
from graphflow.placement.clusters.hardware_catalog import product

CLIENT = "/client"
"""The process of the session, which feeds and fetches."""
MAX_DEVICES = 1024
"""Devices of a cluster. Each has a link to each other one."""
MAX_THREADS = 4096
"""Threads of a device: more than any machine has cores."""

_DEVICE = re.compile(r"/worker:(0|[1-9]\d*)/(cpu|gpu):(0|[1-9]\d*)")
_LOCAL = re.compile(r"(cpu|gpu):(0|[1-9]\d*)")


@checks_arguments(ClusterError)
@dataclass(frozen=True)
class Device:
    """A place where nodes run.

    Args:
        name: Full name, "/worker:0/cpu:0".
        kind: "cpu" or "gpu".
        memory: Bytes that plans may use.
        threads: Of a CPU device.
        flops: Flop/s of large float32 matmuls. None: to be measured.
        bandwidth: Bytes/s of its memory. None: to be measured.
        launch: Seconds to start one op. None: to be measured.
        product: Name of a shipped product ("h100-sxm", see `hardware_catalog`), whose speeds count
            where the three above are None.
        speed: Share of its machine's measured speed that it gets, as a session found last; see
            `calibration.worker_speeds`.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    memory: int
    threads: int | None = None
    flops: float | None = None
    bandwidth: float | None = None
    launch: float | None = None
    product: str | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        match = _DEVICE.fullmatch(self.name) if isinstance(self.name, str) else None
        if match is None:
            raise ClusterError(f"device name {self.name!r} is not of the form '/worker:0/cpu:0'")
        if self.kind != match[2]:
            raise ClusterError(
                f"device {self.name}: kind is {self.kind!r}, the name says {match[2]!r}"
            )
        object.__setattr__(self, "memory", to_builtin(self.memory))
        object.__setattr__(self, "threads", to_builtin(self.threads))
        check_count(f"device {self.name}: memory (bytes)", self.memory)
        if self.threads is not None:
            check_count(f"device {self.name}: threads", self.threads, MAX_THREADS)
        for key, unit in (("flops", "flop/s"), ("bandwidth", "bytes/s")):
            check_number(f"device {self.name}: {key} ({unit})", getattr(self, key), zero=False)
        check_number(f"device {self.name}: launch (seconds)", self.launch, zero=True)
        check_number(f"device {self.name}: speed (share)", self.speed, zero=False)
        if self.product is not None:
            object.__setattr__(self, "product", product(self.product).name)

    @property
    def peaks(self) -> tuple[float | None, float | None]:
        """(flop/s, bytes/s): the given ones, else the product's peaks, else None."""
        if self.product is None:
            return self.flops, self.bandwidth
        known = product(self.product)
        return self.flops or known.float32, self.bandwidth or known.bandwidth

    @property
    def slowness(self) -> str:
        """A note for a device that does not get its machine's speed; else ""."""
        return "" if self.speed == 1 else f"at {self.speed:.2f} of its machine's speed"

    @property
    def is_described(self) -> bool:
        """True if its speeds are known without measuring."""
        return self.product is not None or None not in (self.flops, self.bandwidth, self.launch)


@checks_arguments(ClusterError)
@dataclass(frozen=True)
class Link:
    """A one-way connection.

    Args:
        source, target: Devices, workers ("/worker:0": all its devices) or "/client".
        latency: Seconds before the first byte arrives.
        bandwidth: Bytes/s.
    """

    source: str
    target: str
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        for end in (self.source, self.target):
            if end != CLIENT and not (
                isinstance(end, str) and re.fullmatch(rf"{_DEVICE.pattern}|/worker:\d+", end)
            ):
                raise ClusterError(
                    f"link end {end!r} is neither a device, a worker ('/worker:0') nor '{CLIENT}'"
                )
        where = f"link {self.source} -> {self.target}"
        if self.latency is None or self.bandwidth is None:
            raise ClusterError(f"{where}: give both latency (seconds) and bandwidth (bytes/s)")
        check_number(f"{where}: latency (seconds)", self.latency, zero=True)
        check_number(f"{where}: bandwidth (bytes/s)", self.bandwidth, zero=False)


@checks_arguments(ClusterError)
@dataclass(frozen=True)
class Worker:
    """One process and its devices.

    Args:
        address: Where a remote worker listens.
        key: Its public key, or the name under which that is trusted here.
    """

    index: int
    address: str | None
    devices: tuple[Device, ...]
    key: str | None = None

    def __post_init__(self) -> None:
        where = f"worker {self.index}"
        object.__setattr__(self, "devices", tuple(self.devices))
        if not self.devices:
            raise ClusterError(f"{where} has no devices; give at least 'cpu:0'")
        for device in self.devices:
            if not device.name.startswith(f"/worker:{self.index}/"):
                raise ClusterError(
                    f"{where} holds {device.name}: the name belongs to another worker"
                )
        names = [device.name for device in self.devices]
        for name in names:
            if names.count(name) > 1:
                raise ClusterError(f"{where} lists {name} twice")
        if self.address is not None:
            parts = parse_address(self.address) if isinstance(self.address, str) else None
            if parts is None or (parts.scheme == TCP and not 0 < parts.port <= HIGHEST_PORT):
                raise ClusterError(
                    f"{where}: address {self.address!r} is not of the form {TCP_FORM!r}"
                )
        if self.key is not None and not (isinstance(self.key, str) and self.key):
            raise ClusterError(f"{where}: key is the name of a key or its digits, not {self.key!r}")

    @property
    def loopback(self) -> bool:
        """True if the worker is on this host and unreachable from others."""
        return self.address is None or is_loopback(self.address.lower())


def local_kind(name: str) -> Literal["cpu", "gpu"]:
    """Return the kind of a device by its name within a worker, "cpu:0"."""
    match = _LOCAL.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise DeviceError(
            f"{name!r} is not a device of a worker; write 'cpu:0', 'cpu:1' or 'gpu:0'"
        )
    return "cpu" if match[1] == "cpu" else "gpu"


def check_count(what: str, value: object, most: int = (1 << 63) - 1) -> None:
    """Raise ClusterError unless `value` is a whole number from 1 to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ClusterError(f"{what} must be a whole number >= 1, not {value!r}")
    if value.bit_length() > 63:
        raise ClusterError(f"{what} has {value.bit_length()} bits; it must be less than 2**63")
    if value > most:
        raise ClusterError(f"{what} must be at most {most}, not {value}")


def check_device_count(what: str, devices: int) -> None:
    """Raise ClusterError unless a cluster may have so many devices."""
    if devices > MAX_DEVICES:
        raise ClusterError(
            f"{what} more than {MAX_DEVICES} devices, the most that a cluster has; give fewer"
        )


def check_number(what: str, value: object, *, zero: bool) -> None:
    """Raise ClusterError unless `value` is None or a finite number above (or at) zero."""
    if value is None:
        return
    wanted = "a finite number >= 0" if zero else "a finite number > 0"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ClusterError(f"{what} must be {wanted}, not {value!r}")
    if isinstance(value, int) and value.bit_length() > 1023:
        raise ClusterError(f"{what} has {value.bit_length()} bits; it must be {wanted}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ClusterError(f"{what} is {value}; it must be {wanted}")
