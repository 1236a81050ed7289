"""Normalisation: against plain formulas, in a session, and refusing what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, CheckError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn


def value(tensor: Any) -> Any:
    return evaluate([tensor])[0]


def standardize(x: np.ndarray, axes: tuple[int, ...], epsilon: float = 1e-5) -> np.ndarray:
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt(x.var(axes, keepdims=True) + epsilon)


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(0).normal(1, 2, (3, 4, 2, 5))


@pytest.fixture
def channels() -> np.ndarray:
    """Scale, bias, mean and variance."""
    return np.random.default_rng(1).uniform(0.5, 2, (4, 4))


def column(p: np.ndarray) -> np.ndarray:
    return p.reshape(-1, 1, 1)


def test_batch_norm_in_use_goes_by_the_given_statistics(
    image: np.ndarray, channels: np.ndarray
) -> None:
    scale, bias, mean, variance = channels
    want = (image - column(mean)) / np.sqrt(column(variance) + 1e-5) * column(scale) + column(bias)
    have = value(nn.batch_norm(image, scale, bias, mean, variance))
    np.testing.assert_allclose(have, want, rtol=1e-12)
    last = np.ascontiguousarray(np.moveaxis(image, 1, -1))
    have = value(nn.batch_norm(last, scale, bias, mean, variance, channels_last=True))
    np.testing.assert_allclose(np.moveaxis(have, -1, 1), want, rtol=1e-12)
    plain = value(nn.batch_norm(image, mean=mean, variance=variance))
    np.testing.assert_allclose(plain * column(scale) + column(bias), want, rtol=1e-12)


@pytest.mark.parametrize("unbiased", [True, False])
def test_batch_norm_in_training_moves_the_statistics_as_torch_or_onnx_does(
    image: np.ndarray, channels: np.ndarray, unbiased: bool
) -> None:
    scale, bias, mean, variance = channels
    x = gf.placeholder("float64", (None, 4, 2, "w"))
    results = nn.batch_norm(
        x, scale, bias, mean, variance, training=True, momentum=0.3, unbiased=unbiased
    )
    y, new_mean, new_variance = evaluate(results, {x: image})
    axes = (0, 2, 3)
    want = standardize(image, axes) * column(scale) + column(bias)
    np.testing.assert_allclose(y, want, rtol=1e-10)
    np.testing.assert_allclose(new_mean, 0.7 * mean + 0.3 * image.mean(axes), rtol=1e-12)
    batch = image.var(axes, ddof=int(unbiased))
    np.testing.assert_allclose(new_variance, 0.7 * variance + 0.3 * batch, rtol=1e-12)


def test_no_gradient_flows_through_running_statistics(image: np.ndarray) -> None:
    x = gf.placeholder("float64", image.shape)
    _, mean, variance = nn.batch_norm(
        x, mean=np.zeros(4), variance=np.ones(4), training=True, momentum=0.5
    )
    (slope,) = gf.gradients(gf.sum(mean) + gf.sum(variance), [x])
    assert not evaluate([slope], {x: image})[0].any()


def test_float16_data_may_have_float32_statistics() -> None:
    x = np.array([[300.0], [-300.0]], "float16")
    y, mean, variance = evaluate(
        nn.batch_norm(
            x, np.ones(1, "f"), np.zeros(1, "f"), np.zeros(1, "f"), np.ones(1, "f"), training=True
        )
    )
    assert (y.dtype, mean.dtype, variance.dtype) == ("float16", "float32", "float32")
    assert y.tolist() == [[1], [-1]]
    assert variance[0] == pytest.approx(0.9 + 0.1 * 180000)


def test_group_and_instance_norm_are_standardisations_of_parts(
    image: np.ndarray, channels: np.ndarray
) -> None:
    scale, bias = column(channels[0]), column(channels[1])
    groups = standardize(image.reshape(3, 2, 2, 2, 5), (2, 3, 4)).reshape(image.shape)
    have = value(nn.group_norm(image, 2, channels[0], channels[1]))
    np.testing.assert_allclose(have, groups * scale + bias, rtol=1e-10)
    have = value(nn.instance_norm(image, channels[0], channels[1]))
    np.testing.assert_allclose(have, standardize(image, (2, 3)) * scale + bias, rtol=1e-10)
    last = np.moveaxis(image, 1, -1).copy()
    have = value(nn.group_norm(last, 2, channels[0], channels[1], channels_last=True))
    np.testing.assert_allclose(np.moveaxis(have, -1, 1), groups * scale + bias, rtol=1e-10)


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, scale = np.random.default_rng(0).normal(size=(3, 4)), np.arange(4.0)
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(value(nn.rms_norm(x, scale, epsilon=0.1)), want * scale, rtol=1e-12)
    np.testing.assert_allclose(value(nn.rms_norm(x, epsilon=0.1)), want, rtol=1e-12)


def test_scale_and_bias_of_layer_norm_may_be_left_out() -> None:
    x, v = np.random.default_rng(0).normal(size=(3, 4)), np.arange(4.0)
    unit = standardize(x, (1,))
    np.testing.assert_allclose(value(nn.layer_norm(x)), unit, rtol=1e-10)
    np.testing.assert_allclose(value(nn.layer_norm(x, v)), unit * v, rtol=1e-10)
    np.testing.assert_allclose(value(nn.layer_norm(x, None, v)), unit + v, rtol=1e-10)


def test_norms_refuse_what_does_not_fit() -> None:
    x, v = gf.placeholder("float32", (2, 4, 3)), gf.placeholder("float32", (4,))
    with pytest.raises(ArgumentError, match=r"batch_norm at .*test_norm.*running mean"):
        nn.batch_norm(x, v, v)
    with pytest.raises(ShapeError, match=r"mean \(3,\) is not of the normalised shape \(4,\)"):
        nn.batch_norm(x, v, v, np.zeros(3, "f"), v)
    with pytest.raises(ArgumentError, match="momentum must be a number from 0 to 1"):
        nn.batch_norm(x, v, v, v, v, momentum=2)
    with pytest.raises(ShapeError, match="one value for each channel"):
        nn.batch_norm(gf.placeholder("float32", (1, 4)), v, v, v, v, training=True)
    with pytest.raises(DTypeError, match="expected float"):
        nn.batch_norm(gf.placeholder("int32", (2, 4)), v, v, v, v)
    with pytest.raises(ShapeError, match=r"group_norm at .*test_norm.*3 groups do not divide 4"):
        nn.group_norm(x, 3, v, v)
    with pytest.raises(ArgumentError, match="groups must be an int above 0"):
        nn.group_norm(x, 0)
    with pytest.raises(ShapeError, match=r"scale \(3,\) is not \(4,\)"):
        nn.group_norm(x, 2, np.zeros(3, "f"))
    with pytest.raises(ShapeError, match=r"instance_norm at .*axes besides"):
        nn.instance_norm(gf.placeholder("float32", (2, 4)))
    with pytest.raises(ShapeError, match="a batch and channels"):
        nn.instance_norm(v)
    with pytest.raises(ArgumentError, match=r"rms_norm at .*epsilon"):
        nn.rms_norm(x, epsilon=-1)
    with pytest.raises(ArgumentError, match="channels_last must be True or False"):
        nn.instance_norm(x, channels_last="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(("unbiased", "sizes"), [(True, (0, 1)), (False, (0,))])
def test_a_batch_too_small_for_a_variance_ends_the_step_and_running_statistics_stay(
    unbiased: bool, sizes: tuple[int, ...]
) -> None:
    x = gf.placeholder("float32", (None, 2))
    running = gf.variable(np.ones(2, "float32"))
    y, _, new = nn.batch_norm(
        x, None, None, gf.zeros((2,)), running, training=True, unbiased=unbiased
    )
    update = gf.assign(running, new)
    with gf.Session() as s:
        for size in sizes:
            with pytest.raises(CheckError, match=r"(?s)for each channel.*test_norm\.py"):
                s.run([y, update], {x: np.ones((size, 2))})
        assert s.get(running).tolist() == [1, 1]
        s.run([y, update], {x: np.zeros((2, 2))})
        np.testing.assert_allclose(s.get(running), [0.9, 0.9])
        assert s.run(y, {x: np.ones((1, 2))}).tolist() == [[0, 0]]
