"""Variables without names: their numbers follow the order of use, which a checkpoint knows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import CheckpointError
from graphflow.runtime.checkpoint.manifest import _digest

PROGRAM = """
import sys
import numpy as np
import graphflow as gf

a, b = gf.variable(np.full(2, 1.0, "float32")), gf.variable(np.full(2, 2.0, "float32"))
what, folder, order = sys.argv[1:]
with gf.Session() as s:
    if what == "load":
        s.load(folder)
    try:
        for names in order.split(","):
            print(*(float(v[0]) for v in s.run([{"a": a, "b": b}[n] for n in names])))
        if what == "save":
            s.save(folder)
    except gf.errors.CheckpointError as error:
        print("refused", error)
"""


def _ran(what: str, folder: Path, order: str) -> str:
    """What a program of its own process prints that fetches variables in an order."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, str(folder), order],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
def test_a_program_that_fetches_in_another_order_swaps_no_values(tmp_path: Path) -> None:
    together, late, early = tmp_path / "together", tmp_path / "late", tmp_path / "early"
    _ran("save", together, "ab")
    _ran("save", late, "b,a")
    _ran("save", early, "a,b")
    assert _ran("load", together, "a,b").split() == ["1.0", "2.0"]
    assert _ran("load", late, "b,a").split() == ["2.0", "1.0"]
    for folder, order in ((together, "b,a"), (late, "ab"), (late, "a,b"), (early, "b,a")):
        told = _ran("load", folder, order)
        assert "refused" in told and "does not tell 'variable" in told, (folder, order)
        assert "used them in another order" in told and "made at <string>:6" in told


def _pair() -> tuple[gf.Tensor, gf.Tensor]:
    return gf.variable(np.ones(2, "float32")), gf.variable(np.zeros(2, "float32"))


def _save_pair(folder: Path) -> None:
    a, b = _pair()
    with gf.Session() as s:
        s.run(b)
        s.run(a)
        s.save(folder)


def test_variables_that_the_session_has_met_are_compared_when_it_loads(tmp_path: Path) -> None:
    _save_pair(tmp_path / "c")
    a, b = _pair()
    with gf.Session() as s:
        s.run([a, b])
        with pytest.raises(CheckpointError, match="used them in another order"):
            s.load(tmp_path / "c")
        assert s.get(a).tolist() == [1, 1]


def test_a_part_of_them_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _save_pair(tmp_path / "c")
    _, b = _pair()
    with gf.Session() as s:
        s.load(tmp_path / "c")
        s.run(b)
        s.save(tmp_path / "d")
    assert any("checkpoint.unnamed" in r.getMessage() for r in caplog.records)
    kept = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert kept["unnamed"] == [["variable_1", "variable"]]


def test_named_variables_load_in_any_order_and_take_the_values_of_unnamed_ones(
    tmp_path: Path,
) -> None:
    _save_pair(tmp_path / "c")
    a, b = (gf.variable(np.full(2, 7.0, "float32"), name=name) for name in "ab")
    with gf.Session() as s:
        s.load(tmp_path / "c", rename={"variable": "b", "variable_1": "a"})
        assert s.run([a, b])[0].tolist() == [1, 1]
        s.save(tmp_path / "d")
    assert "unnamed" not in json.loads((tmp_path / "d" / "manifest.json").read_text())


def test_a_checkpoint_that_does_not_know_the_order_loads_as_before(tmp_path: Path) -> None:
    _save_pair(tmp_path / "c")
    place = tmp_path / "c" / "manifest.json"
    told = json.loads(place.read_text())
    del told["unnamed"], told["digest"]
    place.write_text(json.dumps({**told, "digest": _digest(told)}))
    a, b = _pair()
    with gf.Session() as s:
        s.load(tmp_path / "c")
        assert s.run([a, b])[0].tolist() == [0, 0]  # by the order of use alone
