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
        help="Devices of each process, e.g. 'cpu:0,cpu:1' or 'gpu:0'. Default with --workers: "
        "cpu:0. Default without: $GRAPHFLOW_DEVICES, else the CPU and each usable GPU.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Threads of each CPU device; default: all cores, shared equally among the CPU "
        "devices.",
    ),
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

ServedDevices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="NAMES",
        help="Devices to serve, e.g. 'cpu:0,cpu:1' or 'gpu:0'; default: $GRAPHFLOW_DEVICES, else "
        "the CPU and each usable GPU.",
    ),
]

Listen = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help="Address to listen at, e.g. tcp://127.0.0.1:7001."),
]
ListenInsecurely = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen beyond loopback without keys. Use this only on a trusted network.",
    ),
]
AllowedOps = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="Module with custom ops that this worker may import for sessions; repeatable.",
    ),
]
WorkerKey = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Key with which this worker authenticates beyond loopback: the name of a key made "
        "by `graphflow keys new NAME --role worker`, the path of its secret file, or 'new' for a "
        "key of this run. Default: this machine's only worker key. On loopback, no key is needed.",
    ),
]
MaxConnections = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Most open connections; default: from `ulimit -n`."),
]
MaxNodes = Annotated[
    int, typer.Option(min=1, metavar="N", help="Most graph nodes that a device accepts.")
]
MaxMemory = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=1e9,
        metavar="GB",
        help="Most memory of a session's variables on a device, and of any one tensor, in GB; "
        "default: this machine's memory.",
    ),
]
MaxIterations = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Most iterations of all loops of a graph together. With this limit, each loop needs "
        "max_iterations.",
    ),
]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of the sessions' checkpoints, if client and worker share it. The worker then "
        "writes its variables there itself.",
    ),
]
DataFolders = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of data files that this worker may read for sessions; repeatable. Without "
        "it, the worker reads no data files.",
    ),
]
MetricsAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Serve Prometheus metrics here, e.g. 127.0.0.1:9100."),
]
TrustedKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="KEY",
        help="For launchers: a public key to trust, as a line 'graphflow-key-1 coordinator NAME "
        "KEY'; repeatable. With --key new, the worker trusts it in this run only.",
    ),
]
MakeKey = Annotated[
    bool,
    typer.Option("--make-key", help="For launchers: make the key of --key NAME if it is absent."),
]
UntilStdinEnds = Annotated[
    bool,
    typer.Option("--until-stdin-ends", help="For launchers: exit when stdin is closed."),
]
AnnouncementFile = Annotated[
    str | None,
    typer.Option(
        "--announce",
        metavar="FILE",
        help="For launchers: as soon as the worker listens, write its address, public key, devices "
        "and pid to this file as one JSON line (- for stdout). The worker removes the file when it "
        "exits.",
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT", help="Log format: text or json; default: $GRAPHFLOW_LOG, else text."
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL",
        help="Log level: debug, info, warning or error; default: $GRAPHFLOW_LOG_LEVEL, else info.",
    ),
]

# graphflow plan ---------------------------------------------------------------------------------

Target = Annotated[
    str | None,
    typer.Argument(
        help="What to plan, as script.py:name. The name stands for a tensor, a nested list or dict "
        "of tensors, or a function that returns one of these."
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        "-s",
        metavar="X=SIZES",
        help="Shape of a placeholder, e.g. x=128,64; repeatable.",
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the plan to this .html, .svg, .json or .dot file.",
    ),
]
PlacerName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Placer: greedy, heft, auto, exact …; see docs/planning/placers.md.",
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="Plan for hardware that you do not have: '8xh100' is one host with 8 GPUs, "
        "'2x8xh100@100gbe' two such hosts.",
    ),
]
PrintReport = Annotated[
    bool, typer.Option("--report", help="Also print devices, links and the critical path.")
]
SearchSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="Time limit of --placer auto, in seconds. The plan then depends on this machine's "
        "speed.",
    ),
]
PlansToCompare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="A B", help="Compare two saved plans (.json): print what B changes from A."
    ),
]

# graphflow status -------------------------------------------------------------------------------

StatusTargets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TARGET]...",
        help="Workers to ask: addresses tcp://host:port, or one cluster file. Default: the cluster "
        "that `graphflow up` started on this machine.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Watch = Annotated[bool, typer.Option("--watch", help="Repeat the query until Ctrl-C.")]
WatchSeconds = Annotated[
    float, typer.Option(min=0.2, metavar="S", help="Seconds between two queries of --watch.")
]
AnswerSeconds = Annotated[
    float, typer.Option(min=0.1, max=600.0, metavar="S", help="Seconds to wait for answers.")
]
OwnKey = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Your own key, of role client or coordinator. Default: the cluster file's key, else "
        "your only key of these roles.",
    ),
]
WorkersKeys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Public key of the workers: the name of a trusted key, or the key itself. Repeat the "
        "option to give each address its own.",
    ),
]
AskInsecurely = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Connect beyond loopback without keys. Use this only on a trusted network.",
    ),
]
