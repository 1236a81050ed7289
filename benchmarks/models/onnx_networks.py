"""Whole networks by ONNX: gf.onnx against onnxruntime and torch, inference of one image.

    python benchmarks/models/onnx_networks.py [--threads 1] [--only resnet18 … | --all]

The networks are torchvision's, a U-Net, and transformers over ids whose batch and length are
dynamic, with random weights; torch.onnx exports them. A support vector machine of ai.onnx.ml, which
torch cannot run, has random vectors. Results must agree first.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import arguments, pinned, report, write
from step_timing import time_by_turns

GOAL = 1.2
WITHOUT_WEIGHTS = {"weights": None, "weights_backbone": None}
VISION = ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "vit_b_16")
MORE_VISION = (
    "squeezenet1_1", "shufflenet_v2_x1_0", "mnasnet1_0", "mobilenet_v2", "densenet121", "googlenet",
    "inception_v3", "regnet_y_400mf", "convnext_tiny", "swin_t", "vgg11", "resnext50_32x4d",
    "resnet50", "efficientnet_v2_s", "maxvit_t",
)  # fmt: skip
SEGMENTATION = {"deeplabv3_mobilenet": "deeplabv3_mobilenet_v3_large"}
MORE_SEGMENTATION = {"fcn_resnet50": "fcn_resnet50", "lraspp": "lraspp_mobilenet_v3_large"}
TEXTS = ("encoder", "decoder")
NAMES = (*VISION, *SEGMENTATION, "unet", "svm")
MORE_NAMES = (*MORE_VISION, *MORE_SEGMENTATION, *TEXTS)
LENGTH, VOCABULARY = 128, 1000


def unet(depth: int = 4, width: int = 16) -> Any:
    """A U-Net for images of three channels."""
    import torch
    from torch import nn

    def double(inputs: int, outputs: int) -> nn.Module:
        def one(inputs: int) -> list[nn.Module]:
            plain = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            return [plain, nn.BatchNorm2d(outputs), nn.ReLU()]

        return nn.Sequential(*one(inputs), *one(outputs))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [width << i for i in range(depth + 1)]
            self.down = nn.ModuleList(map(double, [3, *widths[:-1]], widths))
            pairs = list(zip(widths[1:], widths, strict=False))[::-1]
            self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
            self.join = nn.ModuleList(double(a, b) for a, b in pairs)
            self.last = nn.Conv2d(width, 2, 1)

        def forward(self, x: Any) -> Any:
            seen = [self.down[0](x)]
            for block in self.down[1:]:
                seen.append(block(nn.functional.max_pool2d(seen[-1], 2)))
            x = seen.pop()
            for up, join in zip(self.up, self.join, strict=True):
                x = join(torch.cat([seen.pop(), up(x)], 1))
            return self.last(x)

    return UNet()


def text_model(causal: bool, layers: int = 4, width: int = 256, heads: int = 4) -> Any:
    """A transformer over ids, as BERT is one, or as GPT if `causal`."""
    import torch
    from torch import nn

    class TextModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(VOCABULARY, width)
            self.places = nn.Embedding(LENGTH, width)
            layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=causal
            )
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.last = nn.Linear(width, VOCABULARY)

        def forward(self, ids: Any) -> Any:
            length = ids.shape[1]
            x = self.words(ids) + self.places(torch.arange(length))
            mask = torch.triu(torch.full((length, length), float("-inf")), 1) if causal else None
            return self.last(self.layers(x, mask=mask, is_causal=causal))

    return TextModel()


def vision_model(name: str) -> Any:
    from torchvision import models

    if name == "unet":
        return unet()
    if name in (segmentation := SEGMENTATION | MORE_SEGMENTATION):
        return getattr(models.segmentation, segmentation[name])(**WITHOUT_WEIGHTS)
    return getattr(models, name)()


def network(name: str) -> tuple[bytes, np.ndarray, Callable[[np.ndarray], Any] | None]:
    """A network as an ONNX file, an input, and what torch computes."""
    if name == "svm":
        x = np.random.default_rng(0).normal(size=(100, 20)).astype("float32")
        return support_vectors(), x, None
    import torch

    torch.manual_seed(0)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in TEXTS:
            model = text_model(causal=name == "decoder").eval()
            x = torch.randint(0, VOCABULARY, (1, LENGTH))
            sizes = {
                0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=LENGTH),
            }  # fmt: skip
            torch.onnx.export(model, (x,), file, dynamic_shapes=(sizes,), verbose=False)
        else:
            model = vision_model(name).eval()
            x = torch.randn(1, 3, 224, 224)
            torch.onnx.export(model, (x,), file, dynamo=False, opset_version=17)

    def run(x: np.ndarray) -> Any:
        with torch.no_grad():
            y = model(torch.from_numpy(x))
        return y["out"] if isinstance(y, dict) else y

    return file.getvalue(), x.numpy(), run


def support_vectors(classes: int = 3, count: int = 600, features: int = 20) -> bytes:
    """A classifier with an RBF kernel, as scikit-learn's SVC is exported."""
    from onnx import TensorProto, helper

    random = np.random.default_rng(0)
    pairs = classes * (classes - 1) // 2
    node = helper.make_node(
        "SVMClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml",
        kernel_type="RBF", kernel_params=[0.05, 0.0, 3.0], classlabels_ints=list(range(classes)),
        support_vectors=random.normal(size=count * features).tolist(),
        coefficients=random.normal(size=count * (classes - 1)).tolist(),
        rho=random.normal(size=pairs).tolist(), vectors_per_class=[count // classes] * classes,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "svm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [100, features])],
        [
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("label", TensorProto.INT64, None),
        ],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    file: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return file


def measure(name: str, threads: int, rounds: int) -> dict[str, Any]:
    """Time a network by turns."""
    import onnxruntime

    import graphflow as gf
    import graphflow.onnx

    file, x, torch_run = network(name)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    peer = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    first = peer.get_inputs()[0].name
    loaded = gf.onnx.load(file, trainable=False)
    outputs = [loaded.outputs[each.name] for each in peer.get_outputs()]
    with gf.Session(gf.Cluster.here(threads=threads)) as s:
        feeds = {loaded.inputs[first]: x}
        steps: dict[str, Callable[[], Any]] = {
            "graphflow": lambda: s.run(outputs, feeds),
            "onnxruntime": lambda: peer.run(None, {first: x}),
        }
        if torch_run is not None:
            steps["torch"] = lambda: torch_run(x)
        have, want = steps["graphflow"](), steps["onnxruntime"]()
        for a, b in zip(have, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())
        for step in steps.values():
            step()
        times = time_by_turns(steps, rounds, limit=3.0)
    result = report(name, {n: [t.seconds] for n, t in times.items()}, goal=GOAL)
    noise = {n: round(t.noise, 3) for n, t in times.items()}
    print("  noise: " + ", ".join(f"{n} {value:.0%}" for n, value in noise.items()), flush=True)
    return result | {"noise": noise}


def main() -> None:
    parser = arguments("networks by ONNX")
    parser.add_argument("--threads", type=int, default=1, help="processors for each contender")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="*", default=NAMES, choices=(*NAMES, *MORE_NAMES))
    which.add_argument("--all", action="store_true", help="also networks that nobody tuned for")
    parser.set_defaults(rounds=20)
    options = parser.parse_args()
    pinned(options.threads)
    results = []
    for name in (*NAMES, *MORE_NAMES) if options.all else options.only:
        try:
            results.append(measure(name, options.threads, options.rounds))
        except ImportError as error:
            print(f"{name} is left out: {error} (pip install -e '.[bench]')")
    write("onnx_networks", results, options.output)


if __name__ == "__main__":
    main()
