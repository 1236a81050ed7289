"""Functions as layers: they compute what the functions do, and hold what they train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow import nn
from graphflow.errors import ArgumentError, ShapeError

X = np.random.default_rng(0).normal(size=(2, 4, 6, 6)).astype("float32")


def value(tensor: Any) -> Any:
    with gf.Session() as session:
        return session.run(tensor)


@pytest.mark.parametrize(
    ("layer", "function"),
    [
        (nn.ReLU(), nn.relu), (nn.ReLU6(), nn.relu6), (nn.SiLU(), nn.silu), (nn.Mish(), nn.mish),
        (nn.GELU("tanh"), lambda x: nn.gelu(x, "tanh")), (nn.Sigmoid(), nn.sigmoid),
        (nn.Tanh(), nn.tanh), (nn.Softmax(axis=1), lambda x: nn.softmax(x, 1)),
        (nn.LogSoftmax(), nn.log_softmax), (nn.LeakyReLU(0.2), lambda x: nn.leaky_relu(x, 0.2)),
        (nn.ELU(), nn.elu), (nn.SELU(), nn.selu), (nn.Softplus(), nn.softplus),
        (nn.Hardswish(), nn.hard_swish), (nn.GLU(1), lambda x: nn.glu(x, 1)),
        (nn.MaxPool2d(2), lambda x: nn.max_pool2d(x, 2)),
        (nn.AvgPool2d(3, 1, padding=1), lambda x: nn.avg_pool2d(x, 3, 1, 1)),
        (nn.AdaptiveAvgPool(2), lambda x: nn.adaptive_avg_pool(x, 2)),
        (nn.AdaptiveMaxPool((3, 2)), lambda x: nn.adaptive_max_pool(x, (3, 2))),
        (nn.Upsample(scale=2), lambda x: nn.interpolate(x, scale=2)),
        (nn.InstanceNorm(4), nn.instance_norm), (nn.Identity(), lambda x: x),
        (nn.Flatten(), lambda x: gf.reshape(x, (2, -1))),
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_a_layer_is_its_function(layer: Any, function: Any) -> None:
    x = gf.constant(X)
    found, wanted = value([layer(x), function(x)])
    assert np.array_equal(found, wanted)


def test_layers_stand_in_a_model_of_any_batch_size() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.InstanceNorm(8, affine=True), nn.PReLU(8),
        nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(72, 3), nn.LogSoftmax(),
    )  # fmt: skip
    assert list(model.parameters()) == [
        "conv2d/weight", "conv2d/bias", "instance_norm/scale", "instance_norm/bias",
        "prelu/weight", "linear/weight", "linear/bias",
    ]  # fmt: skip
    x = gf.placeholder("float32", (None, 4, 6, 6))
    with nn.training():
        loss = -gf.mean(model(x)[:, 0])
    train = gf.optim.SGD(0.5).minimize(loss)
    with gf.Session() as session:
        losses = [session.run([loss, train], {x: X[:n]})[0] for n in (2, 1, 2, 2, 2)]
        assert losses[-1] < losses[0]


def test_dropped_channels_are_dropped_whole() -> None:
    with nn.training():
        found = value(nn.Dropout2d(0.5)(gf.constant(np.ones((50, 8, 3, 3), "float32"))))
    each = found.reshape(400, 9)
    assert ((each == 0).all(1) | (each == 2).all(1)).all()
    assert 0.35 < (each[:, 0] == 0).mean() < 0.65
    assert np.array_equal(value(nn.Dropout2d(0.5)(gf.constant(X))), X)


def test_slopes_of_channels_are_trained() -> None:
    layer = nn.PReLU(4, initial=0.5)
    x = gf.constant(X)
    assert np.array_equal(value(layer(x)), np.where(X > 0, X, 0.5 * X))
    slope = value(gf.gradients(gf.sum(layer(x)), [layer.weight])[0])
    np.testing.assert_allclose(slope, np.minimum(X, 0).sum((0, 2, 3)), 1e-5)


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(ArgumentError, match=r"rate must be a number in \[0, 1\), got 1"):
        nn.Dropout2d(1)
    with pytest.raises(ShapeError, match="start is 5, and x"):
        nn.Flatten(5)(gf.constant(X))
    with pytest.raises(ArgumentError, match="channels must be an int above 0, got 0"):
        nn.PReLU(0)
    with pytest.raises(AttributeError, match=r"it is gf\.nn\.AdaptiveAvgPool"):
        nn.AdaptiveAvgPool2d  # noqa: B018
