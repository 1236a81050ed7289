"""Convolutions and their gradients in the input and the weight, kernel against kernel.

    python benchmarks/kernels/conv.py [--threads 1] [--rounds 10] [--output results/conv.json]
    python benchmarks/kernels/conv.py --random 120 [--seed 0] [--parts forward …] [--numbers 3 …]

The layers of ResNet-18 on images of 32×32, and others. torch (oneDNN) runs in its own layout and in
channels_last, with its arrays in that layout already; JAX is compiled. Ours are (batch, channels,
height, width) and what a session runs, without the session. Drawn convolutions (--random) run in
sessions. Results must agree first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import Steps, arguments, interleaved, optional, pinned, report, write
from random_convolutions import PARTS, measure, summarize

GOAL = 0.8  # for 3×3 windows over 64 channels and more


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

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def goal(self) -> float | None:
        wide = self.groups == 1 and min(self.inputs, self.outputs) >= 64
        return GOAL if wide and self.kernel == 3 and self.stride == 1 else None


def _resnet(batch: int) -> list[Case]:
    sizes = ((64, 32), (128, 16), (256, 8), (512, 4))
    plain = [Case(f"3x3, {c}, {n}x{n}, batch {batch}", batch, c, c, n, 3) for c, n in sizes]
    return plain + [
        Case(
            f"3x3 /2, {c // 2}->{c}, {2 * n}x{2 * n}, batch {batch}", batch, c // 2, c, 2 * n, 3, 2
        )
        for c, n in sizes[1:]
    ]


CASES = (
    Case("3x3, 3->64, 32x32, batch 16", 16, 3, 64, 32, 3),
    *_resnet(16),
    *_resnet(32),
    Case("1x1 /2, 128->256, 16x16, batch 16", 16, 128, 256, 16, 1, 2),
    Case("1x1, 128, 28x28, batch 8", 8, 128, 128, 28, 1),
    Case("3x3, 128, 28x28, batch 8", 8, 128, 128, 28, 3),
    Case("3x3, 512, 7x7, batch 8", 8, 512, 512, 7, 3),
    Case("3x3 depthwise, 128, 28x28, batch 8", 8, 128, 128, 28, 3, groups=128),
    Case("5x5, 6->16, 14x14, batch 64", 64, 6, 16, 14, 5),
)


def arrays(case: Case) -> list[np.ndarray]:
    """x, the weight, a cotangent."""
    random = np.random.default_rng(0)
    out = (case.size + 2 * case.padding - case.kernel) // case.stride + 1
    shapes = (
        (case.batch, case.inputs, case.size, case.size),
        (case.outputs, case.inputs // case.groups, case.kernel, case.kernel),
        (case.batch, case.outputs, out, out),
    )
    return [random.normal(size=s).astype("float32") for s in shapes]


def graphflow_steps(case: Case, threads: int) -> list[Callable[[], object]]:
    import graphflow.ops  # noqa: F401 - fills the registry
    from graphflow.op import REGISTRY
    from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool

    x, w, g = arrays(case)
    pool = Pool(threads)
    attrs: dict[str, Any] = {
        "stride": (case.stride,) * 2, "padding": ((case.padding,) * 2,) * 2, "dilation": (1, 1),
        "groups": case.groups,
    }  # fmt: skip

    def step(name: str, like: np.ndarray, *given: np.ndarray, **more: Any) -> Callable[[], object]:
        into, out = REGISTRY[name].into, np.empty_like(like)
        assert into is not None

        def run() -> object:
            with use_pool(pool):
                into(np, out, *given, **attrs, **more)
            return out

        return run

    return [
        step("conv", g, x, w),
        step("conv_transpose", x, g, w, sizes=x.shape[2:]),
        step("conv_weight_grad", w, x, g, kernel=w.shape[2:]),
    ]


def torch_steps(case: Case, channels_last: bool) -> list[Callable[[], object]]:
    import torch

    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, w, g = (torch.from_numpy(a).to(memory_format=layout) for a in arrays(case))
    how = ([case.stride] * 2, [case.padding] * 2, [1, 1])

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


def jax_steps(case: Case) -> list[Callable[[], object]]:
    import jax

    x, w, g = map(jax.numpy.asarray, arrays(case))

    def conv(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, w, (case.stride,) * 2, [(case.padding,) * 2] * 2,
            feature_group_count=case.groups, dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )  # fmt: skip

    forward = jax.jit(conv)
    in_x = jax.jit(lambda w, g: jax.vjp(lambda x: conv(x, w), x)[1](g)[0])
    in_w = jax.jit(lambda x, g: jax.vjp(lambda w: conv(x, w), w)[1](g)[0])
    return [
        lambda: forward(x, w).block_until_ready(),
        lambda: in_x(w, g).block_until_ready(),
        lambda: in_w(x, g).block_until_ready(),
    ]


def main() -> None:
    parser = arguments("convolutions")
    parser.add_argument("--threads", type=int, default=1, help="processors for each contender")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="draw N convolutions")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn convolutions")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="of drawn ones")
    parser.add_argument("--numbers", nargs="*", type=int, help="measure these drawn ones only")
    parser.set_defaults(rounds=10)
    options = parser.parse_args()
    pinned(options.threads)
    if options.random or options.numbers:
        numbers = options.numbers or range(options.random)
        drawn = [
            result
            for number in numbers
            for result in measure(
                options.seed, number, options.parts, options.threads, options.rounds
            )
        ]
        summarize(drawn)
        write("conv_random", drawn, options.output)
        return
    results = []
    for case in CASES:
        ours = graphflow_steps(case, options.threads)
        for i, part in enumerate(PARTS):
            steps: Steps = {
                "graphflow": ours[i],
                **optional("torch", lambda case=case, i=i: torch_steps(case, False)[i]),
                **optional("channels last", lambda case=case, i=i: torch_steps(case, True)[i]),
                **optional("jax", lambda case=case, i=i: jax_steps(case)[i]),
            }
            values = [np.asarray(step()) for step in steps.values()]
            for other in values[1:]:
                largest = np.abs(other).max()
                np.testing.assert_allclose(values[0], other, rtol=0, atol=1e-5 * largest)
            seconds = interleaved(steps, options.rounds, each=3)
            results.append(report(f"{case.name}: {part}", seconds, goal=case.goal))
    write("conv", results, options.output)


if __name__ == "__main__":
    main()
