"""Sources: arrays, files of tables, images, and datasets of other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.data.sources import table_files
from graphflow.errors import ArgumentError

Array = np.ndarray[Any, Any]
ROWS = 1000
_random = np.random.default_rng(0)
A, B, C = np.arange(ROWS), _random.normal(size=ROWS), _random.normal(size=(ROWS, 3))


def join_batches(data: gf.data.Dataset, size: int = 64) -> dict[str, Array]:
    """Return all rows in batches, joined."""
    batches = list(data.batch(size))
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(table_files, "KEPT_BYTES", 20_000)


def test_arrays_of_npy_files_are_mapped_and_npz_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", C)
    np.savez(tmp_path / "t.npz", a=A, c=C)
    data = gf.data.npy(x=tmp_path / "c.npy")
    assert np.array_equal(join_batches(data)["x"], C)
    assert isinstance(data.source._columns["x"], np.memmap)  # type: ignore[attr-defined]
    found = join_batches(gf.data.npz(tmp_path / "t.npz").shuffle(1))
    assert np.array_equal(found["c"], C[found["a"]])
    for make in (lambda: gf.data.npy(x="none.npy"), lambda: gf.data.npz(tmp_path / "c.npy")):
        with pytest.raises(ArgumentError, match=r"gf\.data\.np[yz]"):
            make()


# Tables --------------------------------------------------------------------------------------


def write_table(folder: Path, kind: str) -> gf.data.Dataset:
    """Write the columns as a file of a format, and open it."""
    arrow = pytest.importorskip("pyarrow", reason="pip install 'graphflow[data]' runs it")
    file = folder / f"table.{kind}"
    columns = {"a": A, "b": B}
    if kind == "csv":
        lines = [f"{a},{b!r}" for a, b in zip(A.tolist(), B.tolist(), strict=True)]
        file.write_text("a,b\n" + "\n".join(lines) + "\n")
        return gf.data.csv(file)
    if kind == "jsonl":
        rows = ({"a": a, "b": b} for a, b in zip(A.tolist(), B.tolist(), strict=True))
        file.write_text("\n".join(map(json.dumps, rows)))
        return gf.data.json_lines(file)
    lists = arrow.FixedSizeListArray.from_arrays(C.ravel(), 3)
    made = arrow.table({**columns, "c": lists})
    if kind == "parquet":
        from pyarrow import parquet

        parquet.write_table(made, file, row_group_size=90)
        return gf.data.parquet(file)
    with arrow.ipc.new_file(str(file), made.schema) as stream:
        stream.write_table(made, max_chunksize=70)
    return gf.data.arrow(file)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "arrow"])
@pytest.mark.usefixtures("small_blocks")
def test_a_file_in_blocks_gives_its_rows_in_any_order(kind: str, tmp_path: Path) -> None:
    data = write_table(tmp_path, kind)
    source: Any = data.source
    assert len(source) == ROWS and len(source.starts) > 5
    found = join_batches(data)
    assert np.array_equal(found["a"], A) and np.array_equal(found["b"], B)
    mixed = join_batches(data.shuffle(3, blocks=3))
    assert np.array_equal(mixed["b"], B[mixed["a"]]) and not np.array_equal(mixed["a"], A)
    assert source._bytes <= 20_000 or len(source._kept) == 1
    if "c" in mixed:
        assert np.array_equal(mixed["c"], C[mixed["a"]])


def test_several_files_by_a_pattern_and_some_columns(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'graphflow[data]' runs it")
    for part in range(3):
        (tmp_path / f"part-{part}.csv").write_text(f"a,b\n{part},x\n{part + 10},y\n")
    data = gf.data.csv(tmp_path / "part-*.csv", columns=["a"])
    assert join_batches(data) == {"a": pytest.approx([0, 10, 1, 11, 2, 12])}
    words = join_batches(gf.data.csv(tmp_path / "part-0.csv"))["b"]
    assert words.tolist() == ["x", "y"] and words.dtype.kind == "U"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3,4\n5\n6,7\n", "line 4: 1 fields where the header has 2: '5'"),
        ("a,b\n1,2\n\n3,4\n", r"t\.csv', from line 2: 2 rows in 3 lines; write each row on"),
        ("a,b\n1,2\n" + "3,4\n" * 999 + "5,x\n", r"t\.csv', line 1002: .* invalid value 'x'"),
        ("a,a\n1,2\n", r"t\.csv': two columns are called 'a'; rename one"),
        ("", r"t\.csv': Empty CSV file"),
        ("a,b\n1,2\n,4\n", "column 'a' of integers has 1 empty fields"),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_a_broken_line_of_csv_is_named(text: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'graphflow[data]' runs it")
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        join_batches(gf.data.csv(file))


@pytest.mark.usefixtures("small_blocks")
def test_a_broken_line_of_json_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'graphflow[data]' runs it")
    file = tmp_path / "t.jsonl"
    file.write_text('{"a": 1}\n' * 500 + '{"a": 2,\n')
    with pytest.raises(ArgumentError, match=r"t\.jsonl', line 501: JSON parse error"):
        join_batches(gf.data.json_lines(file))


def test_missing_files_columns_and_changes_are_told(tmp_path: Path) -> None:
    data = write_table(tmp_path, "parquet")
    file = tmp_path / "table.parquet"
    with pytest.raises(ArgumentError, match="there is no file"):
        gf.data.csv(tmp_path / "none.csv")
    with pytest.raises(ArgumentError, match="there is no column 'z'; there are a, b, c"):
        gf.data.parquet(file, columns=["a", "z"])
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(ArgumentError, match=r"text\.parquet"):
        gf.data.parquet(tmp_path / "text.parquet")
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(ArgumentError, match="has changed since it was opened"):
        data.batch(4).read((0, 0))


# Images --------------------------------------------------------------------------------------


def test_images_of_a_folder_have_the_number_of_their_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pip install 'graphflow[data]' runs it")
    for name, grey in (("cat", 0), ("dog", 255)):
        (tmp_path / name).mkdir()
        for number in range(3):
            pixels = np.full((8, 10), grey, "uint8")
            image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    data = gf.data.images(tmp_path, size=(4, 5)).shuffle(0)
    found = join_batches(data, 4)
    assert found["image"].shape == (6, 3, 4, 5) and found["image"].dtype == "float32"
    assert np.array_equal(found["image"].mean((1, 2, 3)), found["label"])
    (tmp_path / "dog" / "bad.png").write_text("no image")
    with pytest.raises(ArgumentError, match=r"bad\.png' cannot be read"):
        join_batches(gf.data.images(tmp_path, size=(4, 5)))
    with pytest.raises(ArgumentError, match="holds no images in folders"):
        gf.data.images(tmp_path / "cat")


# Others --------------------------------------------------------------------------------------


class Items:
    """As datasets of torch are: one row by its number."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Array, int]:
        return np.full(2, index), index * 10


def test_rows_one_by_one_become_columns() -> None:
    found = join_batches(gf.data.wrap(Items(), names=["x", "label"]).shuffle(1), 2)
    assert np.array_equal(found["x"][:, 0] * 10, found["label"])
    with pytest.raises(ArgumentError, match="hold 2 values, and there are 3 names"):
        join_batches(gf.data.wrap(Items(), names=["x", "y", "z"]))


def test_a_source_of_ones_own_needs_two_methods() -> None:
    class Squares:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, indices: Array) -> dict[str, Array]:
            return {"x": indices, "y": indices**2}

    found = join_batches(gf.data.Dataset(Squares()), 3)
    assert np.array_equal(found["y"], np.arange(10) ** 2)


def test_tables_of_polars_are_read_by_lists_of_rows() -> None:
    polars = pytest.importorskip("polars", reason="pip install polars runs it")
    data = gf.data.wrap(polars.DataFrame({"a": A, "b": B})).shuffle(2)
    found = join_batches(data)
    assert np.array_equal(found["b"], B[found["a"]])


def test_an_iterator_is_prepared_ahead_and_what_is_none_is_refused() -> None:
    made = gf.data.iterate(lambda: ({"x": np.full(2, i)} for i in range(4)), prefetch=2)
    assert [int(batch["x"][0]) for batch in made] == [0, 1, 2, 3]
    with pytest.raises(ArgumentError, match=r"for an iterator, take gf\.data\.iterate"):
        gf.data.wrap(iter([]))


def test_rows_of_svmlight_become_dense(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="pip install scikit-learn runs it")
    file = tmp_path / "t.svm"
    file.write_text("1 1:0.5 3:2\n-1 2:1\n")
    found = join_batches(gf.data.svmlight(file))
    assert found["x"].tolist() == [[0.5, 0, 2], [0, 1, 0]] and found["y"].tolist() == [1, -1]


def test_batches_are_feeds_by_the_names_of_placeholders() -> None:
    x = gf.placeholder("float32", (None, 3), name="x")
    total = gf.sum(x)
    data = gf.data.arrays(x=C.astype("float32")).batch(100)
    with gf.Session() as session:
        sums = [session.run(total, batch) for batch in data]
    assert sum(sums) == pytest.approx(C.sum(), rel=1e-3)
