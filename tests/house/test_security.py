"""Rules that keep foreign bytes from being executed, checked on syntax trees; SECURITY.md names
real tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.sources import ROOT, Source, sources, sources_with

RUNS_TEXT = {"eval", "exec", "compile", "__import__", "execfile"}
# Modules that may execute text or import by name, and why foreign text never gets there.
ALLOWED = {
    (
        "graphflow.runtime.program.source_text",
        "exec",
    ): "lines of our own identifiers, with a node's number in each",
    (
        "graphflow.runtime.program.source_text",
        "compile",
    ): "the same lines; names of nodes are its file's name only",
}
IMPORTS_BY_NAME = {
    "graphflow": "attributes that the package lists",
    "graphflow.data": "a table of public names",
    "graphflow.ir.nodes.tensor_operators": "a literal",
    "graphflow.linear": "a table of estimators",
    "graphflow.base.process.user_modules": "modules that the worker was started with",
    "graphflow.passes.base": "files of the passes' own folder",
    "graphflow.placement.placers.base": "files of the placers' own folder",
    "graphflow.placement.placers.loops.dispatch": "modules of ours, by literals",
    "graphflow.ops.networks.layers.layer_base": "two literals",
    "graphflow.runtime.transport": "a table of schemes",
    "graphflow.runtime.launch.child": "two literals",
    "graphflow.runtime.launch.fork_server": "a table of what every worker loads",
    "graphflow.runtime.worker.serving": "a Python file that the command line of a launcher names",
}
EVERYWHERE = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::\])")


def calls(source: Source) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call with the name that is called, `a.b` for an attribute."""
    for node in source.nodes:
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def docstrings(source: Source) -> set[int]:
    """Return the ids of constants that are docstrings."""
    found = set()
    for node in source.nodes:
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            found.add(id(body[0].value))
    return found


def runs_text(source: Source) -> set[str]:
    """Return the functions that execute text and that a file calls or aliases."""
    found = set()
    last = {name.rpartition(".")[2] for name in RUNS_TEXT}
    for node in source.nodes:
        own = getattr(node, "id", getattr(node, "attr", None))
        if own in last and isinstance(node, ast.Name | ast.Attribute):
            found.add(ast.unparse(node).removeprefix("builtins."))
    return found & RUNS_TEXT


def test_text_is_run_in_one_place_whose_text_is_ours() -> None:
    files = sources_with(sources(), *RUNS_TEXT)
    found = {(source.module, name) for source in files for name in runs_text(source)}
    assert found == set(ALLOWED)


def test_the_text_of_programs_is_made_of_identifiers_and_numbers() -> None:
    """Every value in a line of generated code must be an identifier or a number of this package."""
    (code,) = [
        source
        for source in sources()
        if source.module == "graphflow.runtime.program.code_generator"
    ]
    wrong = []
    for call, name in calls(code):
        if not name.endswith("._line") and not name.endswith(".line"):
            continue
        for part in ast.walk(call):
            if isinstance(part, ast.FormattedValue):
                text = ast.unparse(part.value)
                if re.search(r"\.name\b(?!\()|\.names\[node\]|attrs\[|location", text):
                    wrong.append(f"{code.locate(call)}: {text}")
    allowed = {"int(node.attrs['edge'])"}
    assert [each for each in wrong if each.split(": ")[1] not in allowed] == []


def test_modules_are_imported_by_name_only_where_the_name_is_not_a_strangers() -> None:
    loaders = {"import_module", "exec_module", "spec_from_file_location"}
    found = {
        source.module
        for source in sources_with(sources(), *loaders)
        for _, name in calls(source)
        if name.split(".")[-1] in loaders
    }
    assert found == set(IMPORTS_BY_NAME)


def test_no_shell_is_started() -> None:
    wrong = []
    for source in sources_with(sources(), "shell", "system", "popen", "getoutput"):
        for call, name in calls(source):
            shell = any(word.arg == "shell" for word in call.keywords)
            if name in {"os.system", "os.popen", "subprocess.getoutput"} or shell:
                wrong.append(source.locate(call))
    assert wrong == []


def test_nothing_listens_everywhere_unless_a_user_says_so() -> None:
    wrong = []
    for source in sources_with(sources(), "tcp"):
        told = docstrings(source)
        for node in source.nodes:
            text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if text and id(node) not in told and EVERYWHERE.search(node.value):
                wrong.append(f"{source.locate(node)}: {node.value!r}")
    assert wrong == []


@pytest.mark.parametrize(
    "spoilt",
    ["eval(x)", "exec(compile(x, 'f', 'exec'))", "__import__(x)", "run = eval", "builtins.exec(x)"],
)
def test_these_rules_see_what_they_forbid(spoilt: str) -> None:
    source = Source("graphflow.runtime.wire.frame_codec", ROOT / "frame_codec.py", spoilt)
    assert runs_text(source)


@pytest.mark.parametrize(
    "spoilt", ["WHERE = 'tcp://*:7001'", "def f(port): return f'tcp://*:{port}'",
               "socket.bind('tcp://0.0.0.0:%d' % port)", "X = 'tcp://[::]:1'"],
)  # fmt: skip
def test_the_rule_on_addresses_sees_what_it_forbids(
    spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("graphflow.runtime.odd", ROOT / "odd.py", spoilt)
    monkeypatch.setattr("tests.house.test_security.sources", lambda: (source,))
    with pytest.raises(AssertionError):
        test_nothing_listens_everywhere_unless_a_user_says_so()


# SECURITY.md ------------------------------------------------------------------------------------


def _named_tests() -> list[tuple[str, str]]:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    return re.findall(r"`(tests/[\w/.]+\.py)::(\w+)`", text)


def test_security_md_names_tests_that_exist() -> None:
    named = _named_tests()
    assert len(named) >= 40
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file()
        or not re.search(rf"^def {name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []


def test_security_md_says_what_it_must() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for heading in ("Reporting", "What is protected", "Who might attack", "Boundaries",
                    "What is not protected", "How each point is tested"):  # fmt: skip
        assert f"## {heading}" in text
    from graphflow.runtime.security import connection_guard as door
    from graphflow.runtime.wire import frame_codec as wire

    assert f"{wire.CONTROL_CAP >> 20} MiB" in text and f"{door.UNFRAMED_CAP >> 20} MiB" in text
    assert f"{door.HANDSHAKE_SECONDS:g} s" in text and f"{door.SILENCE_SECONDS:g} s" in text
