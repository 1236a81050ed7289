"""The command line: `graphflow worker|up|down|run|plan|status|dashboard|devices|doctor` and others.

A wrong argument gets one line that says what to do, never a traceback of this package. A failing
user script keeps its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from graphflow._version import __version__
from graphflow.base.environment import check_environment, choice_setting
from graphflow.base.process.user_modules import module_names, require_modules
from graphflow.cli.arguments import (
    check_choice,
    cluster_of,
    existing_file,
    existing_folder,
    hardware_of,
    load_target,
    names_of,
    option_errors,
    placer_of,
    run_user_code,
    shapes_of,
)
from graphflow.cli.dashboard import dashboard
from graphflow.cli.doctor import doctor
from graphflow.cli.keys import app as keys
from graphflow.cli.machine import cache, calibrate, devices_command
from graphflow.cli.options import (
    AllowedOps,
    AnnouncementFile,
    CheckpointFolder,
    ClusterFile,
    DataFolders,
    Devices,
    Hardware,
    Listen,
    ListenInsecurely,
    LogFormat,
    LogLevel,
    MakeKey,
    MaxConnections,
    MaxIterations,
    MaxMemory,
    MaxNodes,
    MetricsAddress,
    PlacerName,
    PlanFile,
    PlansToCompare,
    PrintReport,
    SearchSeconds,
    ServedDevices,
    Shapes,
    Target,
    Threads,
    TrustedKeys,
    UntilStdinEnds,
    WorkerKey,
    Workers,
)
from graphflow.cli.status import status
from graphflow.cli.up import down, up
from graphflow.errors import ArgumentError, GraphflowError, InsecureAddress
from graphflow.execution.cluster_connection import default_cluster
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.plan import SUFFIXES, Plan
from graphflow.planning.plan_function import plan

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
"""Exit code after Ctrl-C, as in shells."""


@app.command()
def worker(
    listen: Listen,
    devices: ServedDevices = None,
    threads: Threads = None,
    insecure: ListenInsecurely = False,
    allow_ops: AllowedOps = None,
    key: WorkerKey = None,
    max_connections: MaxConnections = None,
    max_nodes: MaxNodes = 1_000_000,
    max_memory: MaxMemory = None,
    max_iterations: MaxIterations = None,
    checkpoints: CheckpointFolder = None,
    allow_data: DataFolders = None,
    metrics: MetricsAddress = None,
    announce: AnnouncementFile = None,
    make_key: MakeKey = False,
    trust: TrustedKeys = None,
    until_stdin_ends: UntilStdinEnds = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Start a worker: run graphs of sessions on this machine's devices until Ctrl-C.

    Example: graphflow worker --listen tcp://127.0.0.1:7001

    On other addresses than loopback, worker and session authenticate by keys: see graphflow keys.
    """
    from graphflow.runtime.diagnostics.crash_recorder import supervise
    from graphflow.runtime.security.key_creation import find_or_create_pair
    from graphflow.runtime.security.keys import WORKER, Keyring
    from graphflow.runtime.security.one_time_keys import NEW_KEY, one_time_keyring
    from graphflow.runtime.telemetry.logs import FORMATS, LEVELS, configure_by_environment
    from graphflow.runtime.telemetry.metrics_endpoint import parse_address
    from graphflow.runtime.transport import transport_of
    from graphflow.runtime.wire.graph_limits import GraphLimits
    from graphflow.runtime.worker.serving import announce_exit, serve  # loads ZeroMQ

    if insecure:
        typer.echo(
            "warning: --insecure: whoever reaches this address can run graphs here", err=True
        )
    check_choice("--log-format", log_format, FORMATS)
    check_choice("--log-level", log_level, LEVELS)
    check_environment()
    configure_by_environment(
        log_format or choice_setting("GRAPHFLOW_LOG", FORMATS) or "text", log_level
    )
    with option_errors("--listen"):
        place = transport_of(listen).check_address(listen, insecure=True, listening=True)
    with option_errors("--devices"):
        given = None if devices is None else names_of(devices)
        here = Cluster.here(devices=given)  # raises for devices that this machine lacks
        names = [name.removeprefix("/worker:0/") for name in here.devices]
    if make_key and key in (None, NEW_KEY):
        raise ArgumentError("--make-key goes with --key NAME, the key to make")
    if key != NEW_KEY:
        with option_errors("--trust"):
            for line in trust or []:
                Keyring().add(line, "--trust")
    if key is not None and key != NEW_KEY:
        with option_errors("--key"):
            find = find_or_create_pair if make_key else Keyring.own_pair
            find(Keyring(), key, WORKER)
    allowed = module_names(allow_ops or [], "--allow-ops")
    require_modules(allowed, "--allow-ops")
    with option_errors("--checkpoints"):
        written = None if checkpoints is None else str(existing_folder(checkpoints))
    with option_errors("--allow-data"):
        readable = [str(existing_folder(folder)) for folder in allow_data or []]
    if metrics is not None:
        with option_errors("--metrics"):
            parse_address(metrics)
    nbytes = None if max_memory is None else int(max_memory * 1e9)
    with ExitStack() as stack:
        keys = None
        if key == NEW_KEY and place.loopback:
            key = None
        elif key == NEW_KEY:
            ring, key = stack.enter_context(one_time_keyring(WORKER, trust or []))
            keys = ring.folder
        end = partial(announce_exit, insecure=insecure, key=key, keys=keys)
        on_address = stack.enter_context(supervise(end))
        serve(
            listen, devices=names, threads=threads, insecure=insecure, allow_ops=allowed, key=key,
            keys=keys, parent_pid=os.getppid() if until_stdin_ends else None,
            connections=max_connections, limits=GraphLimits(max_nodes, nbytes, max_iterations),
            checkpoints=written, data=readable, metrics=metrics, announce=announce,
            on_address=on_address,
        )  # fmt: skip


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Python script that opens gf.Session().")],
    workers: Workers = None,
    cluster: ClusterFile = None,
    devices: Devices = None,
    threads: Threads = None,
) -> None:
    """Run a script on these workers: its gf.Session() without arguments uses them.

    All other arguments go to the script.

    Example: graphflow run train.py --workers 2 -- --epochs 3
    """
    is_plain = all(option is None for option in (workers, cluster, devices, threads))
    chosen = None if is_plain else cluster_of(workers, cluster, devices, threads)
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
    target: Target = None,
    cluster: ClusterFile = None,
    workers: Workers = None,
    devices: Devices = None,
    threads: Threads = None,
    shape: Shapes = None,
    output: PlanFile = None,
    placer: PlacerName = "greedy",
    hardware: Hardware = None,
    report: PrintReport = False,
    seconds: SearchSeconds = None,
    diff: PlansToCompare = None,
) -> None:
    """Place a graph without running it, and print the placement and the predicted step time.

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
        raise ArgumentError(f"--output {output}: the name must end in {', '.join(SUFFIXES)}")
    if hardware is not None and (workers is not None or cluster is not None):
        raise ArgumentError("give --hardware, --workers or --cluster, not two of them")
    chosen = (
        cluster_of(workers, cluster, devices, threads)
        if hardware is None
        else hardware_of(hardware)
    )
    chosen_placer = placer_of(placer, seconds)
    fetches = load_target(target)
    shapes = shapes_of(target, fetches, shape or [])
    made = plan(fetches, chosen, shapes=shapes, placer=chosen_placer)
    typer.echo(str(made.report() if report else made))
    if output is not None:
        made.save(output)
        typer.echo(f"wrote {output}")


app.command()(up)
app.command()(down)
app.command()(status)
app.command()(dashboard)


app.command("devices")(devices_command)
app.command()(calibrate)
app.command()(doctor)
app.command()(cache)
app.add_typer(keys)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    The code is 2 for wrong arguments, 1 for other errors, and 130 after Ctrl-C.
    """
    # A stream that was closed (`>&-`) is None in Python, and the next file would get its number.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # write "?" for what the locale lacks
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
        with (
            suppress(OSError),
            open(os.devnull, "wb") as silent,
        ):  # else Python flushes again at exit
            os.dup2(silent.fileno(), sys.stdout.fileno())
        with suppress(OSError):
            typer.echo(f"graphflow: cannot write its output: {error}", err=True)
        return 1
    except Exception as error:
        return _report_usage_error(error, sys.argv[1:] if arguments is None else arguments)
    if code == INTERRUPTED:  # new versions of typer return it, older ones raised
        typer.echo("interrupted", err=True)
    return code


def _report_usage_error(error: Exception, arguments: Sequence[str]) -> int:
    """Print one line for an error of the parser (click), which typer may bundle or import."""
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
    """Return the command that the arguments name; an error about a missing value does not say
    it."""
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
