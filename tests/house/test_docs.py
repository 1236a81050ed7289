"""Pages of docs/: their Python runs and prints what they show, and the files they name exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import graphflow as gf
from tests import loaded
from tests.house.sources import ROOT, sources

SLOW = pytest.mark.slow  # plans for dozens of clusters, and for a thousand GPUs
PAGES = [
    "block-methods", "linear-models", "parallel", "parameter-servers", "pipelines", "layers",
    "data", "launchers", "metrics", "training", "placers", "stages",
    "tables", "tutorial", "weights", "from-pytorch", "from-keras", "from-jax",
    pytest.param("whatif", marks=SLOW),
]  # fmt: skip
IN_PARTS = [
    "checkpoints", "collectives", "compression", "dtypes", "functions", "linalg", "local-sgd",
    "memory", "observability", "onnx", "transport", "views",
]  # fmt: skip
"""Pages whose Python assumes that the reader has a model, its batches and a session."""
GO_ON = {
    "checkpoints": ["mirrors"],
    "parallel": ["sharding", "async-model"],
    "parameter-servers": ["changing-servers", "window-history"],
}
"""Pages whose Python goes on where that of another page ends."""

GIVEN = """
import itertools
import numpy as np, graphflow as gf

cluster = gf.Cluster.here(devices=["cpu:0", "cpu:1"])
x = images = gf.placeholder("float32", (None, 8), name="data")
labels = gf.placeholder("int64", (None,), name="labels")
w = gf.variable(gf.init.glorot((8, 3)), name="w")
model = lambda x: gf.nn.softmax(x @ w)
y = model(x)
loss = gf.mean(gf.nn.cross_entropy(x @ w, labels))
train = gf.optim.SGD(0.1).minimize(loss)
rows = np.ones((4, 8), "float32")
feeds = {images: rows, labels: np.zeros(4, "int64")}
name = loss.name
loss_gradient = lambda i: gf.gradients(loss, [w])[0]
s = gf.Session(cluster)
"""
MORE_GIVEN = {
    "checkpoints": "batches, train = [rows] * 10_000, gf.optim.SGD(0.1).minimize(gf.mean(y))",
    "onnx": "gf.onnx.save('model.onnx', {'prob': y}, inputs=[x], values=s)\nimages = rows",
    "transport": "batches = itertools.repeat(feeds)",
    "views": "plan = gf.plan([loss, train], cluster, shapes={x: (4, 8), labels: (4,)})",
}
INTERNAL = {"README", "architecture", "index"}
USER_PAGES = {
    page.stem: page
    for page in sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/*.md")])
    if page.stem not in INTERNAL and page.parent.name not in {"design", "journal", "reference"}
}
"""The pages for users by their names, each in the folder of its part."""
BLOCK = re.compile(r"```python\n(.*?)```(?:\n```\n(.*?)```)?", re.DOTALL)


def find_blocks(page: str) -> list[tuple[str, str]]:
    """Return the Python of a page and of those that go on with it, each with what it prints."""
    texts = [USER_PAGES[name].read_text(encoding="utf-8") for name in (page, *GO_ON.get(page, ()))]
    return [block for text in texts for block in BLOCK.findall(text)]


@pytest.mark.every(5)
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    blocks = find_blocks(page)
    assert blocks
    out = run_code("\n".join(code for code, _ in blocks), tmp_path)
    for _, printed in blocks:
        assert printed in out


@pytest.mark.every(2)
@pytest.mark.parametrize("page", IN_PARTS)
def test_the_python_of_a_page_runs_with_what_it_takes_for_granted(
    page: str, tmp_path: Path
) -> None:
    if page == "onnx":
        pytest.importorskip("onnx")
    blocks = find_blocks(page)
    code = [GIVEN, MORE_GIVEN.get(page, ""), *(code for code, _ in blocks)]
    run_code("\n".join(code).replace("10_000", "500"), tmp_path)  # steps, which take seconds


def test_every_page_with_python_is_run() -> None:
    named = {str(getattr(page, "values", [page])[0]) for page in PAGES} | {*IN_PARTS}
    named |= {name for names in GO_ON.values() for name in names}
    named.add("extending")  # tests/runtime/worker/test_custom_ops.py runs its files
    assert named == {
        name for name, page in USER_PAGES.items() if BLOCK.search(page.read_text(encoding="utf-8"))
    }


def run_code(code: str, folder: Path) -> str:
    """Run a program that must end without an error, and return what it prints."""
    script = folder / "template.py"
    script.write_text(code, encoding="utf-8")
    done = loaded.run_python([str(script)], {**os.environ, "PYTHONPATH": str(ROOT)}, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_link_of_the_docs_leads_somewhere() -> None:
    for page in READ:
        for target in re.findall(r"\]\((?!http)([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_anchor_of_the_docs_is_a_heading() -> None:
    for page in READ:
        for target, anchor in re.findall(
            r"\]\((?!http)([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")
        ):
            text = (page.parent / target if target else page).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            there = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in there, f"{page.name}: {target}#{anchor}"


READ = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CHANGELOG")),
]
"""Every page that people read."""

FOLDERS = "tests|benchmarks|examples|docs|graphflow|ops|placement|runtime"
MADE = "benchmarks/results/"  # by whoever runs a benchmark


def test_every_path_that_a_page_names_is_there() -> None:
    named = re.compile(rf"`((?:{FOLDERS})/[\w*./-]+)(?:::\w+)?`")
    for page in READ:
        for path in named.findall(page.read_text(encoding="utf-8")):
            there = path.startswith(MADE) or any(ROOT.glob(path)) or (ROOT / f"{path}.py").exists()
            assert there, f"{page.name}: {path}"


def test_the_architecture_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w/]+)/` \| [^|]+ \|$", text, re.MULTILINE)
    folders = {source.path.relative_to(ROOT).parent.as_posix() for source in sources()}
    there = {re.sub("^graphflow/(ops|placement|runtime)", r"\1", folder) for folder in folders}
    assert len(there) > 50
    assert len(named) == len(set(named))
    assert set(named) == there


def _words(text: str) -> int:
    """Count the words of a page: marks of tables and lists are none."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_pages_that_everybody_reads_stay_short() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, newest = re.split(r"^## \[", changes, flags=re.MULTILINE)[1:3]
    assert unreleased.startswith("Unreleased]") and _words(unreleased) <= 600
    assert newest.startswith(f"{gf.__version__}]") and 50 < _words(newest) <= 600
    assert _words((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")) <= 2700


def test_pages_for_users_are_short() -> None:
    words = {name: _words(page.read_text(encoding="utf-8")) for name, page in USER_PAGES.items()}
    assert {name: count for name, count in words.items() if count > 2000} == {}


def test_each_page_is_in_the_sites_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in USER_PAGES.values()]
    assert [str(page) for page in pages if str(page) not in index] == []


def test_the_architecture_answers_where_things_are() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## Where is …?")[1]
    rows = re.findall(r"^\| (.+\?) \| `([\w/]+\.py)::(\w+)` \|$", section, re.MULTILINE)
    assert len(rows) == section.count("? |") >= 30
    files = {s.path.resolve(): s for s in sources()}
    for question, path, name in rows:
        source = files.get((ROOT / path).resolve())
        assert source is not None, f"{question}: {path} is not there"
        defined = {getattr(node, "name", None) for node in source.nodes}
        assert name in defined, f"{question}: {path} defines no {name}"


def test_the_glossary_is_short_and_sorted() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| \*\*([^*]+)\*\* \| [^|]{10,} \|$", text, re.MULTILINE)
    assert 30 <= len(terms) <= 60
    assert terms == sorted(terms, key=str.lower)


def test_every_design_page_is_listed() -> None:
    folder = ROOT / "docs" / "design"
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    pages = {page.relative_to(folder).as_posix() for page in folder.rglob("*.md")}
    assert sorted(listed) == sorted(pages - {"README.md"})
