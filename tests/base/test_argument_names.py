"""Arguments and attributes by the names that they have elsewhere are told what stands for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import GraphflowError
from graphflow.ir.name_hints import SESSION_HINTS

X = gf.placeholder("float32", (2,), name="x")
W = gf.variable(np.ones(2, "float32"))
LOSS = gf.sum(W * X)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda s: s.run(LOSS, feed_dict={X: 1}), r"run at .*test_arg.*feed_dict.*it is 'feeds'"),
        (lambda s: s.run(LOSS, x=3), r"'x'.*is fed by run\(fetches, \{x: value\}\)"),
        (lambda s: s.run(LOSS, options=1), "leave it out: there is no default graph"),
        (lambda s: gf.optim.Adam([W], lr=0.1), r"takes its variables in minimize\(loss, var"),
        (lambda s: gf.optim.Adam({"w": W}), r"takes its variables in minimize\(loss, var"),
        (lambda s: gf.optim.Adam([W]), r"lr must be a number .*; an optimiser takes its variables"),
        (lambda s: gf.optim.Adam(learning_rate=0.1), "it is 'lr' here"),
        (lambda s: gf.optim.Adam(0.1, betas=(0.9, 0.99)), "give beta1=… and beta2=…, one by one"),
        (lambda s: gf.optim.Adam(0.1, eps=1e-8), "it is 'epsilon' here"),
        (lambda s: gf.optim.SGD(0.1).minimize(LOSS, var_list=[W]), "it is 'variables' here"),
        (lambda s: gf.plan(LOSS, "2xh100"), r"is gf\.Cluster\.hypothetical\('2xh100'\)"),
        (lambda s: gf.Session("2xh100"), r"is gf\.Cluster\.hypothetical\('2xh100'\)"),
        (lambda s: gf.Session(device="cuda"), r"give cluster=gf\.Cluster\.here\(devices="),
        (lambda s: gf.sum(X, dim=0), "it is 'axis' here"),
        (lambda s: gf.sum(X, keepdim=True), "it is 'keepdims' here"),
        (lambda s: gf.variable([1.0], requires_grad=False), "it is 'trainable' here"),
        (lambda s: gf.constant([1.0], device="cuda"), "build it in a block `with gf.device"),
        (lambda s: gf.random.uniform(size=(2,)), "it is 'shape' here"),
        (lambda s: gf.random.normal((2,), stddev=1), "it is 'std' here"),
        (lambda s: gf.nn.dropout(X, p=0.5), "it is 'rate' here"),
        (lambda s: gf.nn.Linear(in_features=2), "it is 'inputs' here"),
        (lambda s: gf.gradients(LOSS, wrt=[W]), "it is 'xs' here"),
        (lambda s: gf.sum(X, axes=0), "did you mean 'axis'"),
        (lambda s: s.save(path="f"), "it is 'folder' here"),
    ],
)
def test_an_argument_that_is_called_otherwise_here_is_told_its_name(
    mistake: Callable[[Any], Any], told: str
) -> None:
    with gf.Session() as s, pytest.raises(GraphflowError, match=told):
        mistake(s)


def test_attributes_of_other_sessions_are_told_what_to_use() -> None:
    with gf.Session() as s:
        for name, told in SESSION_HINTS.items():
            with pytest.raises(AttributeError) as caught:
                getattr(s, name)
            assert str(caught.value).endswith(f"no attribute {name!r}; use {told}")
        with pytest.raises(AttributeError, match="did you mean 'warmup'"):
            s.warmpu  # type: ignore[attr-defined]  # noqa: B018
        assert not hasattr(s, "__array__")
