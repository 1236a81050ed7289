"""One function here and its peer in torch, on the same arrays: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import graphflow as gf
from graphflow.frontend.interpreter import evaluate

Arrays = Sequence[np.ndarray[Any, Any]]


def agree(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    arrays: Arrays,
    *,
    seed: int = 0,
    rtol: float = 1e-9,
    atol: float = 1e-10,
    feeds: Mapping[Any, Any] | None = None,
) -> None:
    """Both give the same results, and the same gradients of a random projection of them.

    Floats and complex numbers among `arrays` are differentiated; a function may return a tuple.
    """
    xs = [gf.placeholder(a.dtype, a.shape) for a in arrays]
    ts = [torch.tensor(a, requires_grad=a.dtype.kind in "fc") for a in arrays]
    ys, us = _to_list(ours(*xs)), _to_list(theirs(*ts))
    assert [y.shape for y in ys] == [tuple(u.shape) for u in us]
    rng = np.random.default_rng(seed)
    weights = [_weights(rng, tuple(u.shape), y.dtype) for y, u in zip(ys, us, strict=True)]
    moving = [i for i, a in enumerate(arrays) if a.dtype.kind in "fc"]
    slopes = gf.gradients(ys, [xs[i] for i in moving], weights)
    torch.autograd.backward(us, [torch.tensor(w) for w in weights])
    given = {**(feeds or {}), **dict(zip(xs, arrays, strict=True))}
    have = evaluate([*ys, *slopes], given)
    want = [u.detach().resolve_conj().numpy() for u in us]
    for i in moving:
        g = ts[i].grad
        want.append(np.zeros_like(arrays[i]) if g is None else g.resolve_conj().numpy())
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def _weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    weights: Any = rng.normal(size=shape)
    if dtype.kind == "c":
        weights = weights + 1j * rng.normal(size=shape)
    return np.asarray(weights).astype(dtype)


def _to_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def same_weights(here: Any, there: torch.nn.Module) -> dict[Any, np.ndarray[Any, Any]]:
    """Values for a layer's variables: those that its peer has, in order."""
    ours, theirs = list(here.parameters().values()), list(there.parameters())
    assert [v.shape for v in ours] == [tuple(p.shape) for p in theirs]
    return {v: p.detach().numpy() for v, p in zip(ours, theirs, strict=True)}
