"""The command line: `graphflow worker|run|plan|devices|calibrate|cache|keys|status`.

A wrong argument gets one line that says what to do, never a traceback of ours; a failing user
script keeps its own.
"""

from __future__ import annotations

import errno
import io
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from graphflow._version import __version__
from graphflow.base.environment import check_environment, choice_setting
from graphflow.base.formatting import show_bytes, show_count, show_seconds
from graphflow.base.user_modules import module_names, require_modules
from graphflow.cli.arguments import (
    cluster_of,
    existing_file,
    existing_folder,
    gpu_names,
    hardware_of,
    load_cluster,
    load_target,
    names_of,
    option_errors,
    placer_of,
    run_user_code,
    shapes_of,
)
from graphflow.cli.keys import app as keys
from graphflow.cli.status import status
from graphflow.errors import ArgumentError, GraphflowError, InsecureAddress
from graphflow.execution.cluster_connection import default_cluster
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.plan import SUFFIXES, Plan
from graphflow.placement.plans.plan_fetches import plan
from graphflow.placement.plans.tables import TextTable

app = typer.Typer(
    name="graphflow",
    help="Dataflow graphs with autodiff, placed on devices by a cost model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"graphflow {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Dataflow graphs with autodiff, placed on devices by a cost model."""


INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells have it."""

Devices = Annotated[
    str,
    typer.Option(metavar="NAMES", help="Devices of each worker, e.g. 'cpu:0,cpu:1' or 'gpu:0'."),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Threads of each CPU device; default: its share."),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster", "-c", metavar="FILE", help="Cluster file (TOML); see docs/clusters.md."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", "-w", min=1, metavar="N", help="That many worker processes of this machine."
    ),
]


@app.command()
def worker(
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen: tcp://127.0.0.1:7001.")
    ],
    devices: Devices = "cpu:0",
    threads: Threads = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Listen beyond loopback without keys: on a trusted network only."
        ),
    ] = False,
    allow_ops: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="A module of ops that sessions may have imported here; repeatable.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="This worker's own key, see `graphflow keys`; default: the only one beyond "
            "loopback, and none on it.",
        ),
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Most connections at a time; default: by `ulimit -n`."
        ),
    ] = None,
    max_nodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most nodes of a device's part of a graph.")
    ] = 1_000_000,
    max_memory: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e9,
            metavar="GB",
            help="Most GB of its variables, or of one tensor; default: all.",
        ),
    ] = None,
    max_iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Most iterations of its loops together; each needs a bound then.",
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The directory that sessions keep checkpoints in, if it is the same one here: "
            "the worker writes its part there itself.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Serve metrics for Prometheus, e.g. at 127.0.0.1:9100."
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="text or json; default: $GRAPHFLOW_LOG, else text."),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL",
            help="debug, info, warning or error; default: $GRAPHFLOW_LOG_LEVEL or info.",
        ),
    ] = None,
) -> None:
    """Serve this machine's devices to sessions until Ctrl-C.

    Example: graphflow worker --listen tcp://127.0.0.1:7001

    Beyond loopback, with the key of this machine: graphflow worker --listen tcp://10.0.0.2:7001
    """
    from graphflow.runtime.diagnostics.crash_recorder import supervise
    from graphflow.runtime.security.keys import WORKER, Keyring
    from graphflow.runtime.telemetry.logs import FORMATS, configure_by_environment
    from graphflow.runtime.transport import transport_of
    from graphflow.runtime.wire.graph_limits import GraphLimits
    from graphflow.runtime.worker.serving import announce_exit, serve  # loads ZeroMQ

    if insecure:
        typer.echo(
            "warning: --insecure: whoever reaches this address can run graphs here", err=True
        )
    check_environment()
    configure_by_environment(
        log_format or choice_setting("GRAPHFLOW_LOG", FORMATS) or "text", log_level
    )
    with option_errors("--listen"):
        transport_of(listen).check_address(listen, insecure=True, listening=True)
    with option_errors("--devices"):
        names = names_of(devices)
        Cluster.here(devices=names)  # refuses names of devices that are not here
    if key is not None:
        with option_errors("--key"):
            Keyring().own_pair(key, WORKER)
    allowed = module_names(allow_ops or [], "--allow-ops")
    require_modules(allowed, "--allow-ops")
    nbytes = None if max_memory is None else int(max_memory * 1e9)
    with supervise(partial(announce_exit, insecure=insecure, key=key)) as told:
        serve(
            listen, devices=names, threads=threads, insecure=insecure, allow_ops=allowed, key=key,
            connections=max_connections, limits=GraphLimits(max_nodes, nbytes, max_iterations),
            checkpoints=str(existing_folder(checkpoints)) if checkpoints is not None else None,
            metrics=metrics, on_address=told,
        )  # fmt: skip


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that opens gf.Session().")],
    workers: Workers = None,
    cluster: ClusterFile = None,
    devices: Devices = "cpu:0",
    threads: Threads = None,
) -> None:
    """Run a script whose plain gf.Session() uses these workers; the rest goes to the script.

    Example: graphflow run train.py --workers 2
    """
    chosen = cluster_of(workers, cluster, devices, threads)
    existing_file(script)
    sys.argv = [str(script), *context.args]
    token = default_cluster.set(chosen)
    try:
        with run_user_code(script):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        default_cluster.reset(token)


@app.command("plan")
def plan_command(
    target: Annotated[
        str | None,
        typer.Argument(help="script.py:name; a tensor, a nest of them, or a function giving one."),
    ] = None,
    cluster: ClusterFile = None,
    workers: Workers = None,
    devices: Devices = "cpu:0",
    threads: Threads = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            "-s",
            metavar="X=SIZES",
            help="Sizes of a placeholder, e.g. x=128,64; repeatable.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A .html, .svg, .json or .dot file."),
    ] = None,
    placer: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="greedy, heft, auto, exact …; all are in docs/placers.md."
        ),
    ] = "greedy",
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="Hardware that is not here: '8xh100', or '2x8xh100@100gbe' for hosts.",
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print devices, links and the critical path.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Search no longer than this (--placer auto); not reproducible."
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B", help="Two saved plans (.json): what the second does otherwise."
        ),
    ] = None,
) -> None:
    """Place a graph without running it: predicted step time, placement, a page to look at.

    Example: graphflow plan train.py:fetches --workers 2 --shape x=128,64 -o plan.html
    """
    if diff is not None:
        if target is not None:
            raise ArgumentError("--diff compares two saved plans; leave out script.py:name")
        with option_errors("--diff"):
            first, other = (Plan.load(existing_file(path)) for path in diff)
        typer.echo(str(first.diff(other)))
        return
    if target is None:
        raise ArgumentError("Missing argument 'TARGET': script.py:name, or --diff a.json b.json")
    if output is not None and output.suffix not in SUFFIXES:
        raise ArgumentError(f"--output {output}: a plan is saved as {', '.join(SUFFIXES)}")
    if hardware is not None and (workers is not None or cluster is not None):
        raise ArgumentError("give --hardware, --workers or --cluster, not two of them")
    chosen = (
        cluster_of(workers, cluster, devices, threads)
        if hardware is None
        else hardware_of(hardware)
    )
    fetches = load_target(target)
    shapes = shapes_of(target, fetches, shape or [])
    made = plan(fetches, chosen, shapes=shapes, placer=placer_of(placer, seconds))
    typer.echo(str(made.report() if report else made))
    if output is not None:
        made.save(output)
        typer.echo(f"wrote {output}")


app.command()(status)


@app.command("devices")
def devices_command(cluster: ClusterFile = None) -> None:
    """List the devices of this machine, or of a cluster file, with their speeds."""
    from graphflow.runtime.program.vendor_libraries import describe_gpus

    if cluster is None:
        shown = Cluster.here(devices=["cpu:0", *gpu_names()])
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
    # not a table of rich, which shortens names where a line is short, and in pipes
    heads = ("device", "address", "memory", "threads", "GFLOP/s", "GB/s")
    typer.echo(str(TextTable("", heads, rows, left=2)))
    if cluster is None:
        found = describe_gpus()
        for line in found:
            typer.echo(line)
        if found:
            typer.echo(
                "sessions compute on cpu:0 unless they are told otherwise; to use a GPU: "
                "gf.Session(gf.Cluster.here(devices=['cpu:0', 'gpu:0']))"
            )
        typer.echo("speeds are measured by: graphflow calibrate")


@app.command()
def calibrate() -> None:
    """Measure this machine (some seconds) and keep the result for the cost model."""
    from rich.console import Console

    from graphflow.placement.calibration.calibrate import link_of, profile, profile_path
    from graphflow.runtime.client.cluster_survey import keep_process_links
    from graphflow.runtime.client.remote_hosts import RemoteHosts

    console = Console()
    with console.status("measuring this machine…"):
        measured = profile(["cpu", *(["gpu"] if gpu_names() else [])], refresh=True)
    with console.status("measuring the way between two processes…"):
        cluster = Cluster.local(workers=2)
        hosts = RemoteHosts(cluster, deadline=cluster.deadline)
        try:
            latency, bandwidth = keep_process_links(hosts, cluster)
        finally:
            hosts.close()
    with console.status("measuring what a step costs by itself…"):
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
    """Let a session in this process and one over workers measure their steps, as each does where
    nothing is kept."""
    from graphflow.frontend.builders import placeholder
    from graphflow.sessions.session import Session

    x = placeholder("float32", ())
    for cluster in (Cluster.here(devices=["cpu:0", "cpu:1"], threads=1), Cluster.local(workers=2)):
        with Session(cluster) as session:
            session.run(x + 1.0, {x: 0.0})


@app.command()
def cache(
    action: Annotated[
        str, typer.Argument(help="info: what is kept; clear: remove it.", metavar="info|clear")
    ] = "info",
) -> None:
    """Tell of the compiled kernels kept on disk for later processes, or remove them."""
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


app.add_typer(keys)


def _show_giga(value: float | None) -> str:
    return "measured" if value is None else f"{value / 1e9:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for wrong arguments, 1 for other errors, 130
    for Ctrl-C."""
    # A stream that was closed (`>&-`) is none to Python, and its number the next file's.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - for as long as the process
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a locale cannot write is a "?", no error
            stream.reconfigure(errors="replace")
    try:
        result = app(arguments, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except typer.Exit as error:
        code = error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except (ArgumentError, InsecureAddress) as error:
        typer.echo(f"graphflow: {error}", err=True)
        return 2
    except GraphflowError as error:
        typer.echo(f"graphflow: {type(error).__name__}: {error}", err=True)
        return 1
    except OSError as error:
        script = (sys.argv[1:] if arguments is None else arguments)[:1] == ["run"]
        if error.errno != errno.ENOSPC or script:
            raise
        with suppress(OSError), open(os.devnull, "wb") as silent:  # else it is tried again at exit
            os.dup2(silent.fileno(), sys.stdout.fileno())
        with suppress(OSError):
            typer.echo(f"graphflow: cannot write its output: {error}", err=True)
        return 1
    except Exception as error:
        return _report_usage_error(error, sys.argv[1:] if arguments is None else arguments)
    if code == INTERRUPTED:  # typer of today returns it where that of yesterday raised
        typer.echo("interrupted", err=True)
    return code


def _report_usage_error(error: Exception, arguments: Sequence[str]) -> int:
    """One line for an error of the command line parser, which typer may bring along or import."""
    message = getattr(error, "format_message", None)
    if message is None:
        raise error
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(message())
        return 2
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else _command_path(arguments)
    typer.echo(f"{command}: {message()} (see {command} --help)", err=True)
    return 2


def _command_path(arguments: Sequence[str]) -> str:
    """The command that arguments name: an option without its value does not say whose it is."""
    found, names = typer.main.get_command(app), ["graphflow"]
    for name in arguments:
        commands = getattr(found, "commands", {})
        if name not in commands:
            break
        found = commands[name]
        names.append(name)
    return " ".join(names)


if __name__ == "__main__":
    sys.exit(main())
