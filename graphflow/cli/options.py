"""Options of the command line, as annotations of the functions that run its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Of several commands ----------------------------------------------------------------------------

Devices = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Devices of each worker, e.g. 'cpu:0,cpu:1' or 'gpu:0'; default: cpu:0 with "
        "--workers, else the CPU and each usable GPU, or $GRAPHFLOW_DEVICES.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Threads of each CPU device; default: its share."),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        "-c",
        metavar="FILE",
        help="Cluster file (TOML); see docs/deployment/clusters.md.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", "-w", min=1, metavar="N", help="Number of worker processes on this machine."
    ),
]

# graphflow worker -------------------------------------------------------------------------------

Listen = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Address to listen at: tcp://127.0.0.1:7001.")
]
ListenInsecurely = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Listen beyond loopback without keys: on a trusted network only."
    ),
]
AllowedOps = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE", help="A module of ops that sessions may have imported here; repeatable."
    ),
]
WorkerKey = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="This worker's own key, see `graphflow keys`, or its secret file's path, or 'new' for "
        "one of its own beyond loopback; default: the only one beyond loopback, and none on it.",
    ),
]
MaxConnections = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Most connections at a time; default: by `ulimit -n`."),
]
MaxNodes = Annotated[
    int, typer.Option(min=1, metavar="N", help="Most nodes of a device's part of a graph.")
]
MaxMemory = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=1e9,
        metavar="GB",
        help="Most GB of its variables, or of one tensor; default: all.",
    ),
]
MaxIterations = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Most iterations of all its loops together; each loop then needs a bound.",
    ),
]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="The directory in which sessions keep checkpoints, if it is the same one here: the "
        "worker then writes its part there itself.",
    ),
]
DataFolders = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER",
        help="A directory whose files sessions may have this worker read, such as tables for "
        "gf.linear. Give it again for another; without it, sessions read no files here.",
    ),
]
MetricsAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Serve metrics for Prometheus, e.g. at 127.0.0.1:9100."),
]
TrustedKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="KEY",
        help="A line 'graphflow-key-1 coordinator NAME KEY' to trust: kept with this machine's "
        "keys, or for this run only with --key new. For launchers; repeatable.",
    ),
]
MakeKey = Annotated[
    bool, typer.Option("--make-key", help="Make the key --key NAME if it is absent. For launchers.")
]
UntilStdinEnds = Annotated[
    bool,
    typer.Option("--until-stdin-ends", help="End when stdin is closed: for ssh and launchers."),
]
AnnouncementFile = Annotated[
    str | None,
    typer.Option(
        "--announce",
        metavar="FILE",
        help="Write one JSON line with address, public key, devices and pid as soon as it listens, "
        "and remove the file at the end; - is stdout. For launchers.",
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(metavar="FORMAT", help="text or json; default: $GRAPHFLOW_LOG, else text."),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL",
        help="debug, info, warning or error; default: $GRAPHFLOW_LOG_LEVEL or info.",
    ),
]

# graphflow plan ---------------------------------------------------------------------------------

Target = Annotated[
    str | None,
    typer.Argument(
        help="script.py:name of a tensor, of nested lists or dicts of tensors, or of a function "
        "that returns one of these."
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        "-s",
        metavar="X=SIZES",
        help="Sizes of a placeholder, e.g. x=128,64; repeatable.",
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="A .html, .svg, .json or .dot file."),
]
PlacerName = Annotated[
    str,
    typer.Option(metavar="NAME", help="greedy, heft, auto, exact …: see docs/planning/placers.md."),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="Hardware that is not here: '8xh100', or '2x8xh100@100gbe' for hosts.",
    ),
]
PrintReport = Annotated[
    bool, typer.Option("--report", help="Print devices, links and the critical path.")
]
SearchSeconds = Annotated[
    float | None,
    typer.Option(metavar="S", help="Search no longer than this (--placer auto); not reproducible."),
]
PlansToCompare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="A B", help="Two saved plans (.json): print what the second does differently."
    ),
]

# graphflow status -------------------------------------------------------------------------------

StatusTargets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TARGET]...",
        help="Addresses tcp://host:port of workers, or one cluster file; default: the cluster that "
        "`graphflow up` has started here.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Watch = Annotated[bool, typer.Option("--watch", help="Ask again until Ctrl-C.")]
WatchSeconds = Annotated[
    float, typer.Option(min=0.2, metavar="S", help="Seconds between two queries, with --watch.")
]
AnswerSeconds = Annotated[
    float, typer.Option(min=0.1, max=600.0, metavar="S", help="Seconds to wait for answers.")
]
OwnKey = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Your own key, a client's or coordinator's; default: the cluster file's, or the only "
        "one.",
    ),
]
WorkersKeys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="The workers' public key: its name here, or its digits; repeated, one for each "
        "address.",
    ),
]
AskInsecurely = Annotated[
    bool,
    typer.Option("--insecure", help="Ask beyond loopback without keys: on a trusted network only."),
]
