"""Names that a reader need not open: functions are verbs, predicates read as predicates, and each
class name stands for one class of the project. Helpers of tests follow the same rules."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

import pytest

from tests.house.sources import LINKED_PACKAGES, ROOT, Source, sources, sources_of_tests

EXEMPT = {
    "graphflow/parallel/pipelining/standard_schedules.py:interleaved": "public",
    "graphflow/parallel/report.py:StrategyReport.between": "public",
    "ops/base/batching_rules.py:along": "public: ops of users name it",
    "ops/pointwise/elementwise.py:elementwise.into": "it stands in for the parameter of that name",
    "placement/clusters/cluster.py:Cluster.pinned": "public",
    "placement/simulation/simulator.py:Timeline.on": "public",
    "ops/kernels/compiled_loops/python_to_llvm.py:_Body._for": "named after a statement",
    "runtime/tracing/trace.py:Trace.measured": "public",
    "ops/ordering/search.py:searchsorted": "the name that numpy and the array API standard have",
    "tests/fuzz/targets.py:Poured.setblocking": "it stands in for that method of a socket",
}
"""Functions that break a rule on purpose, as `file:qualified name`, and why."""


EXEMPT_CLASSES = {
    "runtime/wire/messages.py:Tensor": "the class name is the message's kind on the wire",
}


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A participle says what has become of something, and leaves open what the function does. These are
# the irregular ones that code is prone to use; verbs whose infinitive is the same are left out.
IRREGULAR = words(
    """
    begun bound broken brought built caught chosen dealt done drawn driven fallen felt fought found
    given gone grown heard held hidden kept known laid left lent lost made meant met paid risen sat
    seen sent shaken shown sold spelt spent spoken spun stood struck stuck swept taken taught
    thought thrown told torn understood woken won worn woven written
    """
)
# Regular participles end in -ed, -en or -ing, and so do these nouns, adjectives and infinitives.
NO_PARTICIPLES = words(
    """
    bearing bed bfloat bleed breed bring children cling den embed embedding encoding even exceed
    feed flatten garden gen happen heading lengthen listen mapping need open padding pen ping
    pooling proceed red ring rounding screen seed setting shed shorten speed spelling spring
    strengthen string succeed reopen sing ten then thing tighten token warning weed when widen
    wing
    """
)
# A function that is called only so says where, when or how, but not what it does.
PREPOSITIONS = words(
    """
    above again ahead along apart as aside at away back below beside between beyond by else ever for
    from in into late near never of off on once only out over so still thus to together under until
    with yet
    """
)
# First words that make a question or a statement of a name: `has_room`, `never_changes`.
QUESTIONS = words(
    """
    are can cannot could did do does had has have is may might must needs never should still surely
    was were will would
    """
)
# Verbs of actions that return whether they succeeded or did anything, as `try_send() -> bool`.
ACTIONS = words(
    """
    abort accept acknowledge acquire add admit answer attend advance apply ask begin borrow cancel
    check claim clear close collect compare confirm connect copy deliver descend discard drain drive
    emit ensure exchange extend fill finish flush fold give grow handle improve insert join keep
    kill learn lend load look match meet merge note offer place poll pop preempt process push put
    read reap receive record reduce refuse register reject release relax remove replace report
    reserve reset resend resolve restore resume retry reuse run save schedule send settle share
    shrink skip span spin start stop swap switch take tell try update visit wait wake write
    """
)


Rule = Callable[[Iterable[Source]], list[str]]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Function(NamedTuple):
    """A function or method, with the names of what it is in."""

    at: str
    qualname: str
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def words(self) -> list[str]:
        return self.node.name.strip("_").split("_")

    @property
    def is_named_by_us(self) -> bool:
        """False for properties and fixtures, which are nouns, and for names such as `__len__`."""
        decorators = [ast.unparse(each) for each in self.node.decorator_list]
        is_noun = any(
            "property" in each or each.endswith(".setter") or "pytest.fixture" in each
            for each in decorators
        )
        return not is_noun and not self.node.name.startswith("__")


def functions(files: Iterable[Source]) -> Iterator[Function]:
    for source in files:
        for qualname, node in definitions(source):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found = Function(_place(source, node), qualname, node)
                if found.is_named_by_us and f"{_path(source)}:{qualname}" not in EXEMPT:
                    yield found


@cache
def definitions(source: Source) -> tuple[tuple[str, Definition], ...]:
    """Return every function and class of a file with its qualified name."""
    return tuple(_definitions(source.tree))


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # holds no definitions, but most of a file's nodes
        if isinstance(child, Definition):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


def _path(source: Source) -> str:
    """The file as it lies in the repository, not through a link in graphflow."""
    path = source.path.relative_to(ROOT).as_posix()
    return re.sub(f"^graphflow/({'|'.join(LINKED_PACKAGES)})/", r"\1/", path)


def _place(source: Source, node: Definition) -> str:
    return f"{_path(source)}:{node.lineno}"


def participles(files: Iterable[Source]) -> list[str]:
    return [
        f"{each.at}: {each.qualname} is a bare participle; name the action, as in `send_feeds`"
        for each in functions(files)
        if len(each.words) == 1 and _is_participle(each.words[0])
    ]


def _is_participle(word: str) -> bool:
    regular = len(word) > 3 and word.endswith(("ed", "en", "ing")) and word not in NO_PARTICIPLES
    return word in IRREGULAR or regular


def prepositions(files: Iterable[Source]) -> list[str]:
    return [
        f"{each.at}: {each.qualname} is a preposition or an adverb; put the verb before it"
        for each in functions(files)
        if len(each.words) == 1 and each.words[0] in PREPOSITIONS
    ]


def unasked_predicates(files: Iterable[Source]) -> list[str]:
    return [
        f"{each.at}: {each.qualname} returns a bool; begin it with is_, has_, can_, a verb such "
        "as `fits`, or a verb of ACTIONS if the bool says whether that was done"
        for each in functions(files)
        if each.node.returns is not None
        and ast.unparse(each.node.returns).strip("'\"") == "bool"
        and not _reads_as_predicate(each.words[0])
    ]


def _reads_as_predicate(word: str) -> bool:
    is_third_person = len(word) > 3 and word.endswith("s") and not word.endswith("ss")
    is_of_numpy = re.fullmatch("is[a-z]+", word) is not None  # isfinite, isnan
    return word in QUESTIONS | ACTIONS or is_third_person or is_of_numpy


def shared_class_names(files: Iterable[Source]) -> list[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for source in files:
        for _, node in definitions(source):
            exempt = f"{_path(source)}:{getattr(node, 'name', '')}" in EXEMPT_CLASSES
            if isinstance(node, ast.ClassDef) and not exempt:
                places[node.name].append(_place(source, node))
    return [
        f"class {name} stands for {len(found)} things, at {', '.join(found)}; give each its own"
        for name, found in places.items()
        if len(found) > 1
    ]


def test_no_function_is_one_bare_participle() -> None:
    assert participles(sources()) == []


def test_no_function_is_one_preposition() -> None:
    assert prepositions(sources()) == []


def test_a_function_that_returns_a_bool_reads_as_a_predicate_or_an_action() -> None:
    assert unasked_predicates(sources()) == []


@pytest.mark.parametrize("rule", [participles, prepositions, unasked_predicates])
def test_helpers_of_tests_are_named_as_functions_of_the_package(rule: Rule) -> None:
    assert rule(sources_of_tests()) == []


def test_every_class_name_is_unique() -> None:
    assert shared_class_names(sources()) == []


def test_every_exemption_is_still_needed() -> None:
    files = {_path(source): source for source in (*sources(), *sources_of_tests())}
    for exempt in (*EXEMPT, *EXEMPT_CLASSES):
        path, _, qualname = exempt.partition(":")
        assert qualname in dict(definitions(files[path])), exempt


@pytest.mark.parametrize(
    ("rule", "wrong", "right"),
    [
        (participles, "def told(): ...", "def tell_user(): ..."),
        (participles, "class A:\n  def _computing(self): ...",
         "class A:\n  @property\n  def loaded(self): ..."),
        (participles, "def f():\n  async def given(): ...", "def embedding(): ..."),
        (participles, "def made(): ...", "@pytest.fixture\ndef made(): ..."),
        (prepositions, "def until(): ...", "def wait_until(): ..."),
        (unasked_predicates, "def intact() -> bool: ...", "def is_intact() -> bool: ..."),
        (unasked_predicates, "def _room(x) -> 'bool': ...", "def fits(x) -> bool: ..."),
        (unasked_predicates, "def plain() -> bool: ...", "def try_send() -> bool: ..."),
        (shared_class_names, "class A: ...\ndef f():\n  class A: ...",
         "class A: ...\nclass B: ..."),
    ],
)  # fmt: skip
def test_each_rule_sees_what_it_forbids(rule: Rule, wrong: str, right: str) -> None:
    (told,) = rule([Source("graphflow.odd", ROOT / "graphflow/odd.py", wrong)])
    assert "graphflow/odd.py:" in told
    assert rule([Source("graphflow.odd", ROOT / "graphflow/odd.py", right)]) == []
