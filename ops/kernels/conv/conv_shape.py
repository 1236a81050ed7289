"""The properties of a convolution that its kernel is chosen by."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.windows.window_arguments import Ints, Windows

Target = Literal["y", "x", "w"]
"""The array that is computed: the result, or the gradient in the input or in the weight."""


class ConvShape(NamedTuple):
    """The properties of a convolution that its kernel is chosen by.

    Attributes:
        images, inputs, outputs: size of the batch, and channels of x and y, of all groups.
        space: the spatial axes of x; those of y are `windows.out`.
        exact: whether Winograd, whose sums lose about a digit, is ruled out.
    """

    xp: Any
    dtype: np.dtype[Any]
    images: int
    inputs: int
    outputs: int
    space: Ints
    windows: Windows
    groups: int
    exact: bool = False

    @property
    def is_native(self) -> bool:
        """Whether generated kernels may compute it: on a CPU, in float32."""
        return self.xp is np and self.dtype == np.float32 and is_jit_enabled()

    @property
    def group_inputs(self) -> int:
        return self.inputs // self.groups

    @property
    def group_outputs(self) -> int:
        return self.outputs // self.groups

    @property
    def has_unit_stride(self) -> bool:
        return set(self.windows.stride) == {1}

    @property
    def transposed(self) -> Windows:
        """The windows, turned round, that the gradient in the input slides over the cotangent."""
        w = self.windows
        axes = zip(w.kernel, w.dilation, w.before, strict=True)
        return w._replace(before=tuple((k - 1) * d - b for k, d, b in axes), out=self.space)
