"""No process holds a table whole: not when it is drawn, and not when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import truncnorm

import graphflow as gf
from graphflow import init
from graphflow.execution import variable_store
from graphflow.ir.spec import Span
from tests import loaded

PEAKS = """
import os, time
from pathlib import Path
import numpy as np
import graphflow as gf

MIB = 1 << 20
rows = 256 * MIB // 256
ids = gf.placeholder("int64", ("batch",), name="ids")
table = gf.variable(gf.init.normal((rows, 64)), name="table")
loss = gf.mean(gf.nn.embedding(ids, table) ** 2)
train = gf.optim.RowwiseAdagrad(0.1).minimize(loss, strategy=gf.parallel.Data(2, tables=[table]))

def status(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)

def family(pid):
    found = [pid]
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if int(status(each.name)["PPid"]) == pid:
                found += family(int(each.name))
        except (OSError, KeyError):
            pass
    return found

with gf.Session(gf.Cluster.local(2)) as s:
    for step in range(2):
        s.run([loss, train], {ids: np.arange(1000) * 7 + step})
    for pid in family(os.getpid()):
        print(int(status(pid)["VmHWM"].split()[0]) // 1024)
"""


@pytest.mark.parametrize("kind", ["uniform", "normal", "truncated_normal"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_part_of_an_initial_value_is_what_the_whole_has_there(
    kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(init, kind)((1000, 37), dtype=dtype)
    words = np.random.Generator(np.random.Philox(np.random.SeedSequence(whole.stream)))
    if kind == "truncated_normal":
        drawn = truncnorm.ppf(words.random(whole.shape), -2, 2, whole.a, whole.b)
        np.testing.assert_allclose(whole(), drawn, rtol=1e-6, atol=1e-9)
        want = whole()
    else:
        want = getattr(words, kind)(whole.a, whole.b, whole.shape).astype(dtype)
    parts: list[tuple[Span, ...]] = [
        (Span(0, 1000), Span(0, 37)), (Span(333, 701), Span(5, 9)), (Span(3, 7, 100), Span(5, 9)),
        (Span(5, 5), Span(0, 37)), (Span(1, 3, (100, 150)), Span(0, 37)),
    ]  # fmt: skip
    for block in (64, 1000, 1 << 18):
        monkeypatch.setattr(init, "_BLOCK", block)
        np.testing.assert_array_equal(whole(), want)
        for spans in parts:
            chosen = want[spans[0].to_index(1000)][:, spans[1].to_index(37)]
            np.testing.assert_array_equal(whole.part(spans)(), chosen)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_each_process_holds_its_shard_and_the_client_none(tmp_path: Path) -> None:
    script = tmp_path / "peaks.py"
    script.write_text(PEAKS)
    done = loaded.run_python([str(script)], {"PYTHONPATH": str(loaded.ROOT)}, tmp_path)
    assert done.returncode == 0, done.stderr
    peaks = sorted(map(int, done.stdout.split()))  # in MiB; a table of 256 lies on two workers
    assert len(peaks) >= 3
    assert all(peak < 128 for peak in peaks[:-2]), peaks
    assert all(128 < peak < 256 for peak in peaks[-2:]), peaks


def test_shards_of_a_large_variable_are_drawn_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are those of one device."""
    table = gf.variable(gf.init.normal((3000, 8)), name="table")
    ids = gf.placeholder("int64", ("batch",), name="ids")
    loss = gf.mean(gf.nn.embedding(ids, table))
    strategy = gf.parallel.Data(2, tables=[table])
    train = gf.optim.SGD(0.0).minimize(loss, strategy=strategy)
    want = table.node.attrs["initial"]()
    monkeypatch.setattr(init, "LARGE_BYTES", 1000)

    def refuse(self: Any) -> Any:
        raise AssertionError("the client draws a value")

    with gf.Session(gf.Cluster.local(2)) as s:
        monkeypatch.setattr(init.Initializer, "__call__", refuse)
        monkeypatch.setattr(init.Initializer, "fill", refuse)
        s.run([loss, train], {ids: np.arange(10)})
        np.testing.assert_array_equal(s.get(table), want)


def test_a_table_beyond_the_limit_is_read_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    table = gf.variable(np.arange(80.0).reshape(20, 4), name="table")
    ids = gf.placeholder("int64", ("batch",), name="ids")
    loss = gf.mean(gf.nn.embedding(ids, table))
    train = gf.optim.SGD(0.0).minimize(loss, strategy=gf.parallel.Data(2, tables=[table]))
    monkeypatch.setattr(variable_store, "LARGEST_WHOLE", 600)
    with gf.Session() as s:
        s.run([loss, train], {ids: np.arange(10)})
        message = r"'table' \(made at .*\) has 640 B in 2 shards, and s.get returns at most 600 B"
        with pytest.raises(gf.errors.VariableError, match=message):
            s.get(table)
        rows = s.run(gf.take(table, ids, 0), {ids: np.array([3, 19])})
        np.testing.assert_array_equal(rows, [[12, 13, 14, 15], [76, 77, 78, 79]])
