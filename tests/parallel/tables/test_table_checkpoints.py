"""Tables and their slots are saved and restored by parts, also on another number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.spec import Span
from graphflow.runtime.checkpoint import folder as checkpoint_folder
from graphflow.runtime.checkpoint import manifest
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray, PiecedArray
from tests.parallel.tables.test_row_exchange import OPTIMISERS, Model

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the limits that decide what is large be those of a test's tables."""
    for module, name in ((manifest, "PIECED_BYTES"), (checkpoint_folder, "MAPPED_BYTES")):
        monkeypatch.setattr(module, name, 100)
    monkeypatch.setattr("graphflow.execution.variable_store.PIECED_BYTES", 100)


def strategy(parts: int) -> Any:
    return gf.parallel.Data(parts, tables=["table*"])


@pytest.mark.every(5)
@pytest.mark.parametrize("how", ["save", "checkpoint="])
@pytest.mark.parametrize("name", ["adam", "rowwise"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_rows_and_slots_move_to_another_number_of_workers(
    parts: int, name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on as if it had not been interrupted, and no table is assembled on the way."""
    optimiser = OPTIMISERS[name]
    whole = Model(optimiser, None)
    with gf.Session() as s:
        want = [s.run([whole.loss, whole.train], whole.feeds(i))[0] for i in range(4)]
    monkeypatch.setattr(PiecedArray, "__array__", _refuse)
    monkeypatch.setattr(PiecedArray, "copy", _refuse)
    before, after = Model(optimiser, strategy(3)), Model(optimiser, strategy(parts))
    kept = tmp_path / "kept"
    options: Any = {"checkpoint": kept} if how == "checkpoint=" else {}
    with gf.Session(gf.Cluster.local(3), **options) as s:
        got = [s.run([before.loss, before.train], before.feeds(i))[0] for i in range(2)]
        s.save(None if options else kept)
    with gf.Session() as s:
        s.load(kept)
        got += [s.run([after.loss, after.train], after.feeds(i))[0] for i in (2, 3)]
    np.testing.assert_allclose(got, want, rtol=1e-12)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a table is assembled")


def test_a_session_that_has_tables_loads_into_their_parts(tmp_path: Path) -> None:
    optimiser = gf.optim.Adagrad(0.1)
    model = Model(optimiser, strategy(2))
    with gf.Session() as s:
        s.run(model.train, model.feeds(0))
        s.save(tmp_path / "one")
        want = [s.get(table) for table in model.tables]
        s.run(model.train, model.feeds(1))
        s.load(tmp_path / "one")
        for table, value in zip(model.tables, want, strict=True):
            np.testing.assert_array_equal(s.get(table), value)


def test_a_damaged_shard_is_refused_before_a_part_is_read(tmp_path: Path) -> None:
    model = Model(gf.optim.SGD(0.1), strategy(2))
    place = tmp_path / "one"
    with gf.Session() as s:
        s.run(model.train, model.feeds(0))
        s.save(place)
        for file in place.glob("*.safetensors"):
            data = bytearray(file.read_bytes())
            data[-3] ^= 1
            file.write_bytes(data)
        with pytest.raises(gf.errors.CheckpointError, match=r"the digest of .* differs"):
            s.load(place)


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_a_pieced_array_are_those_of_the_whole(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, width = int(random.integers(4, 30)), 6
    whole = random.normal(size=(rows, width))
    cuts = sorted(random.choice(np.arange(1, rows), 2, replace=False).tolist())
    columns = [(0, 2), (2, 6)] if seed % 2 else [(0, 6)]
    pieces = [
        ((Span(a, b), Span(c, d)), whole[a:b, c:d].copy())
        for a, b in zip([0, *cuts], [*cuts, rows], strict=True)
        for c, d in columns
    ]
    pieced = PiecedArray(whole.shape, whole.dtype, pieces)
    np.testing.assert_array_equal(np.asarray(pieced), whole)
    start, stop = sorted(random.integers(0, rows + 1, 2).tolist())
    part = pieced.part((Span(start, stop), Span(1, 5)))
    assert isinstance(part, LazyArray)
    np.testing.assert_array_equal(np.asarray(part), whole[start:stop, 1:5])
    half = Span(0, 1, rows // 2)  # the first of each two rows, if their number is even
    if rows % 2 == 0:
        chosen = pieced.part((half, Span(0, width)))
        np.testing.assert_array_equal(np.asarray(chosen), whole[half.to_index(rows)])
