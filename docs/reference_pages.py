"""Pages of the reference, made of docstrings: namespaces, the command line, files and variables."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import graphflow as gf

NAMESPACES = {
    "": "Graphs, sessions and functions",
    "nn": "Layers, losses and functions of networks",
    "optim": "Optimisers",
    "optim.schedules": "Schedules of learning rates",
    "init": "Initial values",
    "random": "Random numbers",
    "linalg": "Linear algebra",
    "sparse": "Sparse matrices",
    "fft": "Fourier transforms",
    "signal": "Signal processing",
    "data": "Data",
    "training": "Training",
    "metrics": "Metrics",
    "parallel": "Strategies",
    "placement": "Placement",
    "launch": "Launchers",
    "linear": "Linear models",
    "onnx": "ONNX",
    "debug": "Debugging",
    "array_api": "The array API standard",
    "errors": "Errors",
}
"""The public modules, each with the title of its page; "" for the package itself."""


DATA = {
    "__version__": "The version, as text.",
    "Rate": "A learning rate: a number, a tensor, or a schedule.",
    "PRODUCTS": "Known processors by name: GPUs and CPUs with their peaks and memory.",
    "WIRES": "Known links by name, with latency and bandwidth.",
}
"""What public names are that have no docstring of their own."""


def module_of(namespace: str) -> Any:
    """Return a public module by its name after `gf.`."""
    found: Any = gf
    for part in filter(None, namespace.split(".")):
        found = getattr(found, part)
    return found


def public_names(namespace: str) -> list[str]:
    """Return the public names of a module that are no modules, sorted."""
    module = module_of(namespace)
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    own = [name for name in names if not isinstance(getattr(module, name), ModuleType)]
    if namespace == "errors":
        own = [name for name in own if isinstance(getattr(module, name), type)]
    return sorted(own, key=str.lower)


def write_pages(folder: Path) -> None:
    """Write all pages of the reference."""
    folder.mkdir(exist_ok=True)
    pages = {_page(name): _namespace_page(name) for name in NAMESPACES}
    pages |= {"cli": _command_page(), "cluster-file": _cluster_file_page()}
    pages["environment"] = _environment_page()
    toc = "\n".join(pages)
    pages["index"] = f"# Reference\n\n```{{toctree}}\n:maxdepth: 1\n\n{toc}\n```\n"
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def _page(namespace: str) -> str:
    return f"gf.{namespace}" if namespace else "gf"


def _namespace_page(namespace: str) -> str:
    """Return the page of a module: each public name with its signature and docstring."""
    module = module_of(namespace)
    where = "graphflow" + ("." + namespace if namespace else "")
    lines = [f"# {NAMESPACES[namespace]}: `{_page(namespace)}`", "", "```{eval-rst}"]
    lines += [f".. currentmodule:: {where}", ""]
    for name in public_names(namespace):
        lines += _directive(module, where, name)
    return "\n".join([*lines, "```", ""])


def _directive(module: Any, where: str, name: str) -> list[str]:
    """Return the directive that shows one public name."""
    value = getattr(module, name)
    if where != "graphflow" and getattr(gf, name, None) is value:  # one name, one description
        return [f"`{name}` is :py:obj:`gf.{name} <graphflow.{name}>`.", ""]
    if isinstance(value, type):
        if issubclass(value, BaseException):
            return [f".. autoexception:: {where}.{name}", ""]
        return [f".. autoclass:: {where}.{name}", "   :members:", ""]
    if callable(value):
        return [f".. autofunction:: {where}.{name}", ""]
    text = DATA.get(name, type(value).__name__)
    return [f".. py:data:: {where}.{name}", "", f"   {text}", ""]


def _command_page() -> str:
    """Return the page of the command line, as its `--help` tells it."""
    import typer.main
    from typer.cli import get_docs_for_click

    from graphflow.cli.main import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="graphflow")
    return "# Command line\n\n" + get_docs_for_click(obj=command, ctx=context, name="graphflow")


def _cluster_file_page() -> str:
    """Return the page of cluster files: the docstring of the module that reads them."""
    from graphflow.placement.clusters import cluster_file

    text = inspect.getdoc(cluster_file) or ""
    return f"# Cluster file\n\n```text\n{text}\n```\n"


def _environment_page() -> str:
    """Return the page of environment variables: each with the place that describes it."""
    from graphflow.base import environment

    rows = [f"| `{name}` | {what} |" for name, what in sorted(environment.DESCRIPTIONS.items())]
    head = "# Environment variables\n\n| variable | meaning |\n|---|---|\n"
    return head + "\n".join(rows) + "\n"


# Docstrings ---------------------------------------------------------------------------------------

_SPECIAL = re.compile(r"([*|\\]|(?<=\w)_(?=\W|$))")


def escape_docstring(
    app: object, what: str, name: str, obj: Any, options: object, lines: list[str]
) -> None:
    """Make reStructuredText of a docstring, which is plain text with `names` in backticks.

    A block that is indented after an empty line is code.
    """
    lines[:] = _with_code_blocks(lines)


def _with_code_blocks(lines: list[str]) -> Iterator[str]:
    before, is_after_blank, code = 0, False, 0  # indents: of the last text, and of code
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            is_after_blank = True
            yield line
            continue
        if code and indent < code:
            code = 0
        elif not code and is_after_blank and indent >= before + 4:
            code = indent
            yield from (before * " " + "::", "")
        if not code:
            before = indent
        is_after_blank = False
        yield line if code else _escape(line)


def _escape(line: str) -> str:
    pieces = line.split("`")
    pieces[::2] = [_SPECIAL.sub(r"\\\1", piece) for piece in pieces[::2]]
    pieces[2::2] = [("\\ " if each[:1].isalnum() else "") + each for each in pieces[2::2]]
    return "`".join(pieces)


def skip_member(
    app: object, what: str, name: str, obj: Any, skip: bool, options: object
) -> bool | None:
    """Leave out methods that scikit-learn adds to estimators for its metadata routing."""
    return True if name.startswith("set_") and name.endswith("_request") else None
