"""Pipeline: the strategy that gives each device some stages of a network.

train = gf.optim.Adam(1e-3).minimize(loss, strategy=gf.parallel.Pipeline(4, microbatches=8))
gf.parallel.Pipeline(2, "zb-h1") * gf.parallel.Data(2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from math import prod
from typing import Any

from graphflow.base.argument_checks import checks_arguments, did_you_mean
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ScheduleError, ShardingError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Location, Node, Tensor, user_location
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.mesh.device_mesh import MICRO, PATH, Mesh
from graphflow.parallel.mesh.mesh_arguments import check_mesh_size, mesh_devices, own_devices
from graphflow.parallel.pipelining.asynchronous_pipeline import unroll_pipeline
from graphflow.parallel.pipelining.flushing_pipeline import (
    merge_bodies,
    partition_pipeline,
    paths_of,
)
from graphflow.parallel.pipelining.pipeline_checks import (
    call_schedule,
    check_batch,
    check_function,
    check_microbatch_count,
    is_stage_list,
    is_training,
    losses_of,
)
from graphflow.parallel.pipelining.schedule import SCHEDULES, STAGES_PER_DEVICE, Schedule
from graphflow.parallel.pipelining.stage_cotangents import sum_within_stages
from graphflow.parallel.pipelining.stages import check_stage_count, stages_of
from graphflow.parallel.replica_devices import device_groups, group_by_stage
from graphflow.parallel.report import StrategyReport, report_of
from graphflow.parallel.resharding.gradient_buckets import BUCKET_BYTES
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.parallel.sharding.propagation.batch_axis import batch_placeholders
from graphflow.parallel.sharding.propagation.replication import ReplicationConfig
from graphflow.placement.clusters.cluster import Cluster

MAX_EAGER_TASKS = 10_000
"""The most (stage, micro-batch) pairs of a schedule that is made at once, to see whether it
exists."""


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class Pipeline:
    """A network in stages, and micro-batches that go through them by a schedule.

    Args:
        stages: their number, for which the planner finds the split; "auto": as many as the cluster
            has devices for; or a list with, for each stage, a name scope, a tensor, or a list of
            these.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "chimera" or "pipedream"
            (which does not flush), or a name that is registered with `register_schedule`; a
            function of (stages, microbatches); or a `Schedule` of your own.
        microbatches: into how many parts each batch is split; default: twice the number of stages.
        recompute: whether backward passes compute forward passes again, to save memory.
        batch: placeholders (or their names) that hold the batch in their first axis; default: those
            that share the size of their first axis.
        devices: the devices of the stages; default: the first of the cluster. On a cluster of one
            device, all stages are there.
        beside: the strategy that splits each stage, as a product sets it.

    Raises:
        ScheduleError: at once for arguments that fit no network; when a graph is partitioned, for
            nodes in no stage or in two, more stages than devices, or a schedule that would
            deadlock.
        ShardingError: a batch smaller than the micro-batches.

    Source: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., SC 2021; see `schedules`.
    """

    stages: int | str | Sequence[Any] = "auto"
    schedule: str | Schedule | Callable[[int, int], Schedule] = "1f1b"
    microbatches: int | None = None
    recompute: bool | None = None
    batch: Sequence[Tensor | str] | None = None
    devices: Sequence[str] | None = None
    beside: Any = None
    line: Location = field(default_factory=user_location, init=False, repr=False)
    _stages: dict[Node, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"Pipeline at {self.line}"
        given = self.schedule
        named = isinstance(given, str) and given in SCHEDULES
        if not (named or isinstance(given, Schedule) or callable(given)):
            hint = did_you_mean(str(given).lower(), SCHEDULES)
            raise ScheduleError(
                f"{where}: schedule must be one of {', '.join(SCHEDULES)}, a function, or a "
                f"Schedule, not {given!r}" + (f"; {hint}" if hint else "")
            )
        count = as_count(self.stages)
        if count is not None:
            set_frozen_fields(self, stages=count)
        elif not is_stage_list(self.stages):
            raise ScheduleError(
                f"{where}: stages must be an int of at least 1, 'auto' or a list, not "
                f"{self.stages!r}"
            )
        if self.recompute is not None and not isinstance(self.recompute, bool):
            raise ScheduleError(f"{where}: recompute must be True or False, not {self.recompute!r}")
        if self.microbatches is not None:
            number = as_count(self.microbatches)
            if number is None:
                raise ScheduleError(
                    f"{where}: microbatches must be an int of at least 1, not {self.microbatches!r}"
                )
            set_frozen_fields(self, microbatches=number)
        if not isinstance(given, str | Schedule):
            check_function(given, where)
        if self.beside is not None:
            _check_inner_strategy(self.beside, where)
        self._try_schedule()

    def __mul__(self, other: Any) -> Pipeline:
        """Return the pipeline whose stages another strategy splits over several devices each."""
        _check_inner_strategy(other, f"Pipeline at {user_location()}")
        product = replace(self, beside=other if self.beside is None else self.beside * other)
        set_frozen_fields(product, line=user_location())
        return product

    __rmul__ = __mul__

    def _microbatch_count(self) -> int:
        """Return the number of micro-batches, as far as the arguments fix it."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.microbatches
        if self.microbatches is not None or isinstance(self.stages, str):
            return (self.microbatches or 1) * self._accumulate
        return 2 * (self._stage_count() or 1) * self._accumulate

    @property
    def _accumulate(self) -> int:
        """The factor by which a product's `accumulate` multiplies the number of micro-batches."""
        return 1 if self.beside is None else int(self.beside.accumulate)

    def _stage_count(self) -> int | None:
        """Return the number of stages, as far as the arguments fix it."""
        if isinstance(self.stages, int | str):
            return None if isinstance(self.stages, str) else self.stages
        return len(self.stages)

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """Return the graph of stages and micro-batches for the devices of a cluster.

            graph ─_find_stages→ the stage of each node ─plan_schedule→ Schedule
                  ─partition_pipeline, or unroll_pipeline without a flush→ ShardedGraph

        Args:
            graph: the graph, with gradients and updates.
            cluster: the cluster.
            known: the shards of variables that exist already.
            fed: the sizes of symbols, if a step is about to be fed.

        Raises:
            ScheduleError, ShardingError: see `Pipeline`.
        """
        outer = dict(self.beside.mesh) if self.beside is not None else {}
        each = prod(outer.values())
        if isinstance(self.stages, int) and not self._stages:
            check_stage_count(losses_of(graph), self.stages)
        beside = self.beside
        from_product = self.batch is None and beside is not None
        batch = batch_placeholders(graph, beside.examples if from_product else self.batch)
        if is_training(graph):
            check_batch(batch, self._microbatch_count(), fed or {}, self._accumulate)
        check_microbatch_count(graph, batch, self._microbatch_count())
        check_mesh_size(graph, outer)
        schedule = self.plan_schedule(cluster, each)
        self._find_stages(graph, schedule.stages, cluster)
        found = mesh_devices({"stage": schedule.devices, **outer}, cluster, self._devices(schedule))
        graph, stages = merge_bodies(graph, self._stages)
        graph = sum_within_stages(graph, stages)
        if schedule.updates != "flush" and is_training(graph):
            if outer:
                raise ScheduleError(
                    f"schedule {schedule.name!r} does not flush, which goes with no other "
                    "strategy; leave that out, or take a schedule that flushes, such as '1f1b'"
                )
            return unroll_pipeline(graph, stages, schedule, found, batch, known)
        mesh = Mesh(outer, [DeviceName()] * each) if outer else None
        layouts = self.beside.layouts(graph, mesh, strict=is_training(graph)) if outer else None
        replication = (
            ReplicationConfig(BUCKET_BYTES) if self.beside is None else self.beside.replication
        )
        return partition_pipeline(
            graph, stages, schedule, found, batch, outer, layouts, known, fed, replication
        )

    def _devices(self, schedule: Schedule) -> Sequence[str] | None:
        """Return the devices that the user names, those of a stage next to each other.

        Raises:
            ShardingError: their number is wrong, or both strategies of a product name them.
        """
        beside = self.beside
        if beside is None or beside.devices is None:
            return self.devices
        where, name = f"Pipeline at {self.line}", type(beside).__name__
        if self.devices is not None:
            raise ShardingError(
                f"{where}: the Pipeline and the {name} both say devices=; say them in one of them"
            )
        places = "replicas" if name == "Data" else "places of the mesh"
        count, each = prod(beside.mesh.values()), schedule.devices
        return group_by_stage(device_groups(beside.devices, count, each, where, places))

    def _try_schedule(self) -> None:
        """Make the schedule if its size is known, so that an impossible one is refused at once.

        A large schedule is made only once, for a graph.

        Raises:
            ScheduleError: there is no such schedule.
        """
        count = self._stage_count()
        if isinstance(self.schedule, Schedule) or (
            count and count * self._microbatch_count() <= MAX_EAGER_TASKS
        ):
            self._check_sizes(self._make_schedule(count or 1))

    def plan_schedule(self, cluster: Cluster, each: int = 1) -> Schedule:
        """Return the schedule for a cluster.

        Args:
            cluster: the cluster.
            each: how many devices share a stage.
        """
        name = self.schedule if isinstance(self.schedule, str) else ""
        automatic = max(1, len(own_devices(cluster)) // each) * STAGES_PER_DEVICE.get(name, 1)
        made = self._make_schedule(self._stage_count() or automatic)
        self._check_sizes(made)
        return made if self.recompute is None else replace(made, recompute=self.recompute)

    def _make_schedule(self, count: int) -> Schedule:
        """Return the schedule for a number of stages.

        Raises:
            ScheduleError: there is none.
        """
        if isinstance(self.schedule, Schedule):
            return self.schedule
        make = SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        microbatches = 2 * count if self.microbatches is None else self.microbatches
        microbatches *= self._accumulate
        return call_schedule(make, count, microbatches, f"Pipeline at {self.line}")

    def _check_sizes(self, schedule: Schedule) -> None:
        """Refuse a schedule whose sizes are not those that were asked for, or whose paths are
        uneven.

        Raises:
            ScheduleError: see above.
        """
        times = self._accumulate
        if times > 1 and isinstance(self.schedule, Schedule):
            raise ScheduleError(
                f"Pipeline at {self.line}: the schedule {schedule.name!r} has "
                f"{schedule.microbatches} micro-batches, and accumulate={times} asks for {times} "
                f"times as many; make it for {times * schedule.microbatches}, and leave out "
                "accumulate="
            )
        number = None if self.microbatches is None else times * self.microbatches
        for what, asked, found in (
            ("stages", self._stage_count(), schedule.stages),
            ("micro-batches", number, schedule.microbatches),
        ):
            if asked is not None and asked != found:
                raise ScheduleError(
                    f"Pipeline at {self.line}: {asked} {what}, but the schedule "
                    f"{schedule.name!r} has {found}; give both as many"
                )
        paths_of(schedule)

    def report(self, fetches: Any, cluster: Cluster | None = None) -> StrategyReport:
        """Return what the strategy makes of some fetches: the layouts of variables, and each
        collective with its bytes and the line that caused it. Print it."""
        return report_of(self, fetches, cluster)

    def set_stages(self, stages: Mapping[Node, int]) -> None:
        """Set stages that `stages_of` found before."""
        self._stages.update(stages)

    @property
    def stages_found(self) -> Mapping[Node, int]:
        """The stage of each node of the forward passes that were partitioned so far."""
        return self._stages

    def _find_stages(self, graph: Graph, count: int, cluster: Cluster) -> None:
        """Find the stages of a forward pass, once. A graph that is fetched without it later keeps
        them."""
        losses = losses_of(graph)
        if all(loss.node in self._stages for loss in losses):
            return
        stages = count if isinstance(self.stages, str) else self.stages
        self._stages.update(stages_of(losses, stages, cluster))


def _check_inner_strategy(beside: Any, where: str) -> None:
    """Check that a strategy can split the stages of a pipeline.

    Raises:
        ScheduleError: it is a Pipeline, has no replication configuration, or uses an axis of the
            pipeline.
    """
    if isinstance(beside, Pipeline):
        raise ScheduleError(
            f"{where}: a Pipeline of a Pipeline has no meaning: give one Pipeline the stages of "
            "both, and to have several of them on a device schedule='interleaved'"
        )
    if not isinstance(getattr(beside, "replication", None), ReplicationConfig):
        raise ScheduleError(
            f"{where}: a Pipeline goes with one Data or Shard, not {beside!r}; write "
            "Pipeline(…) * gf.parallel.Data(2)"
        )
    if getattr(beside, "compress", None) is not None:
        raise ScheduleError(
            f"{where}: compress={beside.compress!r} is for gradients that all replicas finish in "
            "one step of their own, and a Pipeline's stages share them; leave out compress="
        )
    taken = sorted({"stage", PATH, MICRO} & set(beside.mesh))
    if taken:
        raise ScheduleError(
            f"{where}: axis {taken[0]!r} of the mesh is the pipeline's own; give yours another name"
        )
