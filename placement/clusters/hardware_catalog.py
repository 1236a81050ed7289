"""Shipped speeds of common GPUs and links, for hardware that is not at hand.

Peaks are the makers', each with its source. What libraries reach of them, the shares and curves
below, is our estimate; `graphflow calibrate` replaces it where the hardware is at hand. Products in
float32 do not use TensorFloat-32, and 16-bit floats are computed in float32, as the runtime does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from graphflow.base.argument_checks import did_you_mean
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ClusterError

GB, TERA = 10**9, 1e12


@dataclass(frozen=True)
class Product:
    """A GPU as its maker describes it.

    Args:
        memory: Bytes.
        bandwidth: Bytes/s of the memory.
        cache: Bytes of the last level of cache.
        float32: Peak flop/s without tensor cores.
        float64: Peak flop/s of matrix products, on tensor cores if it has them.
        processors: Streaming multiprocessors; small work cannot fill them.
        sustained: The share of the float32 peak that large products reach (our estimate). Boards
            with little power lower their clocks.
        peer: Its usual link to an equal GPU in the same host.
        bus: Its slot.
        source: The public document that the peaks are from.
        half: Peak flop/s of dense products of 16 bits on tensor cores, see `HALF`.
    """

    name: str
    memory: int
    bandwidth: float
    cache: int
    float32: float
    float64: float
    processors: int
    sustained: float
    peer: str
    bus: str
    source: str
    half: float = 0.0


@dataclass(frozen=True)
class Wire:
    """A kind of link.

    Args:
        peak: Bytes/s in one direction, by its standard or maker.
        share: Of the peak, for large messages (our estimate).
        latency: Seconds (our estimate).
    """

    name: str
    peak: float
    share: float
    latency: float
    source: str

    @property
    def bandwidth(self) -> float:
        """Bytes/s that large messages reach."""
        return self.peak * self.share


def _by_name(*rows: Any) -> dict[str, Any]:
    return {row.name: row for row in rows}


# fmt: off
PRODUCTS: Mapping[str, Product] = _by_name(
    Product("t4", 16 * GB, 320e9, 4 << 20, 8.1 * TERA, 0.25 * TERA, 40, 0.6, "pcie3", "pcie3",
            "NVIDIA T4 Tensor Core GPU datasheet (2019); Turing architecture whitepaper",
            65 * TERA),
    Product("v100-pcie", 16 * GB, 900e9, 6 << 20, 14 * TERA, 7 * TERA, 80, 0.85, "pcie3", "pcie3",
            "NVIDIA V100 Tensor Core GPU datasheet (2020)", 112 * TERA),
    Product("v100-sxm", 32 * GB, 900e9, 6 << 20, 15.7 * TERA, 7.8 * TERA, 80, 0.9, "nvlink2",
            "pcie3", "NVIDIA V100 Tensor Core GPU datasheet (2020)", 125 * TERA),
    Product("a10", 24 * GB, 600e9, 6 << 20, 31.2 * TERA, 0.49 * TERA, 72, 0.6, "pcie4", "pcie4",
            "NVIDIA A10 Tensor Core GPU datasheet (2021)", 125 * TERA),
    Product("l4", 24 * GB, 300e9, 48 << 20, 30.3 * TERA, 0.49 * TERA, 58, 0.5, "pcie4", "pcie4",
            "NVIDIA L4 Tensor Core GPU datasheet (2023); Ada architecture whitepaper", 121 * TERA),
    Product("a100-pcie-40gb", 40 * GB, 1555e9, 40 << 20, 19.5 * TERA, 19.5 * TERA, 108, 0.85,
            "pcie4", "pcie4", "NVIDIA A100 40GB PCIe product brief (2020)",
            312 * TERA),
    Product("a100-pcie-80gb", 80 * GB, 1935e9, 40 << 20, 19.5 * TERA, 19.5 * TERA, 108, 0.85,
            "pcie4", "pcie4", "NVIDIA A100 Tensor Core GPU datasheet (2021)",
            312 * TERA),
    Product("a100-sxm-40gb", 40 * GB, 1555e9, 40 << 20, 19.5 * TERA, 19.5 * TERA, 108, 0.9,
            "nvlink3", "pcie4", "NVIDIA A100 Tensor Core GPU architecture whitepaper (2020)",
            312 * TERA),
    Product("a100-sxm-80gb", 80 * GB, 2039e9, 40 << 20, 19.5 * TERA, 19.5 * TERA, 108, 0.9,
            "nvlink3", "pcie4", "NVIDIA A100 Tensor Core GPU datasheet (2021)",
            312 * TERA),
    Product("h100-pcie", 80 * GB, 2000e9, 50 << 20, 51 * TERA, 51 * TERA, 114, 0.65,
            "pcie5", "pcie5", "NVIDIA H100 PCIe product brief PB-11133-001 (2022); "
            "H100 Tensor Core GPU architecture whitepaper", 756 * TERA),
    Product("h100-sxm", 80 * GB, 3350e9, 50 << 20, 67 * TERA, 67 * TERA, 132, 0.75,
            "nvlink4", "pcie5", "NVIDIA H100 Tensor Core GPU datasheet (2023)", 989 * TERA),
    Product("h200", 141 * GB, 4800e9, 50 << 20, 67 * TERA, 67 * TERA, 132, 0.75,
            "nvlink4", "pcie5", "NVIDIA H200 Tensor Core GPU datasheet (2023)", 989 * TERA),
    Product("b200", 180 * GB, 8000e9, 126 << 20, 75 * TERA, 37 * TERA, 148, 0.75,
            "nvlink5", "pcie5", "NVIDIA DGX B200 and HGX B200 datasheets (2024), an eighth of 8",
            2250 * TERA),
)
"""GPUs by short name. The A100's and H100's float64 products run on tensor cores."""

ALIASES: Mapping[str, str] = {
    "a100": "a100-sxm-80gb", "a100-40": "a100-sxm-40gb", "a100-80": "a100-sxm-80gb",
    "a100-40gb": "a100-sxm-40gb", "a100-80gb": "a100-sxm-80gb", "a100-sxm": "a100-sxm-80gb",
    "a100-sxm4": "a100-sxm-80gb", "a100-pcie": "a100-pcie-80gb", "h100": "h100-sxm",
    "h100-80gb": "h100-sxm", "h100-sxm5": "h100-sxm", "h200-sxm": "h200", "b200-sxm": "b200",
    "v100": "v100-sxm", "v100-sxm2": "v100-sxm", "v100-32gb": "v100-sxm",
    "tesla-t4": "t4", "pcie": "pcie4", "pcie-3": "pcie3", "pcie-4": "pcie4", "pcie-5": "pcie5",
    "nvlink-2": "nvlink2", "nvlink-3": "nvlink3", "nvlink-4": "nvlink4", "nvlink-5": "nvlink5",
    "10g": "10gbe", "25g": "25gbe", "100g": "100gbe", "edr": "infiniband-edr",
    "hdr": "infiniband-hdr", "ndr": "infiniband-ndr", "ib-edr": "infiniband-edr",
    "ib-hdr": "infiniband-hdr", "ib-ndr": "infiniband-ndr",
}
"""Other names of the same; without a variant, of the usual one."""

_PCI = "PCI-SIG, PCI Express Base Specification {}: {} GT/s, 16 lanes, 128b/130b"
_NVLINK = "NVIDIA {} architecture whitepaper: {} GB/s both ways together, half of it each"
_IB = "InfiniBand Trade Association roadmap: {}, 4 lanes"
WIRES: Mapping[str, Wire] = _by_name(
    Wire("pcie3", 15.75e9, 0.8, 5e-6, _PCI.format("3.0", 8)),
    Wire("pcie4", 31.5e9, 0.8, 5e-6, _PCI.format("4.0", 16)),
    Wire("pcie5", 63e9, 0.8, 5e-6, _PCI.format("5.0", 32)),
    Wire("nvlink2", 150e9, 0.8, 3e-6, _NVLINK.format("V100", 300)),
    Wire("nvlink3", 300e9, 0.8, 3e-6, _NVLINK.format("A100", 600)),
    Wire("nvlink4", 450e9, 0.8, 3e-6, _NVLINK.format("H100", 900)),
    Wire("nvlink5", 900e9, 0.8, 3e-6, _NVLINK.format("Blackwell", 1800)),
    Wire("10gbe", 1.25e9, 0.93, 50e-6, "IEEE 802.3ae; 1500-byte frames over TCP/IP carry 94 %"),
    Wire("25gbe", 3.125e9, 0.93, 40e-6, "IEEE 802.3by"),
    Wire("100gbe", 12.5e9, 0.9, 30e-6, "IEEE 802.3ba, 802.3bj"),
    Wire("infiniband-edr", 12.5e9, 0.95, 5e-6, _IB.format("EDR 100 Gbit/s")),
    Wire("infiniband-hdr", 25e9, 0.95, 5e-6, _IB.format("HDR 200 Gbit/s")),
    Wire("infiniband-ndr", 50e9, 0.95, 5e-6, _IB.format("NDR 400 Gbit/s")),
)
"""Links by name, in each direction. Latencies are between two processes."""
# fmt: on

LAUNCH = 5e-6
"""Seconds between two ops of a program on a GPU: a call from Python and a kernel launch."""
FLOOR = 2e-6
"""The least seconds of any kernel."""
TILE, DEPTH = 64, 96
"""Products are cut into tiles of this side; a sum as long as `DEPTH` spends half on its ends."""
STREAMED, CACHED = 0.88, 2.5
"""Share of the memory's bandwidth that passes over large arrays reach; how many times as fast they
are in half of the last level of cache."""
SHARES = {"elementwise": 0.5, "other": 0.25, "random": 0.1}
"""Share of the float32 peak, in cache, by class of op: instructions are no multiply-adds."""


HALF = "+half"
"""Suffix of a GPU's name whose 16-bit products run on its tensor cores, "a100+half".

Other libraries do that; this runtime computes 16 bits in float32. For what-if questions.
"""
SUSTAINED_HALF = 0.8
"""Share of the tensor cores' peak that large products reach (our estimate)."""


def product(name: str) -> Product:
    """Return a GPU by name, "h100" or "A100-80GB"; "h100+half" for its tensor cores, see `HALF`.

    Raises:
        ClusterError: No such product; suggests one.
    """
    plain, plus, rest = str(name).partition("+")
    found = PRODUCTS.get(_key(plain))
    if found is None or (plus and plus + rest.strip().lower() != HALF):
        raise ClusterError(f"no product is named {name!r}{_hint(plain, PRODUCTS)}")
    if plus:
        share = min(found.sustained, SUSTAINED_HALF)
        return replace(found, name=found.name + HALF, float32=found.half, sustained=share)
    return found


def wire(name: str) -> Wire:
    """Return a link by name, "nvlink4" or "100GbE".

    Raises:
        ClusterError: No such link; suggests one.
    """
    found = WIRES.get(_key(name))
    if found is None:
        raise ClusterError(f"no link is named {name!r}{_hint(name, WIRES)}")
    return found


def _key(name: str) -> str:
    plain = re.sub(r"[\s_]+", "-", str(name).strip().lower())
    return ALIASES.get(plain, plain)


def _hint(name: str, table: Mapping[str, Any]) -> str:
    known = [*table, *(short for short, full in ALIASES.items() if full in table)]
    return "; " + (did_you_mean(_key(name), known, cutoff=0.5) or f"known are {', '.join(table)}")


@cache
def speeds_of(name: str) -> dict[str, Any]:
    """Return a product's speeds in the form of `profile_file.Profile`."""
    gpu = product(name)
    single = product(name.removesuffix(HALF)).float32
    rates = {kind: single * share for kind, share in SHARES.items()}
    other = gpu.float32 if name.endswith(HALF) else gpu.float32 / 4
    return {
        "launch": LAUNCH,
        "handoff": 0.0,
        "cache_bytes": gpu.cache,
        "traffic": _traffic(gpu),
        "matmul": {
            "float32": _products(gpu, gpu.float32),
            "float64": _products(gpu, gpu.float64),
            "other": _products(gpu, other),
        },
        "ops": {},
        "classes": {
            kind: {"launch": LAUNCH, "rate": rate, "itemsize": 4} for kind, rate in rates.items()
        },
        "contention": {"threads": [1], "compute": [1.0], "memory": [1.0]},
    }


def _products(gpu: Product, peak: float) -> list[list[float]]:
    """Return [flops, seconds] of square products.

    Small ones leave processors idle, and spend much of their time on starting.
    """
    points = []
    for side in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        filled = 1.0 - math.exp(-((side / TILE) ** 2) / gpu.processors)
        share = gpu.sustained * filled * side / (side + DEPTH)
        flops = 2.0 * side**3
        points.append([flops, max(flops / (peak * share), FLOOR)])
    for i in range(1, len(points)):  # a larger product never takes less
        points[i][1] = max(points[i][1], points[i - 1][1])
    return points


def _traffic(gpu: Product) -> list[list[float]]:
    """Return [bytes, seconds] of passing over arrays in the cache, beyond it, and in memory."""
    streamed = gpu.bandwidth * STREAMED
    fits = gpu.cache / 2
    sizes = [2.0**14, fits / 4, fits, 4 * fits, 2.0**30, 2.0**33]
    points = []
    for size in sizes:
        rate = streamed * (CACHED if size <= fits else 1.0)
        points.append([size, FLOOR / 2 + size / rate])
    return points
