"""`graphflow doctor`: whether this machine has what graphflow needs, and what to do if not."""

from __future__ import annotations

import json

import typer

from graphflow.cli.machine_checks import FAILURE, OK, Finding, run_checks
from graphflow.cli.options import AsJson

_MARKS = {OK: ("✓", "green"), FAILURE: ("✗", "red"), "warning": ("!", "yellow")}


def doctor(as_json: AsJson = False) -> None:
    """Check this machine for problems: BLAS, LLVM, AMX, GPU, shared memory, ports, keys, limits.

    The checks take some seconds. Each problem is shown with its remedy. The exit code is 1 if a
    check fails.
    """
    if as_json:
        findings = list(run_checks())
        typer.echo(json.dumps([_as_dict(each) for each in findings], indent=2))
    else:
        findings = []
        for finding in run_checks():
            _print(finding)
            findings.append(finding)
        counts = {state: sum(each.state == state for each in findings) for state in _MARKS}
        typer.echo(f"{counts[OK]} fine, {counts['warning']} to improve, {counts[FAILURE]} to fix")
    if any(each.state == FAILURE for each in findings):
        raise typer.Exit(1)


def _as_dict(finding: Finding) -> dict[str, str]:
    return {name: getattr(finding, name) for name in ("check", "state", "text", "remedy")}


def _print(finding: Finding) -> None:
    mark, color = _MARKS[finding.state]
    typer.secho(f"{mark} {finding.check:<14}", fg=color, nl=False)
    typer.echo(finding.text)
    if finding.remedy:
        typer.echo(f"  {'':<14}→ {finding.remedy}")
