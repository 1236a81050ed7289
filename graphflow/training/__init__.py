"""Training loops: `gf.fit` and what it tells, stops by and writes.

`gf.fit` does nothing that a loop over `session.run` could not.
"""

from graphflow.training.callbacks import CsvLog, EarlyStopping, JsonLog, TensorBoard
from graphflow.training.fit import TrainingRun, fit
from graphflow.training.one_batch import TrainingCheck, check_training
from graphflow.training.training_history import TrainingHistory

__all__ = [
    "CsvLog", "EarlyStopping", "JsonLog", "TensorBoard", "TrainingCheck", "TrainingHistory",
    "TrainingRun", "check_training", "fit",
]  # fmt: skip
