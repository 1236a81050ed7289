"""Files import each other in one direction only, so that each can be read after those it needs."""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx

from tests.house.sources import ROOT, Source, imports, sources


def import_graph(files: Iterable[Source]) -> nx.DiGraph:
    """Return the graph from each module to those that it imports: wherever the import stands, in a
    function or under TYPE_CHECKING, too.

    That Python runs the `__init__` of a package before its modules makes no edge here.
    """
    files = tuple(files)
    modules = {source.module for source in files}
    graph = nx.DiGraph()
    for source in files:
        for _, name in imports(source):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != source.module:
                graph.add_edge(source.module, name)
    return graph


def circles(graph: nx.DiGraph) -> list[set[str]]:
    """Return the groups of modules in which each one needs, by some way, each other."""
    return [found for found in nx.strongly_connected_components(graph) if len(found) > 1]


def rooms_of(files: Iterable[Source]) -> dict[str, nx.DiGraph]:
    """Return, for each package, the graph of its subpackages that import each other."""
    files = tuple(files)
    packages = {source.module for source in files if source.path.name == "__init__.py"}
    rooms: dict[str, nx.DiGraph] = {}
    for edge in import_graph(files).edges:
        first, second = (module.split(".")[: None if module in packages else -1] for module in edge)
        pairs = enumerate(zip(first, second, strict=False))
        depth = next((i for i, (one, other) in pairs if one != other), None)
        if depth is not None:
            found = rooms.setdefault(".".join(first[:depth]), nx.DiGraph())
            found.add_edge(first[depth], second[depth])
    return rooms


TANGLED = {
    "graphflow": "half of the front end is below ops; contracts hold the halves apart",
    "graphflow.ops": "kernels are among the families of ops that they compute",
    "graphflow.parallel": "strategies wrap each other's graphs",
    "graphflow.placement": "plans draw themselves, and drawings read plans",
}
"""Packages whose subpackages import each other both ways, and why."""


def test_subpackages_of_a_package_import_each_other_one_way() -> None:
    rooms = rooms_of(sources())
    assert len(rooms) > 12
    assert {name for name, graph in rooms.items() if circles(graph)} == TANGLED.keys()


def test_no_import_circles() -> None:
    graph = import_graph(sources())
    for circle in circles(graph):
        edges = sorted(f"{a} imports {b}" for a, b in graph.subgraph(circle).edges)
        raise AssertionError(
            "these files need each other; move what they share to a file of its own: "
            + "; ".join(edges)
        )


def test_this_rule_sees_imports_wherever_they_stand() -> None:
    texts = {
        "graphflow.a": "def f():\n  from graphflow.b import g",
        "graphflow.b": "if TYPE_CHECKING:\n  import graphflow.c",
        "graphflow.c": "from graphflow import a",
        "graphflow.d": "from graphflow.a import f",
    }
    files = [Source(module, ROOT / "odd.py", text) for module, text in texts.items()]
    assert circles(import_graph(files)) == [{"graphflow.a", "graphflow.b", "graphflow.c"}]


def test_the_rule_on_subpackages_sees_both_ways() -> None:
    texts = {
        "graphflow.a.b": "from graphflow.a.c.two import f",
        "graphflow.a.b.one": "",
        "graphflow.a.c": "",
        "graphflow.a.c.two": "from graphflow.a import three",
        "graphflow.a.c.four": "def f():\n  from graphflow.a.b import one",
        "graphflow.a.three": "from graphflow.a.c import four",
    }
    files = [
        Source(module, ROOT / ("__init__.py" if module[-2] == "." else "odd.py"), text)
        for module, text in texts.items()
    ]
    (found,) = rooms_of(files).items()
    assert found[0] == "graphflow.a" and circles(found[1]) == [{"b", "c"}]
