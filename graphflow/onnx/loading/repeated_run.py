"""The fast path of a model's runs whose inputs are like those of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.ir.op import Tensor
from graphflow.sessions.session import Session


class RepeatedRun:
    """Runs a model that is one graph, for inputs of the dtypes and shapes of an earlier run.

    Args:
        inputs: the placeholder of each input that the run fed, by name.
        values: the arrays of these inputs.
        outputs: the tensor of each output, by name.
    """

    def __init__(
        self, inputs: Mapping[str, Tensor], values: Mapping[str, Any], outputs: Mapping[str, Tensor]
    ) -> None:
        self._inputs = [(n, t, values[n].dtype, values[n].shape) for n, t in inputs.items()]
        self._names = tuple(outputs)
        self._fetches = list(outputs.values())

    def run(
        self, given: Mapping[str, Any] | Sequence[Any], session: Session
    ) -> dict[str, Any] | None:
        """Return the outputs by name; None if the inputs are not like those of the earlier run."""
        if type(given) is not dict or len(given) != len(self._inputs):
            return None
        feeds = {}
        for name, tensor, dtype, shape in self._inputs:
            value = given.get(name)
            if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                return None
            feeds[tensor] = value
        return dict(zip(self._names, session.run(self._fetches, feeds), strict=True))
