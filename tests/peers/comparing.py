"""One function here and its peer in torch, on the same arrays: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import graphflow as gf
from graphflow.interpret import evaluate

Arrays = Sequence[np.ndarray[Any, Any]]


def agree(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    arrays: Arrays,
    *,
    seed: int = 0,
    rtol: float = 1e-9,
    atol: float = 1e-10,
) -> None:
    """Both give the same results, and the same gradients of a random projection of them.

    Floats among `arrays` are differentiated; a function may return a tuple.
    """
    xs = [gf.placeholder(a.dtype, a.shape) for a in arrays]
    ts = [torch.tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
    ys, us = _listed(ours(*xs)), _listed(theirs(*ts))
    assert [y.shape for y in ys] == [tuple(u.shape) for u in us]
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=u.shape).astype(str(y.dtype)) for y, u in zip(ys, us, strict=True)]
    moving = [i for i, a in enumerate(arrays) if a.dtype.kind == "f"]
    slopes = gf.gradients(ys, [xs[i] for i in moving], weights)
    torch.autograd.backward(us, [torch.tensor(w) for w in weights])
    feeds: Mapping[Any, Any] = dict(zip(xs, arrays, strict=True))
    have = evaluate([*ys, *slopes], feeds)
    want = [u.detach().numpy() for u in us]
    for i in moving:
        g = ts[i].grad
        want.append(np.zeros_like(arrays[i]) if g is None else g.numpy())
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]
