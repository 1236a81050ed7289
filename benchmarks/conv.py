"""Convolutions and their gradients in the input and the weight, against torch in one run.

    python benchmarks/conv.py [--rounds 40] [--output results/conv.json]

Both take arrays of numpy and hand their result back; each of the three is a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from peers import arguments, interleaved, optional, report, write

Steps = dict[str, Callable[[], object]]


class Case(NamedTuple):
    """x (batch, inputs, size, size), a square kernel."""

    name: str
    batch: int
    inputs: int
    outputs: int
    size: int
    kernel: int
    stride: int = 1
    groups: int = 1


CASES = (
    Case("3x3, 128 channels, 28x28", 8, 128, 128, 28, 3),
    Case("1x1, 128 channels, 28x28", 8, 128, 128, 28, 1),
    Case("3x3 depthwise, 128 channels, 28x28", 8, 128, 128, 28, 3, groups=128),
    Case("3x3 stride 2, 128 channels, 28x28", 8, 128, 128, 28, 3, stride=2),
    Case("3x3, 512 channels, 7x7", 8, 512, 512, 7, 3),
    Case("7x7 stride 2, 3 channels, 224x224", 4, 3, 64, 224, 7, stride=2),
)
PARTS = ("forward", "gradient in x", "gradient in the weight")


def arrays(case: Case) -> list[np.ndarray]:
    """x, the weight, a cotangent."""
    random = np.random.default_rng(0)
    out = (case.size + 2 * (case.kernel // 2) - case.kernel) // case.stride + 1
    shapes = (
        (case.batch, case.inputs, case.size, case.size),
        (case.outputs, case.inputs // case.groups, case.kernel, case.kernel),
        (case.batch, case.outputs, out, out),
    )
    return [random.normal(size=s).astype("float32") for s in shapes]


def graphflow_steps(case: Case) -> list[Callable[[], object]]:
    import graphflow as gf

    values = arrays(case)
    x, w, g = (gf.placeholder("float32", a.shape) for a in values)
    y = gf.nn.conv2d(x, w, None, case.stride, case.kernel // 2, 1, case.groups)
    gx, gw = gf.gradients(y, [x, w], g)
    session = gf.Session()
    feeds = dict(zip((x, w, g), values, strict=True))
    needed = ((y, (x, w)), (gx, (w, g)), (gw, (x, g)))
    return [lambda t=t, fed={p: feeds[p] for p in fed}: session.run(t, fed) for t, fed in needed]


def torch_steps(case: Case) -> list[Callable[[], object]]:
    import torch

    x, w, g = map(torch.from_numpy, arrays(case))
    how = ([case.stride] * 2, [case.kernel // 2] * 2, [1, 1])

    def backward(*mask: bool) -> object:
        grads = torch.ops.aten.convolution_backward(
            g, x, w, None, *how, False, [0, 0], case.groups, [*mask, False]
        )
        return next(t for t in grads if t is not None).numpy()

    return [
        lambda: torch.nn.functional.conv2d(x, w, None, *how, case.groups).numpy(),
        lambda: backward(True, False),
        lambda: backward(False, True),
    ]


def main() -> None:
    options = arguments("convolutions").parse_args()
    results = []
    for case in CASES:
        ours = graphflow_steps(case)
        for i, part in enumerate(PARTS):
            steps: Steps = {
                "graphflow": ours[i],
                **optional("torch", lambda case=case, i=i: torch_steps(case)[i]),
            }
            values = [np.asarray(step()) for step in steps.values()]
            for other in values[1:]:
                np.testing.assert_allclose(values[0], other, rtol=1e-3, atol=1e-2)
            seconds = interleaved(steps, options.rounds)
            results.append(report(f"{case.name}: {part}", seconds))
    write("conv", results, options.output)


if __name__ == "__main__":
    main()
