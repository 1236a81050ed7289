"""What is asked of functions that users write: nothing that their annotations could get wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import graphflow as gf
from graphflow.ir.op import Op, register

WRITTEN = """
from typing import TYPE_CHECKING
from graphflow.parallel import one_f_one_b

if TYPE_CHECKING:
    from nowhere import Nothing

def added(carry: Nothing, item: Nothing) -> Nothing: return carry + item, item
def below(count: Nothing) -> Nothing: return count < 3
def next(count: Nothing) -> Nothing: return count + 1
def one() -> Nothing: return 1.0
def spec_of(x: Nothing, by: Nothing) -> Nothing: return x
def times(xp: Nothing, x: Nothing, by: Nothing) -> Nothing: return x * by
def schedule(stages: Nothing, passes: Nothing) -> Nothing: return one_f_one_b(stages, passes)
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated at once")
def test_names_that_only_type_checkers_know_may_annotate_a_users_function(tmp_path: Path) -> None:
    users: dict[str, Any] = {}
    exec(compile(WRITTEN, tmp_path / "users.py", "exec", dont_inherit=True), users)
    count, line = gf.constant(0), gf.constant([1.0, 2.0])
    op = register(Op("test.times", infer=users["spec_of"], kernel=users["times"]))
    fetches = [
        gf.scan(users["added"], gf.constant(0.0), line)[0],
        gf.while_loop(users["below"], users["next"], count),
        gf.cond(gf.constant(True), users["one"], users["one"]),
        op(line, by=2.0),
    ]
    with gf.Session() as s:
        total, last, one, doubled = s.run(fetches)
    assert (total, last, one, doubled.tolist()) == (3, 3, 1, [2, 4])
    gf.parallel.Pipeline(2, schedule=users["schedule"])
    with pytest.raises(gf.errors.ArgumentError, match=r"'stages': 'Nothing'|stages: 'Nothing'"):
        gf.while_loop(users["schedule"], users["next"], count)
