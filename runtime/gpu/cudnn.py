"""cuDNN through cudnn-frontend: a handle for each GPU, and graphs that run one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from graphflow.ir.spec import TensorSpec

_IMPRECISE_NOTES = (
    "TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD",
    "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13",
)  # fmt: skip
"""Notes of engines, such as TF32, that lose more of float32 than another order of sums would."""


class Cudnn:
    """A cuDNN handle on a stream of the current GPU.

    Args:
        stream: address of the CUDA stream.

    Raises:
        Exception: cuDNN is missing, or refuses.
    """

    def __init__(self, stream: int) -> None:
        import cudnn

        self.handle = cudnn.create_handle()
        cudnn.set_stream(self.handle, stream)

    def close(self) -> None:
        """Destroy the handle."""
        import cudnn

        cudnn.destroy_handle(self.handle)


class CudnnGraph:
    """An operation graph of cuDNN over contiguous arrays: built once, run with any addresses.

    Engines that are not deterministic are refused, and for float32 those that round more than
    float32 does, so that results do not depend on cuDNN's choice of an engine.

    Args:
        backend: the `GpuBackend` to run on.
        specs: the inputs.
        results: shape and dtype of each output.
        node: (graph, *input tensors) -> output tensors.
    """

    def __init__(
        self,
        backend: Any,
        specs: Sequence[TensorSpec],
        results: Sequence[tuple[tuple[int, ...], np.dtype[Any]]],
        node: Callable[..., Sequence[Any]],
    ) -> None:
        import cudnn

        self._backend = backend
        dtypes = cudnn.data_type
        kinds = {
            "float16": dtypes.HALF, "bfloat16": dtypes.BFLOAT16, "float32": dtypes.FLOAT,
        }  # fmt: skip
        with backend.active():
            self._handle = backend.cudnn.handle
            self._graph = graph = cudnn.pygraph(
                io_data_type=kinds[specs[0].dtype.name],
                intermediate_data_type=dtypes.FLOAT,
                compute_data_type=dtypes.FLOAT,
                handle=self._handle,
            )
            self._inputs = [
                graph.tensor(
                    dim=list(concrete_shape(s)), stride=_row_major(concrete_shape(s)),
                    data_type=kinds[s.dtype.name], name=f"in{i}",
                )
                for i, s in enumerate(specs)
            ]  # fmt: skip
            self._outputs = list(node(graph, *self._inputs))
            for tensor, (shape, dtype) in zip(self._outputs, results, strict=True):
                tensor.set_output(True).set_dim(list(shape)).set_stride(_row_major(shape))
                tensor.set_data_type(kinds[dtype.name])
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            notes, refused = cudnn.numerical_note, ["NONDETERMINISTIC"]
            if specs[0].dtype == np.float32:
                refused += _IMPRECISE_NOTES
            graph.deselect_numeric_notes([getattr(notes, n) for n in refused if hasattr(notes, n)])
            graph.check_support()
            graph.build_plans()
            self._workspace = backend.empty(max(int(graph.get_workspace_size()), 1))

    def __call__(self, out: Any, *arrays: Any) -> None:
        outs = out if isinstance(out, tuple) else (out,)
        places = dict(
            zip(
                (*self._inputs, *self._outputs),
                (int(array.data.ptr) for array in (*arrays, *outs)),
                strict=True,
            )
        )
        self._graph.execute(places, int(self._workspace.data.ptr), handle=self._handle)


def concrete_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return a spec's shape, in which all sizes are numbers."""
    return spec.shape  # type: ignore[return-value]


def _row_major(shape: Sequence[int]) -> list[int]:
    """Return the strides, in elements, of a contiguous array."""
    return [prod(shape[i + 1 :]) for i in range(len(shape))]
