"""`graphflow keys`: keys with which workers and sessions beyond loopback authenticate each
other."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from graphflow.cli.arguments import option_errors
from graphflow.errors import KeyFileError
from graphflow.runtime.security.keys import (
    COORDINATOR,
    Keyring,
    check_name,
    check_role,
    describe_removal,
)

app = typer.Typer(
    name="keys",
    help="Make and trust keys. Workers and sessions on different machines authenticate by them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_MAX_BYTES = 1000  # to read of a key file, which may be endless, such as /dev/zero
Name = Annotated[str, typer.Argument(help="The key's name: letters, digits, dots, dashes.")]


@app.command()
def new(
    name: Name,
    role: Annotated[
        str,
        typer.Option(
            help="worker: runs workers; coordinator: opens sessions; client: shows status only."
        ),
    ] = COORDINATOR,
) -> None:
    """Make a key pair: NAME.secret, which stays here, and NAME.public, which others trust.

    Example: graphflow keys new box1 --role worker
    """
    ring = Keyring()
    with option_errors("keys new"):
        check_name(name, "NAME")
        check_role(role, "--role")
    pair = ring.create_pair(name, role)
    typer.echo(f"{pair.public}")
    typer.echo(
        f"made {ring.folder / name}.secret (keep it) and {name}.public (copy it to the machines "
        "that are to trust it, and run `graphflow keys add` there)",
        err=True,
    )


@app.command()
def add(
    file: Annotated[str, typer.Argument(help="File NAME.public, or - for stdin.")],
) -> None:
    """Trust a public key of another machine.

    Workers here accept sessions of a coordinator's key. Sessions here accept a worker's key.

    Example: graphflow keys add alice.public
    """
    piped = file == "-"
    where = "stdin" if piped else file
    try:
        with nullcontext(sys.stdin.buffer) if piped else Path(file).open("rb") as source:
            text = source.read(_MAX_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{where} cannot be read as a key: {error}") from None
    key = Keyring().add(text, where)
    typer.echo(f"trusting {key.name}, a {key.role}'s key {key.key[:16]}…")


@app.command("list")
def list_keys() -> None:
    """List your own keys and the trusted keys."""
    from rich.console import Console
    from rich.table import Table

    ring = Keyring()
    own, trusted = ring.pairs(), ring.read_trusted()
    for key in own:
        if not os.path.lexists(file := ring.folder / f"{key.name}.public"):
            typer.echo(f"{file} is missing; this line belongs in it: {key}", err=True)
    if not own and not trusted:
        typer.echo(f"no keys in {ring.folder}; `graphflow keys new NAME` makes one")
        return
    table = Table("name", "role", "", "public key", box=None, header_style="bold")
    for what, keys in (("own", own), ("trusted", trusted)):
        for key in keys:
            table.add_row(key.name, key.role, what, key.key)
    Console(width=120, soft_wrap=True).print(table)


@app.command()
def revoke(name: Name) -> None:
    """Stop trusting a key: running workers end its sessions within a second.

    Example: graphflow keys revoke alice
    """
    ring = Keyring()
    key = ring.revoke(name)
    if key is None:
        typer.echo(f"removed {name}.public, which held no key that can be read")
        return
    still = ring.files_of(key)
    if key.name == name and not still:
        typer.echo(f"trusting {key.name}, a {key.role}'s key {key.key[:16]}…, no longer")
        return
    held = f"removed {name}.public, which held the key of {key.name}, a {key.role}'s"
    typer.echo(f"{held}, {key.key[:16]}…" + ("" if still else ", trusted no longer"))
    for file in still:
        typer.echo(f"the same key is trusted still, by {file}; {describe_removal(file)}")
