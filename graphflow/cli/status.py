"""`graphflow status`: ask workers over the wire what they do, and print a table or JSON."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from graphflow.base.formatting import show_bytes, show_count, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.cli.arguments import option_errors
from graphflow.cli.options import (
    AnswerSeconds,
    AsJson,
    AskInsecurely,
    OwnKey,
    StatusTargets,
    Watch,
    WatchSeconds,
    WorkersKeys,
)
from graphflow.errors import ArgumentError, GraphflowError
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.view.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from graphflow.runtime.launch.supervisor_records import ClusterRecord
    from graphflow.runtime.security.keys import KeyPair, Keyring
    from graphflow.runtime.worker.worker_status import Report, WorkerAddress

    Answers = Sequence[tuple[WorkerAddress, Report | GraphflowError]]

_DEFAULT_WIDTH = 180  # columns if the output is no terminal
_MIN_WRAPPED_WIDTH = 32  # of a column that wraps
_GAP = 2  # spaces between two columns, and indent of continued lines


def status(
    target: StatusTargets = None,
    as_json: AsJson = False,
    watch: Watch = False,
    every: WatchSeconds = 2.0,
    timeout: AnswerSeconds = 3.0,
    key: OwnKey = None,
    worker_key: WorkersKeys = None,
    insecure: AskInsecurely = False,
) -> None:
    """Show the state of workers: sessions, steps per second, memory, and what blocks a step.

    Example: graphflow status tcp://127.0.0.1:7001

    The exit code is 1 if a worker does not answer. If `graphflow up` started the cluster on this
    machine, the output names its process and counts the restarts of workers.
    """
    from rich.console import Console

    from graphflow.runtime.launch.supervisor_records import RecordFile
    from graphflow.runtime.security.keys import Keyring
    from graphflow.runtime.worker.worker_status import request_reports

    ring = Keyring()
    targets = target or [_only_cluster_up()]
    workers, cluster = _workers(targets, worker_key or [], ring)
    record = RecordFile(targets[0]).read() if cluster is not None else None
    pair = _pair(workers, key, cluster, ring)
    open_ = insecure or (cluster is not None and cluster.insecure)

    def look() -> Answers:
        found = request_reports(workers, seconds=timeout, insecure=open_, pair=pair, ring=ring)
        return list(zip(workers, found, strict=True))

    if watch and as_json:
        raise ArgumentError("--watch is for people and --json for programs: give one of them")
    if watch:
        _watch(look, every)
        return
    answers = look()
    if as_json:
        supervised = {} if record is None else {"supervisor": asdict(record)}
        typer.echo(json.dumps(_to_json(answers) | supervised, indent=2, allow_nan=False))
    else:
        if record is not None:
            typer.echo(f"{_describe_supervision(record)}\n")
        Console(width=None if sys.stdout.isatty() else _DEFAULT_WIDTH).print(
            render_answers(answers)
        )
    if any(isinstance(answer, GraphflowError) for _, answer in answers):
        raise typer.Exit(1)


def _only_cluster_up() -> str:
    """Return the file of the cluster that is up on this machine.

    Raises:
        ArgumentError: none is, or several are.
    """
    from graphflow.runtime.launch.supervisor_records import clusters_up

    files = [record.file for record in clusters_up()]
    if len(files) == 1:
        return files[0]
    if files:
        raise ArgumentError(f"several clusters are up here; name one: {', '.join(files)}")
    raise ArgumentError(
        "no cluster is up on this machine (`graphflow up FILE` starts one); give addresses "
        "tcp://host:port, or a cluster file"
    )


def _describe_supervision(record: ClusterRecord) -> str:
    """Say who keeps a cluster up since when, and which workers were restarted."""
    age = show_age(max(0.0, time.time() - record.started))
    restarts = [
        f"worker {worker.index} was restarted {show_count(worker.restarts, 'time')}"
        for worker in record.workers
        if worker.restarts
    ]
    return "; ".join([f"{record}, for {age}", *restarts])


def _workers(
    targets: Sequence[str], keys: Sequence[str], ring: Keyring
) -> tuple[list[WorkerAddress], Cluster | None]:
    """Return the workers to ask, and the cluster file's cluster if one is given."""
    from graphflow.runtime.security.keys import WORKER
    from graphflow.runtime.transport import transport_of
    from graphflow.runtime.worker.worker_status import WorkerAddress

    if all("://" in target for target in targets):
        with option_errors("TARGET"):
            for target in targets:
                transport_of(target).check_address(target, insecure=True, listening=False)
        if len(keys) not in (0, 1, len(targets)):
            raise ArgumentError(
                f"{len(keys)} times --worker-key for {len(targets)} addresses: give one for all, "
                "or one for each in their order"
            )
        with option_errors("--worker-key"):
            digits = [ring.key_of(key, WORKER) for key in keys] or [""]
        each = digits if len(digits) > 1 else digits * len(targets)
        return [WorkerAddress(*pair) for pair in zip(targets, each, strict=True)], None
    if len(targets) != 1:
        raise ArgumentError("status takes addresses tcp://host:port, or one cluster file")
    (target,) = targets
    if not os.path.isfile(target):
        raise ArgumentError(
            f"{target!r} is neither an address tcp://host:port nor an existing file"
        )
    with option_errors("TARGET"):
        cluster = Cluster.load(target)
    if any(worker.address is None for worker in cluster.workers):
        raise ArgumentError(f"{target} has workers without addresses: there is nobody to ask")
    found = [
        WorkerAddress(worker.address or "", ring.key_of(worker.key, WORKER) if worker.key else "")
        for worker in cluster.workers
    ]
    return found, cluster


def _pair(
    workers: Sequence[WorkerAddress], key: str | None, cluster: Cluster | None, ring: Keyring
) -> KeyPair | None:
    """Return the key to ask with, if one is needed: --key, else the one that the cluster file
    names.

    A client that may only look has the cluster file, but perhaps not the key of its sessions.
    """
    from graphflow.runtime.worker.worker_status import choose_key_pair

    if key is None and not any(worker.key for worker in workers):
        return None
    if key is None and cluster is not None and cluster.key in {each.name for each in ring.pairs()}:
        key = cluster.key
    with option_errors("--key"):
        return choose_key_pair(ring, key)


def _watch(look: Any, every: float) -> None:
    """Print the answers again and again."""
    from rich.console import Console
    from rich.live import Live

    if not Console().is_terminal:  # print one table after the other
        while True:
            Console(width=_DEFAULT_WIDTH).print(render_answers(look()))
            sys.stdout.flush()
            time.sleep(every)
    with Live(render_answers(look()), refresh_per_second=4) as live:
        while True:
            time.sleep(every)
            live.update(render_answers(look()))


def _to_json(answers: Answers) -> dict[str, Any]:
    """Return the answers as plain data."""
    workers: list[Mapping[str, Any]] = []
    for worker, answer in answers:
        if isinstance(answer, GraphflowError):
            error = {"error": type(answer).__name__, "text": str(answer)}
            workers.append({"address": worker.address, **error})
        else:
            workers.append({"address": worker.address, **answer})
    return {"workers": workers}


# Tables -------------------------------------------------------------------------------------------


def render_answers(answers: Answers) -> RenderableType:
    """Return tables of workers, sessions and links; at the end the workers that failed to
    answer."""
    from rich.console import Group
    from rich.text import Text

    reports = {
        worker.address: answer
        for worker, answer in answers
        if not isinstance(answer, GraphflowError)
    }
    parts: list[RenderableType] = []
    if reports:
        parts.append(_workers_rows(reports))
    if any(report["sessions"] for report in reports.values()):
        parts += ["", _sessions_rows(reports)]
    if any(report["links"] for report in reports.values()):
        parts += ["", _links_rows(reports)]
    for worker, answer in answers:
        if isinstance(answer, GraphflowError):
            text = str(answer) if worker.address in str(answer) else f"{worker.address}: {answer}"
            parts += [*([""] if parts else []), Text(printable(text), style="bold red")]
    return Group(*parts)


@dataclass(frozen=True)
class _StatusTable:
    """Rows that are printed as a table, or as some lines each if the terminal is too narrow.

    Rich would shorten the cells of a table that does not fit.

    Args:
        left: heads of the first columns, aligned left.
        right: heads of columns of numbers.
        last: head of a last column that may wrap; "" for none.
    """

    title: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    last: str
    rows: tuple[tuple[str, ...], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._width() <= options.max_width:
            yield self._table()
        else:
            yield from self._lines(options.max_width)

    @property
    def _heads(self) -> tuple[str, ...]:
        return (*self.left, *self.right, *([self.last] if self.last else []))

    def _width(self) -> int:
        """Return the columns that a line of the table needs."""
        from rich.cells import cell_len

        columns = zip(self._heads, *self.rows, strict=True)
        widths = [max(map(cell_len, column)) for column in columns]
        if self.last:
            widths[-1] = min(widths[-1], _MIN_WRAPPED_WIDTH)
        return sum(widths) + _GAP * len(widths)

    def _table(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", title_style="bold", box=None)
        for name in self.left:
            table.add_column(name, no_wrap=True)
        for name in self.right:
            table.add_column(name, justify="right", no_wrap=True)
        if self.last:
            table.add_column(self.last, overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))  # Text: cells must not be read as markup
        return table

    def _lines(self, width: int) -> Iterator[RenderableType]:
        from rich.padding import Padding
        from rich.text import Text

        yield Text(self.title, style="bold")
        first, end = len(self.left), len(self.left) + len(self.right)
        for row in self.rows:
            cells = [f"{head}: {cell}" for head, cell in zip(self._heads, row, strict=True)]
            yield Text(_fill_lines(cells[:first], width), overflow="fold")
            further = [_fill_lines(cells[first:end], width - _GAP), *cells[end:]]
            yield Padding(Text("\n".join(further), overflow="fold"), (0, 0, 0, _GAP))


def _fill_lines(parts: Sequence[str], width: int) -> str:
    """Join parts into lines of at most `width` columns."""
    from rich.cells import cell_len

    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]}{' ' * _GAP}{part}" if lines else part
        if lines and cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def _sanitise(value: object) -> str:
    """Return a worker's text in one line, without control sequences for the terminal."""
    return " ".join(printable(str(value)).split())


def _workers_rows(reports: Mapping[str, Report]) -> _StatusTable:
    rows = []
    for address, report in reports.items():
        devices = ", ".join(map(str, report["devices"]))
        what = f"{report['host']}, process {report['pid']}, {devices}, version {report['version']}"
        rows.append(
            (
                _sanitise(address),
                show_age(report["uptime"]),
                str(len(report["sessions"])),
                show_bytes(report["resident"]),
                show_bytes(report["resident_peak"]),
                str(report["refused"]),
                _sanitise(what),
            )
        )
    heads = ("up", "sessions", "memory", "at most", "refused")
    return _StatusTable("Workers", ("address",), heads, "what it is", tuple(rows))


def _sessions_rows(reports: Mapping[str, Report]) -> _StatusTable:
    found = [
        (session, address) for address, report in reports.items() for session in report["sessions"]
    ]
    rows = []
    for session, address in sorted(found, key=lambda row: (row[0]["session"], row[0]["worker"])):
        rows.append(
            (
                _sanitise(session["session"]),
                _sanitise(f"{session['worker']} at {address.removeprefix('tcp://')}"),
                show_age(session["age"]),
                str(session["epoch"]),
                str(session["programs"]),
                str(session["step"]) if session["step"] >= 0 else "–",
                f"{session['steps_per_second']:.3g}",
                show_seconds(session["last_step_seconds"]) if session["committed"] else "–",
                show_bytes(sum(session["arenas"].values())),
                show_bytes(sum(session["variables"].values())),
                _sanitise(_describe_activity(session)),
            )
        )
    heads = ("age", "epoch", "programs", "step", "steps/s", "last step", "arenas", "variables")
    return _StatusTable("Sessions", ("session", "worker"), heads, "doing", tuple(rows))


def _describe_activity(session: Mapping[str, Any]) -> str:
    """Say what a session does now, and what it waits for."""
    if session["parked"]:
        return "its coordinator is silent"
    if not session["doing"]:
        return "idle"
    activity = f"{session['doing']}, {show_seconds(session['doing_seconds'])}"
    if not session["waits"]:
        return activity
    what, waited = session["waits"][0]
    more = f" and {session['waiting'] - 1} more" if session["waiting"] > 1 else ""
    return f"{activity}: waits for {what}{more}, {show_seconds(waited)}"


def _links_rows(reports: Mapping[str, Report]) -> _StatusTable:
    ways: dict[tuple[str, str], list[int | None]] = {}
    for address, report in reports.items():
        for link in report["links"]:
            ways.setdefault((address, link["peer"]), [None, None])[0] = link["sent"]
            ways.setdefault((link["peer"], address), [None, None])[1] = link["received"]
    rows = []
    for (source, target), (sent, received) in sorted(ways.items()):
        sizes = ("not asked" if n is None else show_bytes(n) for n in (sent, received))
        rows.append((_sanitise(source), _sanitise(target), *sizes))
    title = "Tensors between workers, so far"
    return _StatusTable(title, ("from", "to"), ("sent", "received"), "", tuple(rows))


def show_age(value: float) -> str:
    """Format a duration from seconds to days: "3 d 4 h", "5 min", "12 s"."""
    for unit, name, smaller, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if value >= unit:
            return f"{int(value // unit)} {name} {int(value % unit // smaller)} {below}"
    if value >= 60:
        return f"{int(value // 60)} min"
    return f"{math.floor(value)} s"
