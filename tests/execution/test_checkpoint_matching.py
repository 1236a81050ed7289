"""Fitting: checkpoints that fit a model partly, by any of the ways in which they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, CheckpointError
from graphflow.execution.checkpoint_matching import rename_variables, suggest_rename
from graphflow.runtime.checkpoint import load

X = np.linspace(-1, 1, 21, dtype="float32").reshape(3, 7)
Optimizer = Callable[[float], Any]


def _model(name: str, optimizer: Optimizer = gf.optim.Adam, width: int = 5) -> Any:
    """A function that trains a model for some steps in a session, and its weight."""
    x = gf.placeholder("float32", ("b", 7))
    w = gf.variable(np.full((7, width), 0.1, "float32"), name=name)
    b = gf.variable(np.zeros(width, "float32"), name="b")
    loss = gf.mean(gf.square(gf.tanh(x @ w + b) - 0.3))
    train = optimizer(0.05).minimize(loss)

    def run(s: gf.Session, steps: int = 3) -> list[float]:
        return [float(s.run([loss, train], {x: X})[0]) for _ in range(steps)]

    return run, w


def _at_start(folder: Path, **how: Any) -> gf.Session:
    return gf.Session(checkpoint=folder, **how)


def _by_load(folder: Path, **how: Any) -> gf.Session:
    s = gf.Session()
    s.load(folder, **how)
    return s


def _by_file(folder: Path, **how: Any) -> gf.Session:
    file = folder / "all.safetensors"
    newest = max(folder.glob("step-*"))
    safetensors.numpy.save_file(dict(load(newest).variables), file)
    s = gf.Session()
    s.load(file, **how)
    return s


ENTRANCES = [_at_start, _by_load, _by_file]


@contextmanager
def _write_checkpoint(folder: Path, name: str = "encoder/w", **how: Any) -> Iterator[list[float]]:
    """A checkpoint of a model, and the losses of three steps from there."""
    run, _ = _model(name, **how)
    with gf.Session(checkpoint=folder) as s:
        run(s)
    with gf.Session() as s:
        s.load(folder)
        yield run(s)


@pytest.mark.parametrize("opened", ENTRANCES)
def test_a_renamed_variable_is_refused_with_the_rename_that_was_meant(
    opened: Callable[..., gf.Session], tmp_path: Path
) -> None:
    with _write_checkpoint(tmp_path) as wanted:
        run, _ = _model("enc/w")
        with opened(tmp_path) as s:
            for _ in range(2):
                with pytest.raises(CheckpointError) as caught:
                    run(s)
        told = str(caught.value)
        assert "missing in the checkpoint: enc/w float32(7, 5), train/enc/w/adam_mean" in told
        assert "unexpected there: " in told and "encoder/w float32(7, 5)" in told
        assert "did you mean rename={'encoder': 'enc'}?" in told and "strict=False" in told
        with opened(tmp_path, rename={"encoder": "enc"}) as s:
            assert run(s) == wanted
            assert s.loaded is not None and not s.loaded.missing + s.loaded.unexpected
        if opened is _at_start:  # and once more with the same argument
            with opened(tmp_path, rename={"encoder": "enc"}) as s:
                run(s)
                assert s.step == 9


@pytest.mark.parametrize("opened", ENTRANCES)
def test_without_strict_the_rest_is_loaded_and_told(
    opened: Callable[..., gf.Session], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _write_checkpoint(tmp_path):
        run, _ = _model("enc/w")
        with opened(tmp_path, strict=False) as s:
            run(s)
            told = s.loaded
            assert told is not None
            assert told.missing == ("enc/w", "train/enc/w/adam_mean", "train/enc/w/adam_square")
            assert "b" in told.loaded and "encoder/w" in told.unexpected
            assert "missing in it: enc/w" in str(told) and "encoder/w" in str(told)
        assert any("checkpoint.partial" in r.getMessage() for r in caplog.records)


def test_slots_of_another_optimiser_are_missing(tmp_path: Path) -> None:
    with _write_checkpoint(tmp_path, optimizer=gf.optim.SGD):
        run, _ = _model("encoder/w")
        with gf.Session(checkpoint=tmp_path) as s, pytest.raises(CheckpointError, match=r"adam"):
            run(s)


def test_shapes_and_names_that_differ_are_told_in_one_error(tmp_path: Path) -> None:
    with _write_checkpoint(tmp_path):
        run, _ = _model("enc/w", width=4)
        told = r"another shape or dtype: b is .*4.*5.*missing in the checkpoint: enc/w.*unexpected"
        with gf.Session(checkpoint=tmp_path) as s, pytest.raises(CheckpointError, match=told):
            run(s)


def test_a_variable_that_is_looked_at_first_is_refused_too(tmp_path: Path) -> None:
    with _write_checkpoint(tmp_path):
        _, w = _model("enc/w")
        with gf.Session(checkpoint=tmp_path) as s:
            for _ in range(2):
                with pytest.raises(CheckpointError, match="missing"):
                    s.get(w)


def test_values_of_one_checkpoint_do_not_wait_beyond_the_next(tmp_path: Path) -> None:
    a, b = gf.variable([1.0], name="a"), gf.variable([2.0], name="b")
    with gf.Session() as s:
        s.set(a, [5.0])
        s.set(b, [6.0])
        s.save(tmp_path / "both")
    with gf.Session() as s:
        s.set(a, [7.0])
        s.save(tmp_path / "one")
    with gf.Session() as s:
        s.load(tmp_path / "both")
        s.load(tmp_path / "one")
        with pytest.raises(CheckpointError, match="missing in the checkpoint: b"):
            s.run([a, b])
    with gf.Session() as s:  # of several parts
        s.load(tmp_path / "both")
        s.load(tmp_path / "one", strict=False)
        assert [v.item() for v in s.run([a, b])] == [7, 6]


def test_variables_that_a_checkpoint_lacks_keep_their_values_after_a_loss(tmp_path: Path) -> None:
    a, b = gf.variable([1.0], name="a"), gf.variable([2.0], name="b")
    with gf.Session() as s:
        s.set(a, [5.0])
        s.save(tmp_path / "a")
    with gf.Session(gf.Cluster.local(workers=1), checkpoint=tmp_path / "c") as s:
        s.run([gf.assign(a, a + 1), gf.assign(b, b + 1)])
        with pytest.raises(CheckpointError, match="missing in the checkpoint: b"):
            s.load(tmp_path / "a")
        report = s.load(tmp_path / "a", strict=False)
        assert report.missing == ("b",) and report.loaded == ("a",)
        assert [v.item() for v in s.run([a, b])] == [5, 3]
    with gf.Session(checkpoint=tmp_path / "c") as s:
        assert [v.item() for v in s.run([a, b])] == [5, 3]


@pytest.mark.parametrize(
    "rename", [["a"], {"a": 1}, {"": "a"}, {1: "a"}, "a"], ids=lambda r: type(r).__name__
)
def test_a_rename_is_a_dict_of_names(rename: Any, tmp_path: Path) -> None:
    with gf.Session() as s, pytest.raises(ArgumentError, match="rename must be a dict"):
        s.load(tmp_path, rename=rename)
    with pytest.raises(ArgumentError, match="rename must be a dict"):
        gf.Session(checkpoint=tmp_path, rename=rename)


def test_strict_and_rename_are_for_sessions_with_checkpoints(tmp_path: Path) -> None:
    for wrong in ({"strict": False}, {"rename": {"a": "b"}}):
        with pytest.raises(ArgumentError, match="needs a directory: give checkpoint=directory"):
            gf.Session(**wrong)
    with pytest.raises(ArgumentError, match="would be renamed again"):
        gf.Session(checkpoint=tmp_path, rename={"a": "b", "b": "a"})


def test_names_that_are_renamed_wrongly_are_refused() -> None:
    found = {"a/w": 1, "b/w": 2}
    with pytest.raises(CheckpointError, match=r"no 'a/v'; did you mean 'a/w'\?"):
        rename_variables(found, {"a/v": "c"}, "c")
    with pytest.raises(CheckpointError, match=r"two variables 'b/w', from 'a/w' and 'b/w'"):
        rename_variables(found, {"a": "b"}, "c")
    assert rename_variables(found, {"a": "b", "b": "a"}, "c") == {"b/w": 1, "a/w": 2}
    assert rename_variables(found, {"a": "b", "a/w": "v"}, "c") == {"v": 1, "b/w": 2}


_NAMES = st.sampled_from(["w", "b", "encoder/w", "encoder/b", "decoder/w", "a/b/c/kernel", "head"])
_SCOPES = st.sampled_from(["model", "net/first", "m"])


@given(st.sets(_NAMES, min_size=1), _SCOPES, _SCOPES)
def test_what_is_suggested_gives_every_variable_its_value(
    names: set[str], old: str, new: str
) -> None:
    kinds = {name: ("float32", (i + 1,)) for i, name in enumerate(sorted(names))}
    there = {f"{old}/{name}": kind for name, kind in kinds.items()}
    there |= {f"train/{name}/adam_mean": kind for name, kind in list(there.items())}
    wanted = {name.replace(old, new, 1): kind for name, kind in there.items()}
    assert rename_variables(there, suggest_rename(wanted, there), "c") == wanted


def test_a_file_of_another_program_says_what_fits(tmp_path: Path) -> None:
    _, w = _model("layer/weight")
    file = tmp_path / "model.safetensors"
    weights = np.random.default_rng(0).normal(size=(7, 5)).astype("float32")
    safetensors.numpy.save_file({"model.layer.weight": weights}, file)
    with gf.Session() as s:
        s.load(file)
        with pytest.raises(CheckpointError, match=r"did you mean rename=\{'model\.layer\.weight'"):
            s.get(w)
        assert s.load(file, rename={"model.layer.weight": "layer/weight"}).step == 0
        assert np.array_equal(s.get(w), weights)
        with pytest.raises(CheckpointError, match=r"or one of its files, such as model\.safet"):
            s.load(tmp_path)
        file.write_bytes(b"PK\3\4 something else")
        with pytest.raises(CheckpointError, match=r"cannot read .* as a safetensors file"):
            s.load(file)
