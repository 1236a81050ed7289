"""Optimisers, schedules, gradient clipping and loss scaling: the names of `gf.optim`."""

from graphflow.optim import schedules
from graphflow.optim.accumulation import Accumulate
from graphflow.optim.delay_compensated import DelayCompensated
from graphflow.optim.emso import Emso
from graphflow.optim.gradient_clipping import clip_by_global_norm, clip_by_norm, clip_by_value
from graphflow.optim.loss_scaling import LossScaling
from graphflow.optim.moving_averages import MovingAverage, apply_averages
from graphflow.optim.optimizer_base import Optimizer
from graphflow.optim.parameter_groups import Groups
from graphflow.optim.rules.adafactor import Adafactor
from graphflow.optim.rules.adagrad import Adadelta, Adagrad, RMSProp, RowwiseAdagrad
from graphflow.optim.rules.adam import Adam, AdamW, NAdam, RAdam
from graphflow.optim.rules.layerwise import LAMB, LARS
from graphflow.optim.rules.lbfgs import LBFGS
from graphflow.optim.rules.muon import Muon
from graphflow.optim.rules.sgd import SGD, Lion
from graphflow.optim.schedules import RateSchedule
from graphflow.optim.update_targets import Rate, Target

__all__ = [
    "LAMB", "LARS", "LBFGS", "SGD", "Accumulate", "Adadelta", "Adafactor", "Adagrad", "Adam",
    "AdamW", "DelayCompensated", "Emso", "Groups", "Lion", "LossScaling", "MovingAverage", "Muon",
    "NAdam", "Optimizer", "RAdam", "RMSProp", "Rate", "RowwiseAdagrad", "RateSchedule", "Target",
    "apply_averages", "clip_by_global_norm", "clip_by_norm", "clip_by_value", "schedules",
]  # fmt: skip
