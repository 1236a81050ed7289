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
