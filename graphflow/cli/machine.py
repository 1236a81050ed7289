"""Commands about this machine: its devices, their measured speeds, and the cache of kernels."""

from __future__ import annotations

from typing import Annotated

import typer

from graphflow.base.formatting import show_bytes, show_count, show_seconds
from graphflow.cli.arguments import load_cluster
from graphflow.cli.options import ClusterFile
from graphflow.errors import ArgumentError
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.machine.machine_devices import find_gpus
from graphflow.placement.plans.reports.tables import TextTable


def devices_command(cluster: ClusterFile = None) -> None:
    """List the devices of this machine or of a cluster file: memory, threads and speed."""
    from graphflow.runtime.program.vendor_libraries import describe_gpus

    if cluster is None:
        shown = Cluster.here(devices=["cpu:0", *find_gpus().names])
    else:
        shown = load_cluster(cluster)
    rows = tuple(
        (
            device.name,
            each.address or "this process",
            show_bytes(device.memory),
            "" if device.threads is None else str(device.threads),
            *map(_show_giga, device.peaks),
        )
        for each in shown.workers
        for device in each.devices
    )
    # A table of rich would shorten names in narrow terminals and in pipes.
    heads = ("device", "address", "memory", "threads", "GFLOP/s", "GB/s")
    typer.echo(str(TextTable("", heads, rows, left=2)))
    if cluster is None:
        found = describe_gpus()
        for line in found:
            typer.echo(line)
        if found:
            typer.echo(
                "sessions take the CPU and each GPU, and place a graph where it is predicted to be "
                "fastest; to choose: gf.Session(gf.Cluster.here(devices=['cpu:0', 'gpu:0']))"
            )
        typer.echo("speeds are measured by: graphflow calibrate")


def calibrate() -> None:
    """Measure the speed of this machine, and save the result for the cost model.

    The measurement takes some seconds. Let no other program run meanwhile.
    """
    from rich.console import Console

    from graphflow.placement.calibration.calibrate import link_of, profile
    from graphflow.placement.calibration.profile_file import profile_path
    from graphflow.runtime.client.cluster_survey import keep_process_links
    from graphflow.runtime.client.remote_hosts import RemoteHosts

    console = Console()
    with console.status("measuring this machine…"):
        measured = profile(["cpu", *(["gpu"] if find_gpus().names else [])], refresh=True)
    with console.status("measuring the link between two processes…"):
        cluster = Cluster.local(workers=2)
        hosts = RemoteHosts(cluster, deadline=cluster.deadline)
        try:
            latency, bandwidth = keep_process_links(hosts, cluster)
        finally:
            hosts.close()
    with console.status("measuring the cost of an empty step…"):
        _keep_step_costs()
    for kind, speeds in measured["devices"].items():
        traffic = speeds["traffic"]
        rows = [
            (f"matmul, {dtype}", f"{max(f / s for f, s in points) / 1e9:.1f} GFLOP/s")
            for dtype, points in sorted(speeds["matmul"].items())
            if dtype in ("float16", "float32")
        ]
        rows += [
            ("memory, in cache", f"{traffic[0][0] / traffic[0][1] / 1e9:.1f} GB/s"),
            ("memory, beyond", f"{traffic[-1][0] / traffic[-1][1] / 1e9:.1f} GB/s"),
            ("starting an op", show_seconds(speeds["launch"])),
        ]
        if kind == "gpu":
            pace = link_of(measured, "gpu")
            rows.append(("from and to it", f"{show_seconds(pace[0])}, {pace[1] / 1e9:.1f} GB/s"))
        if "contention" in speeds:
            slower = speeds["contention"]
            busy = f"{slower['threads'][-1]:.0f} busy threads"
            for what in ("compute", "memory"):
                rows.append((f"{what}, {busy}", f"{slower[what][-1]:.2f} times as long"))
        typer.echo(str(TextTable(kind, ("", ""), tuple(rows), left=2)))
    typer.echo(
        f"between two processes {show_seconds(latency)} and {bandwidth / 1e9:.1f} GB/s\n"
        f"kept in {profile_path()}"
    )


def _keep_step_costs() -> None:
    """Run a session in this process and one over workers: each measures and keeps its step
    costs."""
    from graphflow.frontend.builders import placeholder
    from graphflow.sessions.session import Session

    x = placeholder("float32", ())
    for cluster in (Cluster.here(devices=["cpu:0", "cpu:1"], threads=1), Cluster.local(workers=2)):
        with Session(cluster) as session:
            session.run(x + 1.0, {x: 0.0})


def cache(
    action: Annotated[
        str,
        typer.Argument(
            help="info: show the size; clear: remove all kernels.", metavar="info|clear"
        ),
    ] = "info",
) -> None:
    """Show the size of the cache of compiled kernels on disk, or clear it."""
    from graphflow.ops.kernels.jit.object_cache import LIMIT, ObjectCache

    if action not in ("info", "clear"):
        raise ArgumentError(f"cache takes info or clear, not {action!r}")
    store = ObjectCache()
    usage, refused = (store.usage(), []) if action == "info" else store.clear()
    what = f"{show_count(usage.entries, 'compiled kernel')}, {show_bytes(usage.nbytes)}"
    if action == "info":
        typer.echo(f"{what} of at most {show_bytes(LIMIT)} in {usage.folder}")
    elif usage.nbytes or not refused:
        typer.echo(f"removed {what} from {usage.folder}")
    if refused:
        more = f" and {show_count(len(refused) - 1, 'more file')}" if len(refused) > 1 else ""
        typer.echo(
            f"graphflow: cannot remove {refused[0].filename}{more}: {refused[0].strerror}; do it "
            "as the owner, or make the folder writable",
            err=True,
        )
        raise typer.Exit(1)


def _show_giga(value: float | None) -> str:
    """Format a rate in billions a second; "measured" if the cost model measures it."""
    return "measured" if value is None else f"{value / 1e9:.1f}"
