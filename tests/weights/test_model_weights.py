"""Weights from files, folders and dicts to sessions and back; and what does not fit."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import graphflow as gf
from graphflow import nn
from graphflow.errors import ArgumentError, CheckpointError, VariableError
from graphflow.runtime.checkpoint.pieced_arrays import PiecedArray

Array = np.ndarray[Any, Any]
IDS = np.arange(12).reshape(6, 2)
Y = np.zeros(6, "int64")


class Model(nn.Layer):
    """A table, a norm and a head."""

    def __init__(self, rows: int = 12, size: int = 4) -> None:
        self.table = nn.Embedding(rows, size, name="table")
        self.norm = nn.BatchNorm1d(size, name="norm")
        self.head = nn.Linear(size, 3, name="head")

    def __call__(self, ids: Any) -> Any:
        return self.head(self.norm(gf.mean(self.table(ids), 1)))


def _state(model: Model) -> dict[str, Array]:
    """Return weights of torch's names."""
    random = np.random.default_rng(0)
    shapes = {"table.weight": model.table.weight.shape, "head.weight": (3, 4), "head.bias": (3,)}
    norm = dict.fromkeys(
        ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"), (4,)
    )
    found = {n: random.uniform(0.5, 1, s).astype("float32") for n, s in (shapes | norm).items()}
    return found | {"norm.num_batches_tracked": np.array(3)}


@pytest.fixture
def session() -> Iterator[gf.Session]:
    with gf.Session() as s:
        yield s


@pytest.mark.parametrize("names", ["torch", "graphflow"])
def test_what_was_saved_is_loaded(names: str, session: gf.Session, tmp_path: Path) -> None:
    model, other = Model(), Model()
    model.load(session, _state(model), "torch")
    path = model.save(session, tmp_path / "model.safetensors", names)
    assert path == tmp_path / "model.safetensors"
    assert [*tmp_path.iterdir()] == [path]
    report = other.load(session, path, names)
    assert len(report.loaded) == 7 and "7 variables loaded" in str(report)
    before, after = model.state(session), other.state(session)
    assert all(map(np.array_equal, before.values(), after.values()))
    assert ("table.weight" if names == "torch" else "table/weight") in load_file(path)


def test_large_weights_are_several_files_and_an_index(session: gf.Session, tmp_path: Path) -> None:
    model = Model()
    state = _state(model)
    model.load(session, state, "torch")
    index = model.save(session, tmp_path / "hf", "torch", file_bytes=100)
    content = json.loads(index.read_text("utf-8"))
    parts = sorted(path.name for path in index.parent.glob("*.safetensors"))
    assert parts[0] == "model-00001-of-00003.safetensors" and len(parts) == 3
    assert content["weight_map"].keys() == state.keys()
    assert content["metadata"]["total_size"] == sum(v.nbytes for v in state.values())
    for source in (index, index.parent, index.parent / "model.safetensors"):
        other = Model()
        other.load(session, source, "torch")
        assert np.array_equal(session.get(other.head.weight), state["head.weight"])
    (index.parent / parts[1]).unlink()
    with pytest.raises(CheckpointError, match=r"3 files, and model-00002-of-00003.*not beside"):
        model.load(session, index, "torch")
    assert model.save(session, tmp_path / "hf", "torch").name == "model.safetensors"
    assert not index.exists()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_floats_are_converted_and_said(
    dtype: str, session: gf.Session, tmp_path: Path
) -> None:
    assert ml_dtypes.bfloat16 is not None  # numpy knows the name by this package
    model = Model()
    state = {n: v.astype(dtype) if v.ndim else v for n, v in _state(model).items()}
    save_file(state, tmp_path / "half.safetensors")
    report = model.load(session, tmp_path / "half.safetensors", "torch")
    assert f"7 of them from {dtype} to float32" in str(report)
    assert report.converted["head.weight"] == f"{dtype} to float32"
    assert np.array_equal(session.get(model.head.weight), state["head.weight"].astype("float32"))


def test_one_error_lists_missing_unexpected_and_misshaped_weights(session: gf.Session) -> None:
    model = Model()
    state = _state(model)
    state["head.wieght"] = state.pop("head.weight")
    state["table.weight"] = state["table.weight"].T
    state["norm.bias"] = state["norm.bias"].astype("int32")
    before = model.state(session)
    with pytest.raises(CheckpointError) as caught:
        model.load(session, state, "torch")
    text = str(caught.value)
    assert "1 missing: 'head.weight' (did you mean 'head.wieght'?)" in text
    assert "1 unexpected: 'head.wieght'" in text
    assert "2 of another shape or dtype" in text
    assert "'table.weight' is (4, 12), the variable (12, 4) (transposed" in text
    assert "'norm.bias' is int32, the variable float32" in text
    after = model.state(session)
    assert all(map(np.array_equal, before.values(), after.values()))


def test_without_strict_a_head_may_be_missing_but_not_misshaped(session: gf.Session) -> None:
    model = Model()
    state = _state(model)
    head = session.get(model.head.weight)
    wrong = state | {"head.weight": np.ones((9, 4), "float32")}
    with pytest.raises(CheckpointError, match=r"'head.weight' is \(9, 4\), the variable \(3, 4\)"):
        model.load(session, wrong, "torch", strict=False)
    body = {n: v for n, v in state.items() if not n.startswith("head")} | {"fc.bias": Y}
    report = model.load(session, body, "torch", strict=False)
    assert report.missing == ("head.weight", "head.bias") and report.unexpected == ("fc.bias",)
    assert "missing in it: head.weight, head.bias; not in the model: fc.bias" in str(report)
    assert np.array_equal(session.get(model.head.weight), head)
    assert np.array_equal(session.get(model.table.weight), state["table.weight"])


def test_weights_of_another_model_are_called_that(session: gf.Session) -> None:
    other = {f"encoder.{i}.w": np.ones(2) for i in range(20)}
    for strict in (True, False):
        with pytest.raises(CheckpointError, match="is of another model: it has 0 of the 7 names"):
            Model().load(session, other, "torch", strict=strict)


def test_a_beginning_of_names_is_renamed(session: gf.Session) -> None:
    model = Model()
    state = {f"module.{n}": v for n, v in _state(model).items()}
    told = r"begin with 'module.', those of the model do not.*rename=\{'module.': ''\}"
    with pytest.raises(CheckpointError, match=told):
        model.load(session, state, "torch")
    assert not model.load(session, state, "torch", rename={"module.": ""}).missing
    state = {n.replace("module.head", "module.classifier"): v for n, v in state.items()}
    rename = {"module.": "", "module.classifier": "head"}
    assert not model.load(session, state, "torch", rename=rename).missing


def test_names_of_the_other_kind_are_recognised(session: gf.Session) -> None:
    with pytest.raises(CheckpointError, match=r"has other names than you say.*names='torch'"):
        Model().load(session, _state(Model()))


@pytest.mark.parametrize("name", ["net.pt", "net.pth", "pytorch_model.bin", "net.safetensors"])
def test_a_pickle_is_refused_in_one_line_that_converts_it(
    name: str, session: gf.Session, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02}.")
    with pytest.raises(CheckpointError) as caught:
        Model().load(session, tmp_path / name, "torch")
    text = str(caught.value)
    assert "is a pickle" in text and "\n" not in text and "torch.load('" in text
    if name.endswith(".bin"):
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
            Model().load(session, tmp_path, "torch")


def test_damaged_and_absent_files_are_named(session: gf.Session, tmp_path: Path) -> None:
    model = Model()
    model.load(session, _state(model), "torch")
    path = model.save(session, tmp_path / "model.safetensors")
    whole = path.read_bytes()
    for damaged in (b"", whole[:5], whole[:-3], whole + b"1", b"\xff" * 50, b"[" * 10_000):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
            model.load(session, path)
    with pytest.raises(CheckpointError, match="No such file"):
        model.load(session, tmp_path / "none.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no weights"):
        model.load(session, tmp_path / "empty")
    index = tmp_path / "empty" / "model.safetensors.index.json"
    for text in ("{}", "[", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}'):
        index.write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"is no index|not in its folder|not beside it"):
            model.load(session, index)


def test_a_checkpoint_of_a_session_gives_a_model_its_variables(tmp_path: Path) -> None:
    model = Model()
    ids, labels = gf.placeholder("int64", (6, 2)), gf.placeholder("int64", (6,))
    loss = nn.cross_entropy(model(ids), labels, reduction="mean")
    with gf.Session() as s:
        s.run(gf.optim.Adam(0.1).minimize(loss), {ids: IDS, labels: Y})
        s.save(tmp_path / "ckpt")
        weight = s.get(model.head.weight)
    with gf.Session() as s:
        assert len(model.load(s, tmp_path / "ckpt").loaded) == 7
        assert np.array_equal(s.get(model.head.weight), weight)


STRATEGIES = {
    "data": gf.parallel.Data(2),
    "tables": gf.parallel.Data(2, tables=["table/weight"]),
    "state": gf.parallel.Data(2, shard_state=True),
    "columns": gf.parallel.Shard({"model": 2}, {"table/weight": (None, "model")}),
    "rows": gf.parallel.Shard({"model": 2}, {"table/weight": ("model", None)}),
    "none": None,
}


@pytest.mark.every(3)
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_divided_variable_gets_and_gives_parts(
    strategy: str, begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two devices; no part that is read of a divided table is the whole table."""
    model = Model(rows=70_000, size=64)
    ids, labels = gf.placeholder("int64", (6, 2)), gf.placeholder("int64", (6,))
    loss = nn.cross_entropy(model(ids), labels, reduction="mean")
    train = gf.optim.SGD(0.5).minimize(loss, strategy=STRATEGIES[strategy])
    weights = {n: v.copy() for n, v in model_state(model).items()}
    save_file({n: v.astype("float16") for n, v in weights.items()}, tmp_path / "w.safetensors")
    sizes: list[int] = []
    read = PiecedArray._read_part

    def record_size(self: PiecedArray, spans: Any) -> Any:
        part = read(self, spans)
        sizes.append(part.shape[0] if part.ndim == 2 and part.shape[1] == 64 else 0)
        return part

    monkeypatch.setattr(PiecedArray, "_read_part", record_size)
    feeds = {ids: IDS, labels: Y}
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"])) as s:
        if begun:
            s.run(train, feeds)
        model.load(s, tmp_path / "w.safetensors", "torch")
        path = model.save(s, tmp_path / "again.safetensors", "torch")
        s.run([train, loss], feeds)
        moved = s.get(model.head.bias)
        after = model.save(s, tmp_path / "after.safetensors", "torch")
    saved = load_file(path)
    assert all(np.array_equal(saved[n], weights[n].astype("float16")) for n in weights)
    assert np.array_equal(load_file(after)["head.bias"], moved)
    assert not np.array_equal(moved, saved["head.bias"])
    if strategy == "tables":
        assert 0 < max(sizes) < 70_000


def model_state(model: Model) -> dict[str, Array]:
    """Return weights of torch's names for a model of any size."""
    shapes = {
        "table.weight": model.table.weight.shape, "head.weight": model.head.weight.shape,
        "head.bias": (3,),
    }  # fmt: skip
    size = model.table.weight.shape[1]
    shapes |= {f"norm.{n}": (size,) for n in ("weight", "bias", "running_mean", "running_var")}
    random = np.random.default_rng(2)
    return {n: random.uniform(0.5, 1, s).astype("float32") for n, s in shapes.items()}


def test_two_workers_get_the_weights_and_give_them_back(tmp_path: Path) -> None:
    model = Model()
    state = _state(model)
    save_file(state, tmp_path / "w.safetensors")
    ids, labels = gf.placeholder("int64", (6, 2)), gf.placeholder("int64", (6,))
    loss = nn.cross_entropy(model(ids), labels, reduction="mean")
    train = gf.optim.SGD(0.5).minimize(loss, strategy=gf.parallel.Data(2))
    with gf.Session(gf.Cluster.local(2, threads=1)) as s:
        model.load(s, tmp_path / "w.safetensors", "torch")
        expected = s.run(loss, {ids: IDS, labels: Y})
        s.run(train, {ids: IDS, labels: Y})
        model.load(s, tmp_path / "w.safetensors", "torch")
        np.testing.assert_allclose(s.run(loss, {ids: IDS, labels: Y}), expected, rtol=1e-6)
        saved = load_file(model.save(s, tmp_path / "again", "torch"))
    assert all(np.array_equal(saved[n], v) for n, v in state.items() if v.ndim)


def test_wrong_arguments_say_what_is_right(session: gf.Session, tmp_path: Path) -> None:
    model = Model()
    wrong: list[tuple[Any, str]] = [
        (lambda: model.load("w.safetensors", "torch"), "give an open gf.Session first"),
        (lambda: model.load(session, "w", "pytorch"), "'graphflow' or 'torch', not 'pytorch'"),
        (lambda: model.load(session, 3), "a path or a dict from names to arrays, not 3"),
        (lambda: model.load(session, {1: 2}), "names of weights are text, not 1"),
        (lambda: model.load(session, {}, rename=["a"]), "rename must be a dict"),
        (lambda: model.save(session, 3), "path must be a path, not 3"),
        (lambda: model.save(session, "w.safetensors", file_bytes=0), "an int above 0, not 0"),
        (lambda: model.state(None), "give an open gf.Session first"),
    ]
    for call, told in wrong:
        with pytest.raises(ArgumentError, match=told) as caught:
            call()
        assert "test_model_weights.py" in str(caught.value)
    with pytest.raises(CheckpointError, match="weights are saved as safetensors"):
        model.save(session, tmp_path / "w.pt")
    with pytest.raises(VariableError, match="not a variable"):
        session.set_all({gf.placeholder("float32", (2,)): np.ones(2)})
