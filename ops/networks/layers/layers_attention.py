"""Attention layers: multi-head attention and transformer blocks. Public in `gf.nn`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from graphflow import init
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Tensor, as_tensor, name_scope, user_location
from graphflow.ir.spec import Size, show_shape
from graphflow.ops.attention.attention_op import attention
from graphflow.ops.matrices.matmul import add_bias, matmul
from graphflow.ops.networks.layers.basic_layers import Dropout, LayerNorm, Linear
from graphflow.ops.networks.layers.layer_base import (
    Layer,
    parameter,
    require_sizes,
    set_attributes,
    uniform_parameter,
)
from graphflow.ops.networks.rotary import rotary
from graphflow.ops.pointwise.activations import gelu
from graphflow.ops.tensors.shape import moveaxis, reshape
from graphflow.ops.tensors.slicing import split
from graphflow.ops.tensors.slicing import window as rows_of


@dataclass(frozen=True, eq=False, init=False)
class MultiHeadAttention(Layer):
    """Multi-head attention of (…, T, size), between linear maps.

    Args:
        size: size of queries, keys and values.
        heads: number of heads, a divisor of size.
        shared: number of heads of keys and values, a divisor of `heads` (grouped-query attention);
            default: `heads`.
        rotary: base of rotary embeddings of queries and keys; None for none.

    Variables: `weight` (size + 2·shared·d, size) with d = size/heads, whose rows map to queries,
    then keys, then values; its `bias`; and those of the linear map `out`. As in torch, weights are
    Glorot-uniform and biases 0.

    Source: Vaswani et al., NeurIPS 2017; Ainslie et al., EMNLP 2023.
    """

    torch_names: ClassVar[Mapping[str, str]] = {
        "weight": "in_proj_weight",
        "bias": "in_proj_bias",
        "out": "out_proj",
    }
    weight: Tensor
    bias: Tensor | None
    out: Linear
    heads: int
    shared: int
    rotary: float | None

    def __init__(
        self, size: int, heads: int, bias: bool = True, *, shared: int | None = None,
        rotary: float | None = None, dtype: Any = "float32", name: str = "attention",
    ) -> None:  # fmt: skip
        shared = heads if shared is None else shared
        require_sizes(self, size=size, heads=heads, shared=shared)
        if size % heads or heads % shared:
            raise ArgumentError(
                f"MultiHeadAttention at {user_location()}: {heads} heads do not divide size {size}"
                if size % heads
                else f"MultiHeadAttention at {user_location()}: {shared} shared heads do not "
                f"divide {heads} heads"
            )
        set_attributes(self, heads=heads, shared=shared, rotary=rotary)
        rows = size + 2 * shared * (size // heads)
        with self.scope(name):
            set_attributes(
                self,
                weight=uniform_parameter(
                    "weight", (rows, size), math.sqrt(6 / (rows + size)), dtype
                ),
                bias=parameter("bias", init.zeros((rows,), dtype)) if bias else None,
                out=Linear(size, size, bias=False, dtype=dtype, name="out"),
            )
            if bias:
                with name_scope("out"):
                    set_attributes(self.out, bias=parameter("bias", init.zeros((size,), dtype)))

    def __call__(
        self, query: Any, key: Any = None, value: Any = None, *, mask: Any = None,
        causal: bool = False, window: Any = None, offset: Size = 0,
    ) -> Tensor:  # fmt: skip
        """Attend with query to key and value, (…, T, size) each.

        Key defaults to query, and value to key. Other arguments as for `gf.nn.attention`.
        """
        query = as_tensor(query)
        key = query if key is None else as_tensor(key)
        value = key if value is None else as_tensor(value)
        size = self.weight.shape[1]
        for x in (query, key, value):
            if x.ndim < 2 or x.shape[-1] != size:
                raise ShapeError(
                    f"MultiHeadAttention at {user_location()}: queries, keys and values must be "
                    f"(…, T, {size}), got {show_shape(x.shape)}"
                )
        q, k, v = self._project(query, key, value)
        if self.rotary is not None:
            q, k = (rotary(x, base=self.rotary) for x in (q, k))
        y = attention(q, k, v, mask, causal=causal, window=window, offset=offset)
        merged = moveaxis(y, -3, -2)
        return self.out(reshape(merged, (*merged.shape[:-2], size)))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return queries, keys and values (…, heads, T, d); one product serves a common input."""
        size = int(self.weight.shape[1])
        few = self.shared * (size // self.heads)
        depth, counts, starts = size // self.heads, (size, few, few), (0, size, size + few)
        if query is key is value:
            together = add_bias(matmul(query, self.weight, transpose_b=True), self.bias)
            parts = split(together, counts, -1)
        else:
            parts = []
            for x, start, count in zip((query, key, value), starts, counts, strict=True):
                part = matmul(x, rows_of(self.weight, 0, start, count), transpose_b=True)
                bias = None if self.bias is None else rows_of(self.bias, 0, start, count)
                parts.append(add_bias(part, bias))
        return [
            moveaxis(reshape(p, (*p.shape[:-1], count // depth, depth)), -2, -3)
            for p, count in zip(parts, counts, strict=True)
        ]


@dataclass(frozen=True, eq=False, init=False)
class TransformerBlock(Layer):
    """A transformer block: attention and two linear maps, each branch with a norm and a shortcut.

    Args:
        size, heads: as for `MultiHeadAttention`.
        hidden: size between the linear maps; default: 4·size.
        dropout: rate at the end of each branch, in a `gf.nn.training` block.
        activation: function between the linear maps.
        norm_first: norms begin each branch (GPT-2); otherwise they follow each sum.

    Source: Vaswani et al., NeurIPS 2017; Xiong et al., ICML 2020.
    """

    torch_names: ClassVar[Mapping[str, str]] = {"attention": "self_attn"}
    norm1: LayerNorm
    attention: MultiHeadAttention
    norm2: LayerNorm
    linear1: Linear
    linear2: Linear
    dropout: Dropout
    activation: Callable[[Tensor], Tensor]
    norm_first: bool

    def __init__(
        self, size: int, heads: int, hidden: int | None = None, dropout: float = 0.0, *,
        activation: Callable[[Tensor], Tensor] = gelu, norm_first: bool = True, bias: bool = True,
        shared: int | None = None, rotary: float | None = None, dtype: Any = "float32",
        name: str = "block",
    ) -> None:  # fmt: skip
        require_sizes(self, size=size)
        hidden = 4 * size if hidden is None else hidden
        set_attributes(self, activation=activation, norm_first=norm_first, dropout=Dropout(dropout))
        with self.scope(name):
            set_attributes(
                self,
                norm1=LayerNorm(size, bias=bias, dtype=dtype, name="norm1"),
                attention=MultiHeadAttention(
                    size, heads, bias, shared=shared, rotary=rotary, dtype=dtype
                ),
                norm2=LayerNorm(size, bias=bias, dtype=dtype, name="norm2"),
                linear1=Linear(size, hidden, bias, dtype=dtype, name="linear1"),
                linear2=Linear(hidden, size, bias, dtype=dtype, name="linear2"),
            )

    def __call__(self, x: Any, *, mask: Any = None, causal: bool = False) -> Tensor:
        """Transform x (…, T, size); mask and causal as for `gf.nn.attention`."""

        def attend(x: Tensor) -> Tensor:
            return self.dropout(self.attention(x, mask=mask, causal=causal))

        def transform(x: Tensor) -> Tensor:
            return self.dropout(self.linear2(self.activation(self.linear1(x))))

        x = as_tensor(x)
        if self.norm_first:
            x = x + attend(self.norm1(x))
            joined: Tensor = x + transform(self.norm2(x))
            return joined
        x = self.norm1(x + attend(x))
        return self.norm2(x + transform(x))
