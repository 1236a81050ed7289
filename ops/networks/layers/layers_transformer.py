"""The encoder-decoder transformer and its layers, with torch's structure. Public in `gf.nn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphflow import init
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, name_scope, prefix_scope, user_location
from graphflow.ir.spec import kind, show_shape
from graphflow.ops.networks.layers.basic_layers import Dropout, LayerNorm, Linear
from graphflow.ops.networks.layers.layer_base import (
    Layer,
    parameter,
    require_layers,
    require_sizes,
    set_attributes,
)
from graphflow.ops.networks.layers.layers_attention import MultiHeadAttention
from graphflow.ops.pointwise.rectifiers import relu
from graphflow.ops.pointwise.select import where
from graphflow.ops.tensors.shape import expand_dims

Activation = Callable[[Tensor], Tensor]


def _visible_keys(layer: Layer, mask: Any, padding: Any) -> Any:
    """Return the mask for `gf.nn.attention` of a mask and of keys that are padding."""
    if padding is None:
        return mask
    padding = as_tensor(padding)
    where_ = f"{type(layer).__name__} at {user_location()}"
    if kind(padding.dtype) != "bool":
        raise DTypeError(
            f"{where_}: a padding mask is bool, True at padding, not {padding.dtype}; "
            "compare, such as ids == 0"
        )
    if not padding.ndim:
        raise ShapeError(f"{where_}: a padding mask is (…, keys), got {show_shape(padding.shape)}")
    hidden = expand_dims(expand_dims(padding, -2), -2)  # of all heads and queries
    if mask is None:
        return FUNCTIONS["logical_not"](hidden)
    mask = as_tensor(mask)
    return where(hidden, False if kind(mask.dtype) == "bool" else float("-inf"), mask)


class _TransformerLayer(Layer):
    """Base of the layers of encoders and decoders: parts, branches and linear maps."""

    linear1: Linear
    linear2: Linear
    dropout: Dropout
    activation: Activation
    norm_first: bool

    def _build(
        self, size: int, heads: int, hidden: int, dropout: float, activation: Activation,
        epsilon: float, norm_first: bool, bias: bool, dtype: Any, attentions: tuple[str, ...],
    ) -> None:  # fmt: skip
        """Make attentions of these names, a norm for each branch, and the linear maps."""
        parts: dict[str, Layer] = {
            name: MultiHeadAttention(size, heads, bias, dtype=dtype, name=name)
            for name in attentions
        }
        for i in range(len(attentions) + 1):
            name = f"norm{i + 1}"
            parts[name] = LayerNorm(size, epsilon, bias=bias, dtype=dtype, name=name)
        set_attributes(
            self,
            linear1=Linear(size, hidden, bias, dtype=dtype, name="linear1"),
            linear2=Linear(hidden, size, bias, dtype=dtype, name="linear2"),
            dropout=Dropout(dropout), activation=activation, norm_first=norm_first, **parts,
        )  # fmt: skip

    def _transform(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def _run(self, x: Tensor, *branches: tuple[LayerNorm, Activation]) -> Tensor:
        """Add each branch to x, with its norm before the branch or after the sum."""
        for norm, branch in branches:
            if self.norm_first:
                x = x + self.dropout(branch(norm(x)))
            else:
                x = norm(x + self.dropout(branch(x)))
        return x


@dataclass(frozen=True, eq=False, init=False)
class TransformerEncoderLayer(_TransformerLayer):
    """A layer of a transformer's encoder, as torch has it: self-attention and two linear maps.

    Unlike torch, `dropout` does not drop attention weights; outputs in use are the same.

    Args:
        size, heads: as for `MultiHeadAttention`.
        hidden: size between the linear maps.
        dropout: rate at the end of each branch and between the linear maps, in a
            `gf.nn.training` block.
        activation: function between the linear maps.
        epsilon: of the norms.
        norm_first: norms begin each branch; otherwise they follow each sum.

    Source: Vaswani et al., NeurIPS 2017.
    """

    self_attn: MultiHeadAttention
    norm1: LayerNorm
    norm2: LayerNorm

    def __init__(
        self, size: int, heads: int, hidden: int = 2048, dropout: float = 0.1, *,
        activation: Activation = relu, epsilon: float = 1e-5, norm_first: bool = False,
        bias: bool = True, dtype: Any = "float32", name: str = "encoder_layer",
    ) -> None:  # fmt: skip
        require_sizes(self, size=size, hidden=hidden)
        with self.scope(name):
            self._build(
                size, heads, hidden, dropout, activation, epsilon, norm_first, bias, dtype,
                ("self_attn",),
            )  # fmt: skip

    def __call__(
        self, x: Any, *, mask: Any = None, padding_mask: Any = None, causal: bool = False
    ) -> Tensor:
        """Transform x (…, T, size).

        Args:
            mask, causal: as for `gf.nn.attention` (a bool mask is True where a key may be seen).
            padding_mask: bool (…, T), True at padding, which no query sees.
        """
        visible = _visible_keys(self, mask, padding_mask)
        return self._run(
            as_tensor(x),
            (self.norm1, lambda x: self.self_attn(x, mask=visible, causal=causal)),
            (self.norm2, self._transform),
        )


@dataclass(frozen=True, eq=False, init=False)
class TransformerDecoderLayer(_TransformerLayer):
    """A layer of a transformer's decoder: self-attention, attention to a memory, linear maps.

    Arguments as for `TransformerEncoderLayer`.
    """

    self_attn: MultiHeadAttention
    multihead_attn: MultiHeadAttention
    norm1: LayerNorm
    norm2: LayerNorm
    norm3: LayerNorm

    def __init__(
        self, size: int, heads: int, hidden: int = 2048, dropout: float = 0.1, *,
        activation: Activation = relu, epsilon: float = 1e-5, norm_first: bool = False,
        bias: bool = True, dtype: Any = "float32", name: str = "decoder_layer",
    ) -> None:  # fmt: skip
        require_sizes(self, size=size, hidden=hidden)
        with self.scope(name):
            self._build(
                size, heads, hidden, dropout, activation, epsilon, norm_first, bias, dtype,
                ("self_attn", "multihead_attn"),
            )  # fmt: skip

    def __call__(
        self, x: Any, memory: Any, *, mask: Any = None, memory_mask: Any = None,
        padding_mask: Any = None, memory_padding_mask: Any = None, causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Transform x (…, T, size), which attends to itself and to memory (…, S, size).

        Args:
            mask, padding_mask, causal: of x to itself, as for `TransformerEncoderLayer`.
            memory_mask, memory_padding_mask: of x to the memory.
        """
        memory = as_tensor(memory)
        own = _visible_keys(self, mask, padding_mask)
        other = _visible_keys(self, memory_mask, memory_padding_mask)
        return self._run(
            as_tensor(x),
            (self.norm1, lambda x: self.self_attn(x, mask=own, causal=causal)),
            (self.norm2, lambda x: self.multihead_attn(x, memory, mask=other)),
            (self.norm3, self._transform),
        )


@dataclass(frozen=True, eq=False, init=False)
class _Stack(Layer):
    """A stack of layers of a transformer.

    Args:
        size, heads, hidden, dropout: as for the layers.
        num_layers: number of layers.
        final_norm: end with a `LayerNorm`, as `norm_first` needs it.
        options: other arguments of the layers, by name.
    """

    layers: tuple[Any, ...]
    norm: LayerNorm | None

    def __init__(
        self, size: int, heads: int, num_layers: int = 6, hidden: int = 2048,
        dropout: float = 0.1, *, final_norm: bool = False, name: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        require_layers(self, num_layers)
        kind_of, default = self._layer()
        epsilon, bias, dtype = (
            options.get(key, value)
            for key, value in (("epsilon", 1e-5), ("bias", True), ("dtype", "float32"))
        )
        with self.scope(name or default):
            with name_scope("layers"):
                layers = tuple(
                    kind_of(size, heads, hidden, dropout, name=str(i), **options)
                    for i in range(num_layers)
                )
            norm = LayerNorm(size, epsilon, bias=bias, dtype=dtype, name="norm")
            set_attributes(self, layers=layers, norm=norm if final_norm else None)

    @staticmethod
    def _layer() -> tuple[Any, str]:
        raise NotImplementedError

    def __call__(self, x: Any, *others: Any, **options: Any) -> Tensor:
        """Run x through all layers, with the arguments of each."""
        x = as_tensor(x)
        for layer in self.layers:
            x = layer(x, *others, **options)
        return x if self.norm is None else self.norm(x)


class TransformerEncoder(_Stack):
    __doc__ = (_Stack.__doc__ or "").replace(
        "layers of a transformer", "`TransformerEncoderLayer`s", 1
    )

    @staticmethod
    def _layer() -> tuple[Any, str]:
        return TransformerEncoderLayer, "encoder"


class TransformerDecoder(_Stack):
    __doc__ = (_Stack.__doc__ or "").replace(
        "layers of a transformer", "`TransformerDecoderLayer`s", 1
    )

    @staticmethod
    def _layer() -> tuple[Any, str]:
        return TransformerDecoderLayer, "decoder"


@dataclass(frozen=True, eq=False, init=False)
class Transformer(Layer):
    """The encoder-decoder transformer.

    It maps sources (…, S, size) and targets (…, T, size) to (…, T, size). Embeddings, positions and
    the last linear map are yours. Both stacks end with a norm. As in torch, matrices are initially
    Glorot-uniform.

    Args:
        size, heads, hidden, dropout: as for `TransformerEncoderLayer`.
        num_encoder_layers, num_decoder_layers: number of layers of each stack.
        options: `activation`, `epsilon`, `norm_first`, `bias` and `dtype` of the layers.

    Source: Vaswani et al., NeurIPS 2017.
    """

    encoder: TransformerEncoder
    decoder: TransformerDecoder

    def __init__(
        self, size: int = 512, heads: int = 8, num_encoder_layers: int = 6,
        num_decoder_layers: int = 6, hidden: int = 2048, dropout: float = 0.1, *,
        name: str = "transformer", **options: Any,
    ) -> None:  # fmt: skip
        options |= {"hidden": hidden, "dropout": dropout, "final_norm": True}
        with self.scope(name):
            set_attributes(
                self,
                encoder=TransformerEncoder(size, heads, num_encoder_layers, **options),
                decoder=TransformerDecoder(size, heads, num_decoder_layers, **options),
            )
        for layer in (*self.encoder.layers, *self.decoder.layers):
            attentions = [a for a in vars(layer).values() if isinstance(a, MultiHeadAttention)]
            for linear in (layer.linear1, layer.linear2, *(a.out for a in attentions)):
                _begin_with_glorot(linear)

    def __call__(
        self, source: Any, target: Any, *, source_mask: Any = None, target_mask: Any = None,
        memory_mask: Any = None, source_padding_mask: Any = None,
        target_padding_mask: Any = None, memory_padding_mask: Any = None, causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Encode the source, and decode the target beside it.

        Args:
            source_mask, target_mask, memory_mask: as for `gf.nn.attention`: of the source to
                itself, of the target to itself, and of the target to the encoded source.
            source_padding_mask, target_padding_mask: bool (…, S) and (…, T), True at padding.
            memory_padding_mask: bool (…, S): what the target does not see of the encoded source.
                As in torch it has to be given beside `source_padding_mask`.
            causal: a target position sees no later one.
        """
        memory = self.encoder(source, mask=source_mask, padding_mask=source_padding_mask)
        return self.decoder(
            target, memory, mask=target_mask, memory_mask=memory_mask,
            padding_mask=target_padding_mask, memory_padding_mask=memory_padding_mask,
            causal=causal,
        )  # fmt: skip


def _begin_with_glorot(linear: Linear) -> None:
    """Replace the weight of a new linear map by a variable that is initially Glorot-uniform."""
    old = linear.weight
    shape = tuple(map(int, old.shape))
    with prefix_scope(linear._scope):
        set_attributes(linear, weight=parameter("weight", init.glorot(shape, old.dtype)))
