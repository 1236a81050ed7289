"""Models as torch exports them: loaded here, they give what torch gives, at other sizes, too."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest

import graphflow as gf

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")
pytest.importorskip("onnx", reason="needs onnx: pip install 'graphflow[onnx]'")
nn = torch.nn
F = torch.nn.functional


class Gpt(nn.Module):  # type: ignore[misc,name-defined]
    """One attention layer between an embedding and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(50, 32), nn.Linear(32, 96)
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, tokens: Any) -> Any:
        x = self.table(tokens)
        batch, time, width = x.shape
        parts = self.mix(self.norm(x)).split(width, 2)
        q, k, v = (part.view(batch, time, 4, 8).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width)) @ self.table.weight.T


class UNet(nn.Module):  # type: ignore[misc,name-defined]
    """Down, up twice over, and padding by reflection."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.up = nn.Conv2d(1, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 2, 2)
        self.group, self.each = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Any) -> Any:
        h = F.silu(self.group(self.a(x)))
        down = F.avg_pool2d(h, 2)
        again = F.interpolate(down, size=x.shape[2:], mode="bilinear", align_corners=False)
        mirrored = F.pad(h, (1, 1, 1, 1), mode="reflect")[:, :, 1:-1, 1:-1]
        return torch.cat([self.up(down), self.each(again), mirrored], 1)


class Head(nn.Module):  # type: ignore[misc,name-defined]
    """Convolutions, batch norm, and a mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.d, self.l = nn.Conv2d(8, 8, 3, 1, 1, groups=4), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.b(self.c(x)))
        h = F.max_pool2d(h + self.d(h), 2)
        return self.l(torch.flatten(F.adaptive_avg_pool2d(h, 1), 1))


def tokens(*shape: int) -> Any:
    return torch.randint(0, 50, shape)


CASES = [
    ("gpt", Gpt, {0: "batch", 1: "time"}, [tokens(2, 7), tokens(1, 9), tokens(4, 1)]),
    ("unet", UNet, {0: "n", 2: "h", 3: "w"}, [torch.randn(2, 1, 8, 8), torch.randn(1, 1, 10, 12)]),
    ("head", Head, {0: "n", 2: "h", 3: "w"},
     [torch.randn(2, 3, 16, 16), torch.randn(1, 3, 24, 20)]),
    ("lstm", lambda: nn.LSTM(5, 6, 2, bidirectional=True), {0: "t", 1: "n"},
     [torch.randn(4, 3, 5), torch.randn(2, 1, 5)]),
    ("gru", lambda: nn.GRU(5, 6, batch_first=True), {0: "n"},
     [torch.randn(4, 3, 5), torch.randn(1, 3, 5)]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "dynamic", "inputs"), [c[1:] for c in CASES], ids=[
    c[0] for c in CASES
])  # fmt: skip
def test_an_exported_model_is_one_graph_and_agrees(make: Any, dynamic: Any, inputs: Any) -> None:
    torch.manual_seed(0)
    module = make().eval()
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about what it traces
        torch.onnx.export(
            module, (inputs[0],), content, opset_version=17, dynamo=False,
            input_names=["x"], dynamic_axes={"x": dynamic},
        )  # fmt: skip
    m = gf.onnx.load(content.getvalue())
    assert m.whole
    for x in inputs:
        with torch.no_grad():
            expected = module(x)
        if isinstance(expected, tuple):
            first, rest = expected
            expected = [first, *(rest if isinstance(rest, tuple) else [rest])]
        else:
            expected = [expected]
        for mine, other in zip(m.run([x.numpy()]).values(), expected, strict=True):
            np.testing.assert_allclose(mine, other.numpy(), rtol=1e-4, atol=1e-5)
