"""Functions and layers of neural networks, public as `gf.nn`."""

from __future__ import annotations

from typing import NoReturn

from graphflow.ir.name_hints import missing_attribute_error
from graphflow.ops.attention.attention_op import attention
from graphflow.ops.images.adaptive_pooling import (
    adaptive_avg_pool,
    adaptive_max_pool,
    global_avg_pool,
    global_lp_pool,
    global_max_pool,
    max_unpool,
)
from graphflow.ops.images.deformable_conv import deform_conv
from graphflow.ops.images.grid_sample import affine_grid, grid_sample
from graphflow.ops.images.nms import non_max_suppression
from graphflow.ops.images.pixel_ops import (
    depth_to_space,
    local_response_norm,
    pixel_shuffle,
    pixel_unshuffle,
    space_to_depth,
)
from graphflow.ops.images.resize import interpolate, resize
from graphflow.ops.images.roi import roi_align
from graphflow.ops.networks.batch_norm import batch_norm
from graphflow.ops.networks.class_losses import cross_entropy, nll_loss
from graphflow.ops.networks.dropout import dropout
from graphflow.ops.networks.layers.basic_layers import (
    BatchNorm,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Dropout,
    Embedding,
    GroupNorm,
    LayerNorm,
    Linear,
    RMSNorm,
    Sequential,
)
from graphflow.ops.networks.layers.layer_base import Layer
from graphflow.ops.networks.layers.layers_attention import MultiHeadAttention, TransformerBlock
from graphflow.ops.networks.layers.layers_conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from graphflow.ops.networks.layers.layers_recurrent import (
    GRU,
    LSTM,
    RNN,
    GRUCell,
    LSTMCell,
    RNNCell,
)
from graphflow.ops.networks.losses import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cosine_similarity,
    hinge_embedding_loss,
    huber_loss,
    kl_div,
    l1_loss,
    margin_ranking_loss,
    mse_loss,
    smooth_l1_loss,
    triplet_margin_loss,
)
from graphflow.ops.networks.norm import group_norm, instance_norm, layer_norm, rms_norm
from graphflow.ops.networks.piecewise_activations import (
    hard_shrink,
    hard_sigmoid,
    hard_swish,
    hard_tanh,
    hardmax,
    prelu,
    relu6,
    shrink,
    soft_shrink,
    thresholded_relu,
)
from graphflow.ops.networks.recurrent import gru, lstm, rnn
from graphflow.ops.networks.rotary import rotary, rotate
from graphflow.ops.networks.training_mode import training
from graphflow.ops.pointwise.activations import (
    gelu,
    glu,
    log_sigmoid,
    mish,
    sigmoid,
    silu,
    softplus,
    softsign,
    swiglu,
    swish,
)
from graphflow.ops.pointwise.rectifiers import celu, elu, leaky_relu, relu, selu
from graphflow.ops.pointwise.transcendental import tanh
from graphflow.ops.reductions.softmax import log_softmax, softmax
from graphflow.ops.tables.embedding_bag import EmbeddingBag, embedding_bag
from graphflow.ops.tables.hash_table import HashTable
from graphflow.ops.tensors.embedding import embedding
from graphflow.ops.windows.conv import (
    conv,
    conv1d,
    conv2d,
    conv3d,
    conv_transpose,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from graphflow.ops.windows.pool import (
    avg_pool,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    lp_pool,
    lp_pool1d,
    lp_pool2d,
    lp_pool3d,
    max_pool,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)
from graphflow.ops.windows.unfold import fold, unfold


def __getattr__(name: str) -> NoReturn:
    raise missing_attribute_error(__name__, name)


__all__ = [
    "BatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Conv1d", "Conv2d", "Conv3d",
    "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Dropout", "Embedding", "EmbeddingBag",
    "GRU", "GRUCell", "GroupNorm", "HashTable", "LSTM", "LSTMCell", "Layer", "LayerNorm", "Linear",
    "MultiHeadAttention", "RMSNorm", "RNN", "RNNCell", "Sequential", "TransformerBlock",
    "adaptive_avg_pool", "adaptive_max_pool", "affine_grid", "attention", "avg_pool", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "batch_norm", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "celu", "conv", "conv1d", "conv2d", "conv3d",
    "conv_transpose", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "cosine_similarity", "cross_entropy", "deform_conv", "depth_to_space", "dropout", "elu",
    "embedding", "embedding_bag", "fold", "gelu", "global_avg_pool", "global_lp_pool",
    "global_max_pool", "glu", "grid_sample", "group_norm", "gru", "hard_shrink", "hard_sigmoid",
    "hard_swish", "hard_tanh", "hardmax", "hinge_embedding_loss", "huber_loss", "instance_norm",
    "interpolate", "kl_div", "l1_loss", "layer_norm", "leaky_relu", "local_response_norm",
    "log_sigmoid", "log_softmax", "lp_pool", "lp_pool1d", "lp_pool2d", "lp_pool3d", "lstm",
    "margin_ranking_loss", "max_pool", "max_pool1d", "max_pool2d", "max_pool3d", "max_unpool",
    "mish", "mse_loss", "nll_loss", "non_max_suppression", "pixel_shuffle", "pixel_unshuffle",
    "prelu", "relu", "relu6", "resize", "rms_norm", "rnn", "roi_align", "rotary", "rotate", "selu",
    "shrink", "sigmoid", "silu", "smooth_l1_loss", "soft_shrink", "softmax", "softplus", "softsign",
    "space_to_depth", "swiglu", "swish", "tanh", "thresholded_relu", "training",
    "triplet_margin_loss", "unfold",
]  # fmt: skip
