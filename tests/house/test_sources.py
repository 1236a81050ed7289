"""Rules of the project that no linter knows, checked on syntax trees."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest

from tests.house.sources import LINKED_PACKAGES, ROOT, Source, imports, sources

# Modules that execute code when they read bytes.
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"}
UNPICKLING_CALLS = {"np.load", "numpy.load", "torch.load", "pd.read_pickle", "pandas.read_pickle"}
# Of multiprocessing, only these do not pickle what they carry.
PLAIN_MULTIPROCESSING = ("multiprocessing.shared_memory", "multiprocessing.resource_tracker")
# Names under which distributions are imported, where the two differ.
IMPORT_NAMES = {"pyzmq": "zmq", "scikit-learn": "sklearn", "nvmath-python": "nvmath",
                "cupy-cuda13x": "cupy cupyx cupy_backends",
                "prometheus-client": "prometheus_client",
                "nvidia-cudnn-frontend": "cudnn", "pillow": "PIL"}  # fmt: skip
# In the standard library of later Pythons, and imported only there.
LATER = {"annotationlib"}


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def _in_no_function(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported: function bodies are left out."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [*node.decorator_list, *node.args.defaults]
            pending += [default for default in node.args.kw_defaults if default is not None]
        elif not isinstance(node, ast.Lambda):
            pending += ast.iter_child_nodes(node)


def test_the_three_packages_are_relative_links_inside_graphflow() -> None:
    for name in LINKED_PACKAGES:
        link = ROOT / "graphflow" / name
        if link.is_symlink():  # an unpacked sdist holds the folders themselves
            assert str(link.readlink()) == f"../{name}"
        assert (link / "__init__.py").is_file()


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(s.path.relative_to(ROOT)) for s in sources() if not ast.get_docstring(s.tree)]
    assert silent == []


def test_imports_are_absolute_and_never_name_a_bare_folder() -> None:
    wrong = [
        f"{source.locate(node)}: {name}"
        for source in sources()
        for node, name in imports(source)
        if name.startswith(".") or name.split(".")[0] in LINKED_PACKAGES
    ]
    assert wrong == []


def test_internals_never_import_the_facade() -> None:
    wrong = []
    for source in sources():
        if source.module == "graphflow":
            continue
        for node, name in imports(source):
            whole = name == "graphflow"
            reexported = name.count(".") == 1 and name.startswith("graphflow.")
            if whole or (reexported and not _is_module(name)):
                wrong.append(f"{source.locate(node)}: {name}")
    assert wrong == []


def test_nothing_that_unpickles_is_imported() -> None:
    wrong = []
    for source in sources():
        for node, name in imports(source):
            head = name.split(".")[0]
            pickles = head in UNPICKLERS or name.endswith(".ProcessPoolExecutor")
            if head == "multiprocessing" and not name.startswith(PLAIN_MULTIPROCESSING):
                pickles = True
            if pickles:
                wrong.append(f"{source.locate(node)}: {name}")
    assert wrong == []


def test_nothing_that_unpickles_is_called() -> None:
    wrong = []
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and node.attr in PICKLING_METHODS:
                wrong.append(f"{source.locate(node)}: {node.attr}")
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                wrong += [f"{source.locate(node)}: {name}"] * (name in UNPICKLING_CALLS)
                wrong += [
                    f"{source.locate(node)}: allow_pickle"
                    for keyword in node.keywords
                    if keyword.arg == "allow_pickle"
                    and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
                ]
    assert wrong == []


@pytest.mark.parametrize(
    ("spoilt", "rule"),
    [("import _pickle", "imported"), ("from pickle import loads", "imported"),
     ("from multiprocessing import Pool", "imported"), ("sock.recv_pyobj()", "called"),
     ("np.load(p, None, True)", "called"), ("f(allow_pickle=True)", "called")],
)  # fmt: skip
def test_the_rules_on_pickles_see_what_they_forbid(
    spoilt: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("graphflow.runtime.odd", ROOT / "odd.py", spoilt)
    monkeypatch.setattr("tests.house.test_sources.sources", lambda: (source,))
    with pytest.raises(AssertionError):
        {
            "imported": test_nothing_that_unpickles_is_imported,
            "called": test_nothing_that_unpickles_is_called,
        }[rule]()


def test_no_module_reads_the_environment_when_it_is_imported() -> None:
    wrong = [
        source.locate(node)
        for source in sources()
        for node in _in_no_function(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}
    ]
    assert wrong == []


def test_the_environment_is_read_in_one_place() -> None:
    readers = {"graphflow.base.environment"}
    reading = re.compile(r"\bos\.(environ|getenv)")
    assert {source.module for source in sources() if reading.search(source.text)} == readers


@cache
def _list_raised_errors() -> list[tuple[str, str]]:
    """Return the name of each error that is raised, and the place."""
    found = []
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                found.append((ast.unparse(raised), source.locate(node)))
    return found


@pytest.mark.parametrize("builtin", [Exception, ValueError, TypeError, RuntimeError, KeyError])
def test_errors_raised_on_purpose_belong_to_the_hierarchy(builtin: type[Exception]) -> None:
    assert len(_list_raised_errors()) > 500
    assert [where for name, where in _list_raised_errors() if name == builtin.__name__] == []


def test_every_library_that_is_imported_is_declared() -> None:
    assert sorted(_list_undeclared_imports(sources())) == []


def _list_undeclared_imports(files: tuple[Source, ...]) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["gpu"], *extras["viz"], *extras["onnx"]]
    declared += [*extras["metrics"], *extras["linear"], *extras["data"], *extras["tensorboard"]]
    declared += [*extras["ray"], *extras["dask"]]
    names = [re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in declared]
    known = {one for name in names for one in IMPORT_NAMES.get(name, name).split()}
    known |= {"graphflow", *sys.stdlib_module_names, *LATER}
    return {
        f"{source.locate(node)}: {name}"
        for source in files
        for node, name in imports(source)
        if not name.startswith(".") and name.split(".")[0] not in known
    }
