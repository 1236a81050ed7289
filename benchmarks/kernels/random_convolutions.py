"""Convolutions drawn from a seed, in sessions, by turns with torch and onnxruntime.

Shapes that nobody chose show where a kernel is missing. `benchmarks/kernels/conv.py --random` runs
them. A case is drawn from its seed and number alone, so a slow one can be measured by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from peers import Steps, optional
from step_timing import time_by_turns

PARTS = ("forward", "gradient in x", "gradient in the weight")
KINDS = (
    "plain", "few channels", "pointwise", "large kernel", "strided", "dilated", "grouped",
    "depthwise", "one axis", "three axes", "asymmetric", "transposed",
)  # fmt: skip
LEAST_PRODUCTS, MOST_PRODUCTS = 2e5, 2e8
MOST_ELEMENTS = 1 << 22
Ints = tuple[int, ...]


class RandomCase(NamedTuple):
    """A convolution; `padding` holds pairs, weights are (outputs, inputs of a group, *kernel).

    If `transposed`, the convolution's adjoint in x is the forward step, from `outputs` channels.
    """

    kind: str
    batch: int
    inputs: int
    outputs: int
    space: Ints
    kernel: Ints
    stride: Ints
    padding: tuple[tuple[int, int], ...]
    dilation: Ints
    groups: int
    transposed: bool

    @property
    def positions(self) -> Ints:
        axes = zip(self.space, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + sum(p) - (k - 1) * d - 1) // s + 1 for n, k, s, p, d in axes)

    @property
    def output_padding(self) -> list[int]:
        """Elements of x behind the last window: a transposed convolution has to be told."""
        axes = zip(
            self.positions, self.kernel, self.stride, self.padding, self.dilation, self.space,
            strict=True,
        )  # fmt: skip
        return [n - ((o - 1) * s - sum(p) + (k - 1) * d + 1) for o, k, s, p, d, n in axes]

    @property
    def shapes(self) -> tuple[Ints, Ints, Ints]:
        """The shapes of x, of the weight and of the result, as the forward step has them."""
        x = self.batch, self.inputs, *self.space
        w = self.outputs, self.inputs // self.groups, *self.kernel
        y = self.batch, self.outputs, *self.positions
        return (y, w, x) if self.transposed else (x, w, y)

    @property
    def products(self) -> int:
        count = self.inputs // self.groups * math.prod(self.kernel)
        return self.batch * self.outputs * math.prod(self.positions) * count

    def is_measurable(self) -> bool:
        """Return whether there is enough to time, and not too much."""
        return (
            min(self.positions) >= 1
            and LEAST_PRODUCTS <= self.products <= MOST_PRODUCTS
            and all(math.prod(shape) <= MOST_ELEMENTS for shape in self.shapes)
        )

    def __str__(self) -> str:
        def sizes(values: Any) -> str:
            return "x".join(map(str, values))

        text = f"{self.kind:<12} {self.batch}·{self.inputs}->{self.outputs} {sizes(self.space)}"
        text += f" by {sizes(self.kernel)}"
        for name, values in (("/", self.stride), ("dilated ", self.dilation)):
            text += f" {name}{sizes(values)}" * (set(values) != {1})
        text += f" groups {self.groups}" * (self.groups > 1)
        return text + f" padded {sizes(f'{a}+{b}' for a, b in self.padding)}" * any(
            map(any, self.padding)
        )


def draw_case(seed: int, number: int) -> RandomCase:
    """Draw a case; its kind goes round with the number."""
    random = np.random.default_rng([seed, number])
    while True:
        case = _draw(KINDS[number % len(KINDS)], random)
        if case.is_measurable():
            return case


def _draw(kind: str, random: np.random.Generator) -> RandomCase:
    def between(low: int, high: int) -> int:
        return round(math.exp(random.uniform(math.log(low), math.log(high))))

    def channels() -> int:
        count = between(1, 12) if kind == "few channels" else between(3, 512)
        return -(-count // 8) * 8 if kind != "few channels" and random.random() < 0.6 else count

    rank = {"one axis": 1, "three axes": 3}.get(kind, 2)
    longest = {1: 4096, 2: 128, 3: 28}[rank]
    size = between(4, longest)
    space = tuple(size if random.random() < 0.7 else between(4, longest) for _ in range(rank))
    kernel = (int(random.choice((3, 3, 5, 2, 4, 7))),) * rank
    if kind == "pointwise":
        kernel = (1,) * rank
    elif kind == "large kernel":
        kernel = tuple(int(random.integers(7, 16)) for _ in range(rank))
    elif kind == "one axis":
        kernel = (between(2, 64),)
    stride, dilation = (1,) * rank, (1,) * rank
    if kind == "strided" or (kind in ("pointwise", "transposed") and random.random() < 0.5):
        stride = (int(random.integers(2, 5)),) * rank
    elif rank != 2 or kind in ("depthwise", "grouped", "asymmetric"):
        stride = (int(random.choice((1, 1, 2))),) * rank
    if kind == "dilated":
        dilation = tuple(int(random.integers(2, 9)) for _ in range(rank))
    inputs, outputs, groups = channels(), channels(), 1
    if kind == "depthwise":
        groups, outputs = inputs, inputs * int(random.choice((1, 1, 1, 2)))
    elif kind == "grouped":
        groups = int(random.integers(2, 33))
        inputs, outputs = (groups * between(2, 32) for _ in range(2))
    spans = tuple((k - 1) * d for k, d in zip(kernel, dilation, strict=True))
    padding = tuple((s // 2, s // 2) if random.random() < 0.8 else (0, 0) for s in spans)
    if kind == "asymmetric":
        padding = tuple((int(a), int(b)) for a, b in random.integers(0, kernel[0], (rank, 2)))
    batch = 1 if random.random() < 0.5 else between(2, 32)
    return RandomCase(
        kind, batch, inputs, outputs, space, kernel, stride, padding, dilation, groups,
        kind == "transposed",
    )  # fmt: skip


def arrays(case: RandomCase) -> list[np.ndarray]:
    """x, the weight, and a cotangent of the result."""
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype("float32") for shape in case.shapes]


# Contenders ---------------------------------------------------------------------------------------


@contextmanager
def graphflow_steps(case: RandomCase, threads: int) -> Iterator[list[Callable[[], Any]]]:
    """Yield the three steps of a session."""
    import graphflow as gf

    x, w, g = arrays(case)
    given, cotangent = (gf.placeholder("float32", a.shape) for a in (x, g))
    weight = gf.variable(w)
    attrs: dict[str, Any] = {
        "stride": case.stride, "padding": case.padding, "dilation": case.dilation,
        "groups": case.groups,
    }  # fmt: skip
    if case.transposed:
        y = gf.nn.conv_transpose(given, weight, output_size=case.space, **attrs)
    else:
        y = gf.nn.conv(given, weight, **attrs)
    in_x, in_weight = gf.gradients(y, [given, weight], cotangent)
    with gf.Session(gf.Cluster.here(threads=threads)) as s:
        yield [
            lambda: s.run(y, {given: x}),
            lambda: s.run(in_x, {cotangent: g}),
            lambda: s.run(in_weight, {given: x, cotangent: g}),
        ]


def torch_steps(case: RandomCase) -> list[Callable[[], Any]]:
    """Return the three steps; asymmetric padding is a step of its own there."""
    import torch

    x, w, g = map(torch.from_numpy, arrays(case))
    equal = all(a == b for a, b in case.padding)
    around = [0 if equal else n for pair in case.padding[::-1] for n in pair]
    padding = [a if equal else 0 for a, _ in case.padding]
    extra = case.output_padding if case.transposed else [0] * len(case.space)

    def padded() -> torch.Tensor:
        return x if equal else torch.nn.functional.pad(x, around)

    how = (list(case.stride), padding, list(case.dilation), case.transposed, extra, case.groups)

    def backward(*mask: bool) -> Any:
        both = torch.ops.aten.convolution_backward(g, padded(), w, None, *how, [*mask, False])
        found = next(t for t in both if t is not None)
        if mask[0] and not equal:
            for axis, (before, _) in enumerate(case.padding):
                found = found.narrow(axis + 2, before, case.space[axis])
        return found.numpy()

    return [
        lambda: torch.convolution(padded(), w, None, *how).numpy(),
        lambda: backward(True, False),
        lambda: backward(False, True),
    ]


def onnxruntime_step(case: RandomCase, threads: int) -> Callable[[], Any]:
    """Return the forward step; onnxruntime packs the weight when it loads the model."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    x, w, y = arrays(case)
    more = {"output_padding": case.output_padding} if case.transposed else {}
    node = helper.make_node(
        "ConvTranspose" if case.transposed else "Conv", ["x", "w"], ["y"],
        kernel_shape=case.kernel, strides=case.stride, dilations=case.dilation, group=case.groups,
        pads=[*(a for a, _ in case.padding), *(b for _, b in case.padding)], **more,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "conv",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y.shape)],
        [numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    peer = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: peer.run(None, {"x": x})[0]


# Runs ---------------------------------------------------------------------------------------------


def measure(
    seed: int, number: int, parts: list[str], threads: int, rounds: int
) -> list[dict[str, Any]]:
    """Time some steps of a case by turns and print a line for each."""
    case = draw_case(seed, number)
    results = []
    with graphflow_steps(case, threads) as ours:
        for part in parts:
            i = PARTS.index(part)
            steps: Steps = {
                "graphflow": ours[i],
                **optional("torch", lambda i=i: torch_steps(case)[i]),
            }
            if i == 0:
                steps |= optional("onnxruntime", lambda: onnxruntime_step(case, threads))
            values = [np.asarray(step()) for step in steps.values()]
            for other in values[1:]:
                np.testing.assert_allclose(
                    values[0], other, rtol=0, atol=2e-5 * np.abs(other).max(), err_msg=str(case)
                )
            for step in steps.values():
                step()
            times = time_by_turns(steps, rounds, limit=0.2)
            seconds = {name: time.seconds for name, time in times.items()}
            ratios = {n: seconds["graphflow"] / t for n, t in seconds.items() if n != "graphflow"}
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            print(f"{number:>4} {case}: {part} {seconds['graphflow'] * 1e3:.3f} ms, over {shown}")
            results.append(
                {"number": number, "kind": case.kind, "title": str(case), "part": part,
                 "median_seconds": seconds, "ratios": ratios}
            )  # fmt: skip
    return results


def summarize(results: list[dict[str, Any]]) -> None:
    """Print the distribution of our ratios to each peer: of each part, and of each kind."""
    for part in PARTS:
        some = [r for r in results if r["part"] == part]
        for peer in sorted({name for r in some for name in r["ratios"]}):
            print(f"\n{part}, graphflow / {peer}: number, median, 90 %, worst")
            for kind in ("all", *KINDS):
                ratios = [r["ratios"][peer] for r in some if kind in ("all", r["kind"])]
                if ratios:
                    middle, high = np.quantile(ratios, (0.5, 0.9))
                    print(
                        f"  {kind:<14} {len(ratios):>4} {middle:.2f} {high:.2f} {max(ratios):.2f}"
                    )
