"""Svmlight files give what scikit-learn reads, in any parts, and broken ones are refused."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

import graphflow as gf
from graphflow.errors import LinearModelError
from graphflow.linear.tables import decimal_loops, svmlight
from graphflow.linear.tables.svmlight import read_blocks
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

HARD = (
    "",
    "-",
    ".",
    "1e",
    "1e-320",
    "9007199254740993",
    "nan",
    "inf",
    "1_0",
    "12345678901234567890",
)


def read(text: str) -> float | None:
    """Return the number that the loop reads; None if it leaves that to Python."""
    out = np.zeros(1)
    data = np.frombuffer(f"{text}\n".encode(), np.uint8).copy()
    powers = svmlight._powers_of_ten()
    after = native(decimal_loops, "read_number")(data, 0, *powers, out, 0)
    return float(out[0]) if after == len(text) else None


@settings(max_examples=120, deadline=None)
@given(
    st.floats(allow_nan=False, allow_infinity=False).map(repr)
    | st.floats(-1e6, 1e6).map("{:.16g}".format)
    | st.from_regex(r"[+-]?[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)
)
def test_numbers_are_those_of_python_to_the_bit(text: str) -> None:
    found = read(text)
    assert found is None or struct.pack("d", found) == struct.pack("d", float(text))


def test_common_numbers_are_read_by_the_loop_and_hard_ones_are_not() -> None:
    common = (
        "0",
        "-0.0",
        "1.",
        "+.5",
        "3e5",
        "0.123456789012345678",
        "12.5E-03",
        "1e60",
        "00012.25",
    )
    assert [read(each) for each in common] == [float(each) for each in common]
    assert [read(each) for each in HARD] == [None] * len(HARD)


def table(seed: int, n: int, d: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    x = sp.random(n, d, density=0.1, format="csr", random_state=seed)
    x.data = random.normal(size=x.nnz) * 10.0 ** random.integers(-12, 12, size=x.nnz)
    return x, random.normal(size=n)


@pytest.mark.parametrize("zero_based", [True, False])
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_a_file_is_what_scikit_learn_reads(
    zero_based: bool, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svmlight, "BLOCK", block)
    path = str(tmp_path / "t.svm")
    x, y = table(0, 200, 60)
    dump_svmlight_file(x, y, path, zero_based=zero_based, comment="by a test")
    theirs, targets = load_svmlight_file(path)
    for memory in (None, 1):  # in memory, and on disk
        ours = gf.linear.open(path, memory=memory)
        assert ours.shape == theirs.shape
        for a, b in ((ours.load(), theirs), (ours.read(17, 93), theirs[17:93])):
            assert (a != b).nnz == 0 and a.indices.dtype == np.int32
        np.testing.assert_array_equal(ours.targets, targets)
        ours.close()
    wide = gf.linear.open(path, zero_based=zero_based, n_features=100)
    assert wide.shape == (200, 100)


def test_comments_blanks_query_numbers_and_columns_out_of_order(tmp_path: Path) -> None:
    path = tmp_path / "t.svm"
    path.write_bytes(
        b"# h\n\n1 qid:4 3:1.5 1:2 # note 9:9\r\n-1\t2:1e308 \n 2.5#\n+1 3:1 3:2 1:-1e-9\n3 4:1_0"
    )
    x = gf.linear.open(path)
    wanted = np.zeros((5, 4))
    wanted[0, [2, 0]], wanted[1, 1], wanted[3, [2, 0]] = (1.5, 2), 1e308, (3, -1e-9)
    wanted[4, 3] = 10
    np.testing.assert_array_equal(x.load().toarray(), wanted)
    np.testing.assert_array_equal(x.targets, [1, -1, 2.5, 1, 3])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1 2:x", "'x' is no number"),
        ("1 2:", "'' is no number"),
        ("a 2:1", "'a' is no number"),
        ("2:1 3:4", "'2:1' is no number"),
        ("1 2", "'1 2'"),
        ("1 -2:1", "'1 -2:1'"),
        ("1 2147483648:1", "from 0 to 2147483647"),
        ("1 2:3 4:5:6", "'5:6' is no number"),
        ("1 2:nan", "'nan' is not finite"),
        ("1 2:1e400", "'1e400' is not finite"),
        ("-inf 2:1", "'-inf' is not finite"),
    ],
)
def test_a_broken_line_is_named(line: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "t.svm"
    path.write_text("# head\n" + "1 1:1\n" * 50 + line + "\n1 1:1\n")
    with pytest.raises(LinearModelError, match=r"t\.svm, line 52: ") as caught:
        gf.linear.open(path).load()
    assert told in str(caught.value)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_parts_make_up_the_whole(parts: int, tmp_path: Path) -> None:
    path = str(tmp_path / "t.svm")
    x, y = table(1, 23, 30)
    dump_svmlight_file(x, y, path, zero_based=True)
    whole = gf.linear.open(path, zero_based=True)
    pieces = [whole.part(k, parts) for k in range(parts)]
    assert sum(piece.rows for piece in pieces) == 23
    stacked = sp.vstack([piece.load() for piece in pieces])
    assert (stacked != whole.load()).nnz == 0
    np.testing.assert_array_equal(np.concatenate([p.targets for p in pieces]), whole.targets)


def test_no_byte_of_other_parts_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.svm"
    path.write_text("1 1:1\n" * 100 + "broken\n" * 100)
    first = gf.linear.open(path, zero_based=False, n_features=1).part(0, 3)
    assert first.rows > 60 and (first.load().data == 1).all()


def test_files_that_changed_or_are_none(tmp_path: Path) -> None:
    path = tmp_path / "t.svm"
    path.write_text("1 1:1\n-1 2:1\n")
    opened = gf.linear.open(path, memory=1)
    assert opened.rows == 2
    path.write_text("1 1:1\n-1 2:1\n1 1:3\n")
    with pytest.raises(LinearModelError, match=r"changed since it was opened: 13 bytes.*19 now"):
        opened.read(0, 1)
    with pytest.raises(LinearModelError, match="is no file; give the path"):
        gf.linear.open(tmp_path)
    with pytest.raises(LinearModelError, match="No such file"):
        gf.linear.open(tmp_path / "none.svm")
    with pytest.raises(LinearModelError, match="3 columns, and n_features=2"):
        path.write_text("1 3:1\n")
        gf.linear.open(path, n_features=2).load()
    with pytest.raises(LinearModelError, match="column 0, and zero_based=False"):
        path.write_text("1 0:1\n")
        gf.linear.open(path, zero_based=False).load()
    path.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(LinearModelError, match="compressed"):
        gf.linear.open(path)


def test_blocks_of_an_empty_file_and_of_one_long_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svmlight, "BLOCK", 16)
    path = tmp_path / "t.svm"
    path.write_text("")
    assert list(read_blocks(str(path), 0, 0)) == []
    path.write_text("1 " + " ".join(f"{j}:1" for j in range(500)))
    (block,) = read_blocks(str(path), 0, os.path.getsize(path))
    assert block.highest == 499 and (block.values == 1).all()
