"""Estimates of training steps: large GPTs on clusters that are not at hand.

    found = gf.parallel.what_if(gf.parallel.GPT(layers=96, width=12288, heads=96), "a100+half",
                                devices=1024, batch=1536)
    print(found)

The costs of a block come from its graph, planned on one device of the product; its weights are
declared, never allocated. The costs of a pipeline come from its schedule, task by task, and those
of collectives from the links. Searching a network of a hundred billion weights on a thousand
devices takes seconds.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, for the layout (tensor parallel within a host, pipelines across hosts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isqrt

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, MemoryLimitError, ScheduleError
from graphflow.ir.op import user_location
from graphflow.parallel.estimation.estimate import (
    BYTES_PER_WEIGHT,
    Estimate,
    HardwareSite,
    ParallelConfig,
    estimate,
    fits,
)
from graphflow.parallel.estimation.gpt import GPT, check_count
from graphflow.placement.clusters.hardware_catalog import wire

MAX_SIMULATED = 16
"""How many configurations are simulated task by task: those that are best by closed forms."""

MAX_SHOWN = 10
"""How many of these are printed."""

MAX_DEVICES = 10_000_000
"""The most devices of a cluster. All its meshes are gone through."""


@dataclass(frozen=True)
class WhatIf:
    """The estimates, the fastest first. Print it."""

    model: GPT
    tried: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate:
        """The configuration with the fastest step."""
        return self.tried[0]

    def __str__(self) -> str:
        shown = self.tried[:MAX_SHOWN]
        head = (
            f"GPT of {self.model.weights / 1e9:.1f} billion weights, the best {len(shown)} of "
            f"{len(self.tried)} simulated (GB: of the fullest device; sends: each device, a step):"
        )
        return "\n".join([head, *(f"  {each}" for each in shown)])


@checks_arguments(ArgumentError)
def what_if(
    model: GPT,
    hardware: str = "a100+half",
    *,
    devices: int,
    batch: int,
    hosts_of: int = 8,
    network: str = "infiniband-hdr",
    tensor: int | None = None,
    stages: int | None = None,
    recompute: bool | None = None,
    sequence: bool = True,
    shard_state: bool = True,
) -> WhatIf:
    """Estimate every mesh of data, tensor and pipeline parallelism on a cluster.

    Args:
        model: the GPT.
        hardware: a product, see docs/deployment/clusters.md; "+half" computes 16 bits on tensor
            cores.
        devices: their number.
        batch: samples of a step.
        hosts_of: devices of a host. Tensor parallelism stays within it.
        network: the link of each device to other hosts.
        tensor, stages, recompute: only configurations with these; default: all.
        sequence: whether norms and sums are split along tokens where products are split along the
            model.
        shard_state: whether replicas have parts of the optimiser's state. Both options cost nothing
            here, so they are not searched; older systems had neither.

    Raises:
        MemoryLimitError: nothing fits.
        ScheduleError: a number is invalid, or there is no such mesh.
        ClusterError: unknown hardware.
    """
    where = f"what_if at {user_location()}"
    _check(
        where,
        model,
        {
            "devices": devices,
            "batch": batch,
            "hosts_of": hosts_of,
            "tensor": tensor,
            "stages": stages,
        },
        {"recompute": recompute, "sequence": sequence, "shard_state": shard_state},
    )
    devices, batch, hosts_of = int(devices), int(batch), int(hosts_of)  # numpy ints would overflow
    wire(network)  # refuses an unknown link, also if one host has all devices
    site = HardwareSite(hardware, hosts_of, network)
    asked = [
        layout
        for layout in _parallel_configs(model, devices, batch, hosts_of, sequence, shard_state)
        if tensor in (None, layout.model) and stages in (None, layout.stages)
        if recompute in (None, layout.recompute)
    ]
    if not asked:
        raise ScheduleError(
            f"{where}: there is no mesh of {devices} devices with {tensor or 'any'} along the "
            f"model and {stages or 'any'} stages: those along the model divide a host (of "
            f"{hosts_of}), the {model.heads} heads and the width {model.width}, stages the "
            f"{model.layers} layers, replicas the batch of {batch}, and all of them together the "
            "devices; leave one of them open"
        )
    found = _fastest(model, site, batch, asked)
    if not found:
        raise _too_large_error(where, model, devices, site)
    return WhatIf(model, tuple(sorted(found, key=lambda e: e.seconds)))


def _check(
    where: str, model: object, counts: Mapping[str, int | None], flags: Mapping[str, bool | None]
) -> None:
    """Check the arguments of `what_if`. Of the counts, `tensor` and `stages` may be None; of the
    flags, `recompute`.

    Raises:
        ScheduleError: one of them is invalid.
    """
    if not isinstance(model, GPT):
        raise ScheduleError(f"{where}: the model must be a gf.parallel.GPT, not {model!r}")
    for what, number in counts.items():
        if number is not None or what not in ("tensor", "stages"):
            check_count(where, what, number)
    for what, flag in flags.items():
        if not isinstance(flag, bool) and (what, flag) != ("recompute", None):
            raise ScheduleError(f"{where}: {what} must be True or False, not {flag!r}")
    devices = counts["devices"]
    if devices is not None and devices > MAX_DEVICES:
        raise ScheduleError(f"{where}: {devices:,} devices are more than {MAX_DEVICES:,}")


def _too_large_error(where: str, model: GPT, devices: int, site: HardwareSite) -> MemoryLimitError:
    """Return the error of a model that fits on the devices in no way."""
    needed = model.weights * BYTES_PER_WEIGHT / devices
    remedy = "more of them" if needed > site.memory else "more of them, or a smaller batch"
    return MemoryLimitError(
        f"{where}: {model.weights / 1e9:.1f} billion weights take {needed / 1e9:.1f} GB on "
        f"each of {devices} devices before any activation, of {site.memory / 1e9:.0f} GB that "
        f"{site.hardware} has; give it {remedy}"
    )


def _fastest(
    model: GPT, site: HardwareSite, batch: int, configs: Sequence[ParallelConfig]
) -> list[Estimate]:
    """Simulate those configurations that fit in memory and are best by closed forms."""
    fitting = [each for each in configs if fits(model, site, batch, each)]
    rough = {each: estimate(model, site, batch, each, exact=False) for each in fitting}
    close = sorted(fitting, key=lambda each: rough[each].seconds)[:MAX_SIMULATED]
    return [estimate(model, site, batch, each) for each in close]


# Configurations -------------------------------------------------------------------------------


def _parallel_configs(
    model: GPT, devices: int, batch: int, hosts_of: int, sequence: bool, shard_state: bool
) -> Iterator[ParallelConfig]:
    """Yield all configurations whose sizes divide evenly."""
    for tensor in _divisors(min(hosts_of, devices)):
        if model.heads % tensor or model.width % tensor or devices % tensor:
            continue
        for stages in _divisors(devices // tensor):
            data = devices // tensor // stages
            if model.layers % stages or batch % data:
                continue
            for micro in (1, 2, 4, 8):
                if (batch // data) % micro:
                    continue
                count = batch // data // micro
                for chunks in _divisors(model.layers // stages):
                    if chunks > 8 or (chunks > 1 and (stages == 1 or count % stages)):
                        continue
                    for recompute in (False, True):
                        yield ParallelConfig(
                            data, tensor, stages, chunks, micro, recompute,
                            sequence and tensor > 1, shard_state and data > 1,
                        )  # fmt: skip


def _divisors(n: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
