"""Layers: their variables and names, training blocks, sessions, and refusing bad input."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow import nn
from graphflow.errors import ArgumentError, GraphError, ShapeError, VariableError


class Classifier(nn.Layer):
    def __init__(self) -> None:
        with gf.name_scope("encoder"):
            self.hidden = [nn.Linear(3, 4), nn.Linear(4, 4, bias=False)]
        self.norms = {"last": nn.BatchNorm1d(4)}
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2, name="head"))
        self.size = 3

    def __call__(self, x: Any) -> Any:
        for layer in self.hidden:
            x = nn.relu(layer(x))
        return self.head(self.norms["last"](x))


def test_parameters_are_named_by_scopes_and_layers() -> None:
    model = Classifier()
    shapes = {name: v.shape for name, v in model.parameters().items()}
    assert shapes == {
        "encoder/linear/weight": (4, 3),
        "encoder/linear/bias": (4,),
        "encoder/linear/weight_1": (4, 4),
        "batch_norm/scale": (4,),
        "batch_norm/bias": (4,),
        "head/weight": (2, 4),
        "head/bias": (2,),
    }
    assert list(model.buffers()) == ["batch_norm/mean", "batch_norm/variance"]


def test_what_layers_compute_is_named_as_their_variables_are() -> None:
    class Twice(nn.Layer):
        def __init__(self) -> None:
            self.first, self.second = nn.Linear(3, 3, name="a"), nn.Linear(3, 3, name="b")

        def __call__(self, x: gf.Tensor) -> gf.Tensor:
            return gf.tanh(self.second(nn.relu(self.first(x))))

    class Named(Twice):
        def __init__(self, name: str) -> None:
            with self.scope(name):
                super().__init__()

    def names(layer: Any) -> list[str]:
        computed = gf.Graph(layer(gf.placeholder("float32", (2, 3)))).nodes
        return [n.name for n in computed if n.op.name in ("matmul", "relu", "tanh")]

    assert names(Twice()) == ["a/matmul", "relu", "b/matmul", "tanh"]
    assert names(Named("n")) == ["n/a/matmul", "n/relu", "n/b/matmul", "n/tanh"]
    with gf.name_scope("outer"):
        twice, named = Twice(), Named("n")
        inside = names(twice)
    assert inside == names(twice) == [f"outer/{each}" for each in names(Twice())]
    with gf.name_scope("other"):  # called where it was not made
        assert names(named) == [
            f"other/n/{each}" for each in ("a/matmul", "relu", "b/matmul", "tanh")
        ]
        assert names(nn.Linear(3, 3)) == ["other/linear/matmul"]
    with pytest.raises(ArgumentError, match="a name is a str that is not empty"):
        Named("")


def test_a_layer_used_twice_has_its_variables_once() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.relu, shared)
    assert list(model.parameters().values()) == [shared.weight, shared.bias]
    assert model.buffers() == {}


def test_a_copy_of_a_layer_is_refused_for_it_would_be_the_same_variables() -> None:
    model = nn.Sequential(nn.Linear(3, 2, name="online"), gf.exp)
    with pytest.raises(VariableError, match=r"online/weight \(made at .*build the layer again"):
        copy.deepcopy(model)
    with pytest.raises(GraphError, match=r"online/weight .*not pickled; .*session.save"):
        model.parameters()["online/weight"].__reduce_ex__(4)
    x = gf.placeholder("float32", (2,))
    kept = copy.deepcopy({"activation": gf.exp, "input": x, "again": [copy.copy(x)]})
    assert copy.deepcopy(gf.Graph(list(model.parameters().values()))).verify()
    assert kept["activation"] is gf.exp and kept["input"] is x and kept["again"][0] is x


def test_the_same_seed_gives_the_same_initial_values() -> None:
    def values(seed: int) -> list[bytes]:
        with gf.random.seed(seed), gf.Session() as s:
            parameters = Classifier().parameters().values()
            return [s.run(v).tobytes() for v in parameters]

    assert values(1) == values(1)
    assert values(1) != values(2)


def test_training_blocks_hand_out_the_updates_of_running_statistics() -> None:
    model, data = Classifier(), np.random.default_rng(0).normal(size=(8, 3)).astype("f")
    x = gf.placeholder("float32", (None, 3))
    with nn.training() as updates:
        loss = gf.mean(gf.square(model(x)))
    assert len(updates) == 2
    step = gf.optim.SGD(0.1).minimize(loss)
    predicted = model(x)
    norm = model.norms["last"]
    with gf.Session() as s:
        before = s.run(predicted, {x: data})
        assert s.run(predicted, {x: data}).tobytes() == before.tobytes()
        s.run(loss, {x: data})
        assert not s.get(norm.mean).any()
        s.run([step, *updates], {x: data})
        assert s.get(norm.mean).any()
        assert (s.get(norm.variance) != 1).any()
        assert s.run(predicted, {x: data}).tobytes() != before.tobytes()


def test_a_norm_called_twice_in_a_block_cannot_update_twice_in_a_step() -> None:
    norm, x = nn.BatchNorm(3), gf.placeholder("float32", (4, 3))
    with nn.training() as updates:
        y = norm(norm(x))
    with gf.Session() as s, pytest.raises(VariableError, match="assigned"):
        s.run([y, *updates], {x: np.zeros((4, 3), "f")})


def test_blocks_nest_and_end() -> None:
    norm, x = nn.BatchNorm(3), gf.placeholder("float32", (4, 3))
    with nn.training() as outer:
        with nn.training() as inner:
            norm(x)
        assert (len(outer), len(inner)) == (0, 2)
    norm(x)
    assert not outer


def test_dropout_drops_in_training_only() -> None:
    layer, x = nn.Dropout(0.5), gf.constant(np.ones(1000, "f"))
    with nn.training():
        dropped = layer(x)
    with gf.Session() as s:
        assert (s.run(layer(x)) == 1).all()
        assert 300 < (s.run(dropped) == 0).sum() < 700


def test_layers_say_what_they_are() -> None:
    layer = nn.Linear(3, 4, name="first")
    assert "first/weight" in repr(layer)
    model = nn.Sequential(layer, nn.relu, nn.Dropout(0.1))
    assert len(model) == 3 and model[0] is layer and len(model[1:]) == 2
    with pytest.raises(AttributeError):
        layer.weight = None  # type: ignore[misc, assignment]


def test_attention_layers_attend_alike_with_cached_keys() -> None:
    layer = nn.MultiHeadAttention(8, 4, shared=2, rotary=1e4)
    data = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("f")
    with gf.Session() as s:
        whole = s.run(layer(data, causal=True))
        prefix = s.run(layer(data[:, :3], causal=True))
    assert layer.weight.shape == (16, 8)
    np.testing.assert_allclose(prefix, whole[:, :3], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layer", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_go_on_from_their_last_state(layer: Any) -> None:
    network = layer(3, 4, num_layers=2)
    x = np.random.default_rng(0).normal(size=(6, 2, 3)).astype("f")
    y, end = network(x)
    first, state = network(x[:4])
    second, last = network(x[4:], state)
    with gf.Session() as s:
        whole, *parts = s.run([y, first, second])
        ends = s.run([end, last])
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_cells_are_one_step_of_their_layers(kind: str) -> None:
    layer, cell = getattr(nn, kind)(3, 4), getattr(nn, f"{kind}Cell")(3, 4)
    x = np.random.default_rng(0).normal(size=(2, 3)).astype("f")
    with gf.Session() as s:
        for mine, its in zip(cell.parameters().values(), layer.parameters().values(), strict=True):
            s.set(mine, s.run(its))
        y, _ = layer(x[None])
        state = cell(x)
        have, want = s.run([state[0] if kind == "LSTM" else state, y])
    np.testing.assert_allclose(have, want[0], rtol=1e-6)


def test_a_model_of_layers_trains() -> None:
    rng = np.random.default_rng(0)
    data = rng.normal(size=(64, 1, 8, 8)).astype("f")
    classes = (data.mean((1, 2, 3)) > 0).astype("int64")
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.relu,
        lambda x: gf.mean(x, (2, 3)), nn.Linear(4, 2),
    )  # fmt: skip
    x, y = gf.placeholder("float32", (None, 1, 8, 8)), gf.placeholder("int64", (None,))
    with nn.training() as updates:
        loss = nn.cross_entropy(model(x), y, reduction="mean")
    step = gf.optim.Adam(0.05).minimize(loss)
    with gf.Session() as s:
        losses = [float(s.run([loss, step, *updates], {x: data, y: classes})[0]) for _ in range(25)]
    assert losses[-1] < losses[0] / 2


def test_layers_refuse_what_does_not_fit() -> None:
    x = gf.placeholder("float32", (2, 4))
    for wrong, told in (
        (lambda: nn.Linear(0, 3), "Linear at .*test_layers.*inputs must be an int above 0, got 0"),
        (lambda: nn.Embedding(3, 2.5), "size must be an int, not 2.5"),  # type: ignore[arg-type]
        (lambda: nn.LayerNorm(()), "shape must be an int above 0"),
        (lambda: nn.Conv2d(3, 4, (3, 3, 3)), "Conv2d at .*kernel must have 2 sizes"),
        (lambda: nn.Conv2d(3, 4, 3, groups=2), "2 groups do not divide 3 inputs and 4 outputs"),
        (lambda: nn.Dropout(1.0), r"Dropout at .*rate must be a number in \[0, 1\)"),
        (lambda: nn.Sequential(3), "Sequential at .*callable, 3 is not"),  # type: ignore[arg-type]
        (lambda: nn.MultiHeadAttention(7, 2), "2 heads do not divide size 7"),
        (lambda: nn.MultiHeadAttention(8, 4, shared=3), "3 shared heads do not divide 4 heads"),
        (
            lambda: nn.LSTM(3, 4)(np.zeros((2, 2, 3), "f"), np.zeros((1, 2, 4), "f")),
            "state holds 2",
        ),
    ):
        with pytest.raises(ArgumentError, match=told):
            wrong()
    for call, told in (
        (lambda: nn.Linear(3, 2)(x), r"Linear at .*test_layers.*its 3 inputs, x is \(2, 4\)"),
        (lambda: nn.LayerNorm(3)(x), r"LayerNorm at .*test_layers.*last axes of x are \(3,\)"),
        (lambda: nn.BatchNorm2d(4)(x), r"BatchNorm2d at .*rank 4, got shape \(2, 4\)"),
        (lambda: nn.BatchNorm(3)(x), r"scale \(3,\) is not of the normalised shape \(4,\)"),
        (lambda: nn.Conv1d(4, 2, 3)(x), "Conv1d at .*a batch, channels and 1 spatial axis"),
        (lambda: nn.MultiHeadAttention(8, 2)(x), r"must be \(…, T, 8\), got \(2, 4\)"),
        (lambda: nn.LSTM(3, 4)(x), r"LSTM at .*\(T, B, inputs\)"),
        (lambda: nn.GRUCell(3, 4)(x[0]), r"GRUCell at .*\(B, inputs\)"),
    ):
        with pytest.raises(ShapeError, match=told):
            call()


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LayerNorm(3, affine=None),
        lambda: nn.Linear(3, 2, bias="no"),
        lambda: nn.Linear(3, 2, bias=np.array([1, 2])),
        lambda: nn.Linear(3, 2, name=7),
        lambda: nn.TransformerBlock(8, 2, activation="gelu"),
        lambda: nn.Linear(3, 2)(None),
    ],
)
def test_layers_check_flags_names_functions_and_what_they_are_called_on(build: Any) -> None:
    with pytest.raises(GraphError, match=r"(Linear|LayerNorm|TransformerBlock) at .*\.py:"):
        build()
