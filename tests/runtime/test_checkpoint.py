"""Checkpoints: what is written is what is read; damage is told; a crash leaves the old one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import graphflow as gf
from graphflow.errors import CheckpointError, VariableError
from graphflow.runtime import checkpoint as module
from graphflow.runtime.checkpoint import Checkpoint, load, save
from graphflow.spec import BFLOAT16, DTYPES

STATE, MANIFEST = "state.safetensors", "manifest.json"
names = st.text(min_size=1, max_size=8).filter(lambda n: n != "__metadata__" and n.isprintable())


@st.composite
def _arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(DTYPES))
    known = "uint16" if dtype == "bfloat16" else dtype  # as many bits
    array = draw(
        hnp.arrays(known, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    ).view(dtype)
    return array.T if draw(st.booleans()) else array


@settings(max_examples=60)
@given(variables=st.dictionaries(names, _arrays(), max_size=4), step=st.integers(0, 2**60))
def test_every_array_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, variables: dict[str, Any], step: int
) -> None:
    folder = tmp_path_factory.mktemp("c") / "checkpoint"
    save(Checkpoint(variables, step), folder)
    back = load(folder)
    assert back.step == step and set(back.variables) == set(variables)
    for name, value in variables.items():
        got = back.variables[name]
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert got.tobytes() == value.tobytes()
    assert [p.name for p in folder.parent.iterdir()] == ["checkpoint"]


def _one(value: float = 1.0) -> Checkpoint:
    return Checkpoint({"w": np.full(4, value, "float32")}, 3)


def test_any_reader_of_safetensors_opens_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    save(_one(), tmp_path / "c")
    assert load_file(tmp_path / "c" / STATE)["w"].tolist() == [1, 1, 1, 1]
    assert json.loads((tmp_path / "c" / MANIFEST).read_text())["variables"] == {
        "w": ["float32", [4]]
    }


def test_complex_numbers_are_pairs_of_floats_and_16_bit_floats_themselves(tmp_path: Path) -> None:
    from safetensors import safe_open

    z = np.array([[1 + 2j, 3 - 4j]], "complex64")
    save(Checkpoint({"z": z, "b": np.ones(3, BFLOAT16)}, 0), tmp_path / "c")
    with safe_open(tmp_path / "c" / STATE, "numpy") as file:
        assert file.get_tensor("z").tolist() == [[[1, 2], [3, -4]]]
        assert file.get_slice("b").get_dtype() == "BF16"
        assert json.loads(file.metadata()["complex"]) == ["z"]
    back = load(tmp_path / "c").variables
    assert back["z"].tolist() == z.tolist() and back["b"].dtype == BFLOAT16


def test_saving_over_a_checkpoint_replaces_it_and_leaves_nothing_beside(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        save(_one(value), tmp_path / "a" / "b")
    assert load(tmp_path / "a" / "b").variables["w"][0] == 3
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_relative_folders_are_taken_from_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(_one(), "here/")
    assert load("./here").step == 3
    with pytest.raises(CheckpointError, match="no checkpoint"):
        save(_one(), ".")


# What is no checkpoint ------------------------------------------------------------------------


def _missing(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _flipped(name: str, at: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(bytes(data))

    return damage


def _truncated(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def _manifest(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest.update(changes)
        (folder / MANIFEST).write_text(
            json.dumps({k: v for k, v in manifest.items() if v is not None})
        )

    return damage


def _as_file(folder: Path) -> None:
    _missing(folder)
    folder.write_text("x")


DAMAGES = {
    "missing": (_missing, "no checkpoint"),
    "a file": (_as_file, "cannot read"),
    "no state": (_without(STATE), "no checkpoint"),
    "no manifest": (_without(MANIFEST), "no checkpoint"),
    "a flipped bit": (_flipped(STATE, -1), "digest"),
    "a flipped bit in the header": (_flipped(STATE, 12), "digest"),
    "a truncated state": (_truncated(STATE, 10), "digest"),
    "an empty state": (_truncated(STATE, 0), "digest"),
    "a truncated manifest": (_truncated(MANIFEST, 20), "cannot read"),
    "a manifest that is no text": (
        lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe"),
        "cannot read",
    ),
    "a manifest that is a list": (lambda f: (f / MANIFEST).write_text("[]"), "cannot read"),
    "no digest": (_manifest(sha256=None), "cannot read"),
    "a newer format": (_manifest(format=99, sha256=None), "format 99.*update graphflow"),
    "a format that is no number": (_manifest(format="x"), "cannot read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    damage, told = DAMAGES[name]
    w = gf.variable([1.0, 2.0], name="w")
    with gf.Session() as s:
        s.run(gf.assign(w, w + 1))
        s.save(tmp_path / "c")
        s.run(gf.assign(w, w * 10))
        damage(tmp_path / "c")
        with pytest.raises(CheckpointError, match=told) as caught:
            s.load(tmp_path / "c")
        assert str(tmp_path / "c") in str(caught.value)
        assert s.get(w).tolist() == [20, 30]
        assert s.run(w).tolist() == [20, 30]


def test_a_folder_that_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("precious")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        save(_one(), tmp_path / "thesis")
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(CheckpointError):
            save(_one(), place)
    assert (tmp_path / "thesis" / "chapter1").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "thesis"]


def test_a_name_that_the_format_keeps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rename"):
        save(Checkpoint({"__metadata__": np.ones(1)}, 0), tmp_path / "c")


# Crashes --------------------------------------------------------------------------------------


class _Crash(BaseException):
    """The process ends here."""


CALLS = ["mkdtemp", "write", "fsync", "rename"]


def _failing(call: str, number: int, error: BaseException) -> Callable[..., Any]:
    original = {
        "mkdtemp": module.tempfile.mkdtemp, "write": module._write, "fsync": os.fsync,
        "rename": os.rename,
    }[call]  # fmt: skip
    seen = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == number:
            raise error
        return original(*args, **kwargs)

    return failing


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), _Crash()], ids=["full", "crash"]
)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_stops_a_save_the_old_checkpoint_is_there(
    call: str, number: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "c"
    save(_one(1.0), target)
    where: Any = {"mkdtemp": module.tempfile, "write": module}.get(call, os)
    with monkeypatch.context() as patch:
        patch.setattr(where, "_write" if call == "write" else call, _failing(call, number, error))
        with pytest.raises(CheckpointError if isinstance(error, OSError) else _Crash):
            save(_one(2.0), target)
    assert load(target).variables["w"][0] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_set_aside_by_a_save_that_was_killed_is_found(tmp_path: Path) -> None:
    """Power fails between the two renames: no code of ours runs after the first."""
    target = tmp_path / "run[1]"
    save(_one(1.0), target)
    aside = tmp_path / ".run[1]-old-abc"
    aside.mkdir()
    os.rename(target, aside / target.name)
    assert load(target).variables["w"][0] == 1
    save(_one(2.0), target)
    assert load(target).variables["w"][0] == 2


# Sessions -------------------------------------------------------------------------------------


@pytest.fixture
def model() -> Iterator[tuple[gf.Tensor, gf.Tensor, gf.Tensor]]:
    with gf.random.seed(7):
        x = gf.placeholder("float32", (None, 3), name="x")
        w = gf.variable(gf.init.glorot((3, 2)), name="w")
        hidden = gf.nn.dropout(gf.tanh(x @ w + gf.variable(np.zeros(2, "float32"), name="b")), 0.5)
        loss = gf.mean(gf.square(hidden - gf.random.normal((2,))))
        yield x, loss, gf.optim.Adam(0.1).minimize(loss)


def _train(s: gf.Session, model: tuple[gf.Tensor, ...], steps: int) -> list[float]:
    x, loss, train = model
    feed = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
    return [float(s.run([loss, train], {x: feed})[0]) for _ in range(steps)]


def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    model: tuple[gf.Tensor, ...], tmp_path: Path
) -> None:
    with gf.Session() as s:
        wanted = _train(s, model, 10)
    with gf.Session() as s:
        first = _train(s, model, 5)
        s.save(tmp_path / "c")
        _train(s, model, 2)
        s.load(tmp_path / "c")
        assert first + _train(s, model, 5) == wanted
    with gf.Session() as s:
        s.load(tmp_path / "c")
        assert _train(s, model, 5) == wanted[5:]
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"])) as s:
        _train(s, model, 3)
        s.load(tmp_path / "c")
        assert _train(s, model, 5) == wanted[5:]


def test_a_checkpoint_that_does_not_fit_the_variables_changes_nothing(tmp_path: Path) -> None:
    w, b = gf.variable([1.0, 2.0], name="w"), gf.variable([3.0], name="b")
    with gf.Session() as s:
        s.run(gf.assign(w, w + 1))
        s.save(tmp_path / "only w")
    with gf.Session() as s:
        s.run([gf.assign(w, w * 5), gf.assign(b, b * 5)])
        with pytest.raises(CheckpointError, match=r"no value for b.*it has w"):
            s.load(tmp_path / "only w")
        assert s.run([w, b])[0].tolist() == [5, 10]
    for other in (gf.variable([1.0, 2.0, 3.0], name="w"), gf.variable([1, 2], name="w")):
        with gf.Session() as s:
            s.run(gf.assign(other, other + other))
            with pytest.raises(CheckpointError, match=r"'w' \(made at .*test_checkpoint\.py:\d+\)"):
                s.load(tmp_path / "only w")
            assert np.array_equal(s.get(other), 2 * np.asarray(other.node.attrs["initial"]))


def test_a_loaded_value_that_does_not_fit_is_told_when_the_variable_is_first_used(
    tmp_path: Path,
) -> None:
    w = gf.variable([1.0, 2.0], name="w")
    with gf.Session() as s:
        s.run(w)
        s.save(tmp_path / "c")
    other = gf.variable([1.0, 2.0, 3.0], name="w")
    with gf.Session() as s:
        s.load(tmp_path / "c")
        for use in (lambda: s.run(other), lambda: s.run(other), lambda: s.get(other)):
            with pytest.raises(CheckpointError, match="'w'"):
                use()
        s.set(other, [7, 8, 9])
        assert s.run(other).tolist() == s.get(other).tolist() == [7, 8, 9]


def test_variables_of_a_checkpoint_that_are_not_used_are_kept(tmp_path: Path) -> None:
    w, b = gf.variable([1.0, 2.0], name="w"), gf.variable([3.0], name="b")
    with gf.Session() as s:
        s.run([gf.assign(w, w + 1), gf.assign(b, b + 1)])
        s.save(tmp_path / "first")
    with gf.Session() as s:
        s.load(tmp_path / "first")
        s.run(w)
        s.save(tmp_path / "second")
    with gf.Session() as s:
        s.load(tmp_path / "second")
        assert s.get(b).tolist() == [4] and s.get(w).tolist() == [2, 3]


def test_values_set_before_any_step_are_saved(tmp_path: Path) -> None:
    w = gf.variable([1.0, 2.0], name="w")
    with gf.Session() as s:
        s.set(w, [5, 6])
        s.save(tmp_path / "c")
        with pytest.raises(VariableError):
            s.set(w, [5, 6, 7])
        assert s.run(w).tolist() == [5, 6]
    assert load(tmp_path / "c").variables["w"].tolist() == [5, 6]
