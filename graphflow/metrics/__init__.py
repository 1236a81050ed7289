"""Metrics: what a model's predictions are worth, over batches of any sizes.

    accuracy = gf.metrics.accuracy(logits, labels)
    gf.metrics.evaluate(session, {"accuracy": accuracy}, batches)

A metric is a few sums, computed in the graph for each batch, and a ratio of their totals at the
end. So a last batch that is smaller, or shards of several sizes, change no digit of the result.
"""

from graphflow.metrics.classification import (
    accuracy,
    confusion_matrix,
    f1,
    precision,
    recall,
    top_k,
)
from graphflow.metrics.metric import Metric, evaluate
from graphflow.metrics.ranking import auc
from graphflow.metrics.regression import mae, mean, mse, perplexity, r2

__all__ = [
    "Metric", "accuracy", "auc", "confusion_matrix", "evaluate", "f1", "mae", "mean", "mse",
    "perplexity", "precision", "r2", "recall", "top_k",
]  # fmt: skip
