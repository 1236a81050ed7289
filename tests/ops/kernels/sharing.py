"""What tests of kernels share: a convolution and its gradients; the same bits by any threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.conv.conv_shape import ConvShape
from graphflow.ops.kernels.conv.kernel_table import choose
from graphflow.ops.kernels.gemm.gemm import is_supported
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.ops.windows.window_arguments import Windows

Array = np.ndarray[Any, Any]
HAS_PRODUCTS = is_supported("float32")
"""Whether matrix products are generated here. BLAS computes them where registers hold four lanes,
so kernels of convolutions that consist of generated products are not chosen."""


def three(x: Array, w: Array, g: Array, attrs: dict[str, Any]) -> list[Array]:
    """The convolution, its gradient in x for a cotangent, and that in w."""
    return [
        REGISTRY["conv"].run(np, [x, w], attrs)[0],
        REGISTRY["conv_transpose"].run(np, [g, w], {**attrs, "sizes": x.shape[2:]})[0],
        REGISTRY["conv_weight_grad"].run(np, [x, g], {**attrs, "kernel": w.shape[2:]})[0],
    ]


def check_threads(compute: Callable[[], Sequence[Array]], alone: Sequence[Array]) -> None:
    """What is computed by 2 and 3 threads has the bits of what one computed `alone`."""
    for threads in (2, 3):
        pool = Pool(threads)
        with use_pool(pool):
            shared = compute()
        pool.close()
        assert [a.tobytes() for a in shared] == [a.tobytes() for a in alone], threads


def chosen_kernel(x: Any, outputs: int, windows: Windows, groups: int = 1) -> str:
    """The name of the kernel that convolves an array."""
    images, inputs, *space = x.shape
    shape = ConvShape(np, x.dtype, images, inputs, outputs, tuple(space), windows, groups)
    return choose(shape, "y").name
