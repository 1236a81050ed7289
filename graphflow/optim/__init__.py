"""Optimisers, gradient clipping and loss scaling: the names of `gf.optim`."""

from graphflow.optim.delay_compensated import DelayCompensated
from graphflow.optim.emso import Emso
from graphflow.optim.gradient_clipping import clip_by_global_norm
from graphflow.optim.loss_scaling import LossScaling
from graphflow.optim.optimizer_base import Optimizer
from graphflow.optim.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RMSProp,
    RowwiseAdagrad,
)
from graphflow.optim.update_targets import Rate, Target

__all__ = [
    "SGD", "Adagrad", "Adam", "AdamW", "DelayCompensated", "Emso", "LossScaling", "Optimizer",
    "RMSProp", "Rate", "RowwiseAdagrad", "Target", "clip_by_global_norm",
]  # fmt: skip
