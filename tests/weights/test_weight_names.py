"""Weights of torch's names in layers of ours, against torch's formulas in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

import graphflow as gf
from graphflow import nn
from graphflow.weights.weight_names import name_weights
from tests.weights import numpy_modules as there

Array = np.ndarray[Any, Any]
Case = tuple[Callable[[], Any], Callable[[dict[str, Array], Array], Array], tuple[int, ...]]


def _recurrent(kind: str, layers: int, sides: int) -> Case:
    own = {"LSTM": nn.LSTM, "GRU": nn.GRU}[kind]
    direction = {"LSTM": there.lstm_direction, "GRU": there.gru_direction}[kind]
    return (
        lambda: own(3, 4, layers, bidirectional=sides == 2),
        lambda state, x: there.recurrent(direction, state, x, layers, sides),
        (5, 2, 3),
    )


CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(3, 4), there.linear, (2, 3)),
    "layer norm": (lambda: nn.LayerNorm(4), there.layer_norm, (3, 4)),
    "batch norm": (lambda: nn.BatchNorm2d(3), there.batch_norm, (2, 3, 2, 2)),
    "attention": (
        lambda: nn.MultiHeadAttention(6, 2), partial(there.attention, heads=2), (2, 4, 6)
    ),
    "transformer block": (
        lambda: nn.TransformerBlock(6, 2, 8, activation=nn.relu, norm_first=False),
        partial(there.encoder_layer, heads=2), (2, 4, 6),
    ),
    **{
        f"{kind} of {layers} layers, {sides} sides": _recurrent(kind, layers, sides)
        for kind in ("LSTM", "GRU") for layers in (1, 2) for sides in (1, 2)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_of_torch_gives_torchs_numbers(case: str) -> None:
    make, reference, shape = CASES[case]
    layer = make()
    shapes = {name: v.shape for name, v in name_weights(layer, "torch").variables.items()}
    state = there.make_state(shapes)
    x = np.random.default_rng(1).normal(size=shape).astype("float32")
    fed = gf.placeholder("float32", shape)
    out = layer(fed)
    with gf.Session() as s:
        counts = {n: np.array(7) for n in name_weights(layer, "torch").counts}
        assert len(layer.load(s, state | counts, "torch").loaded) == len(state)
        (have,) = s.run([out[0] if isinstance(out, tuple) else out], {fed: x})
        saved = layer.state(s, "torch")
    np.testing.assert_allclose(have, reference(state, x), rtol=1e-5, atol=1e-5)
    assert {n for n, v in saved.items() if v.dtype == "int64"} == {*counts}
    assert all(np.array_equal(saved[name], value) for name, value in state.items())


class Model(nn.Layer):
    """One of each way in which a model holds layers and variables."""

    def __init__(self) -> None:
        self.embed = nn.Embedding(5, 4)
        self.blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.named = {"left": nn.RMSNorm(4), "right": nn.GroupNorm(2, 4)}
        self.head = nn.Sequential(nn.relu, nn.Sequential(nn.Linear(4, 2)))
        self.tied = self.embed
        self.scale = gf.variable(np.ones(4, "float32"))
        self.whole = self


def test_a_name_is_the_way_to_a_weight() -> None:
    names = name_weights(Model(), "torch").variables
    assert [*names] == [
        "embed.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias",
        "named.left.weight", "named.right.weight", "named.right.bias", "head.1.0.weight",
        "head.1.0.bias", "tied.weight", "scale",
    ]  # fmt: skip
    assert names["tied.weight"] is names["embed.weight"]


def test_a_tied_weight_needs_one_of_its_names() -> None:
    model = Model()
    with gf.Session() as s:
        state = model.state(s, "torch")
        assert np.array_equal(state["tied.weight"], state["embed.weight"])
        state["tied.weight"] = state.pop("embed.weight") + 1
        assert not model.load(s, state, "torch").missing
        assert np.array_equal(s.get(model.embed.weight), state["tied.weight"])


def test_a_wrapper_says_what_torch_calls_attributes_of_its_part() -> None:
    class Wrapper(nn.Layer):
        torch_names: ClassVar[Mapping[str, str]] = {
            "layer": "", "layer.weight": "parametrizations.weight.original1",
            "gain": "parametrizations.weight.original0",
        }  # fmt: skip

        def __init__(self) -> None:
            self.layer = nn.Linear(2, 3)
            self.gain = gf.variable(np.ones((3, 1), "float32"))

        def __call__(self, x: Any) -> Any:
            return self.layer(x)

    names = name_weights(nn.Sequential(Wrapper()), "torch").variables
    start = "0.parametrizations.weight.original"
    assert [*names] == [f"{start}1", "0.bias", f"{start}0"]


def test_a_layer_of_a_user_says_what_torch_calls_its_attributes() -> None:
    class Block(nn.Layer):
        torch_names: ClassVar[Mapping[str, str]] = {"up": "c_fc", "down": "c_proj"}

        def __init__(self) -> None:
            self.up, self.down = nn.Linear(2, 3), nn.Linear(3, 2)

        def __call__(self, x: Any) -> Any:
            return self.down(nn.gelu(self.up(x)))

    names = name_weights(nn.Sequential(Block()), "torch").variables
    assert [*names] == ["0.c_fc.weight", "0.c_fc.bias", "0.c_proj.weight", "0.c_proj.bias"]
