"""A twin as torch builds it. This file alone imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.twins.description import CLASSES, NUMBERS, RULES, STEP_CLASSES, Part, Twin


class Residual(nn.Module):
    """x plus the output of inner parts."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*parts)

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


class Recurrent(nn.Module):
    """The outputs of a recurrent stack, without its last state."""

    def __init__(
        self, kind: str, inputs: int, size: int, layers: int, both: bool, dropout: float
    ) -> None:
        super().__init__()
        make = getattr(nn, kind)
        self.stack = make(
            inputs, size, layers, batch_first=True, dropout=dropout, bidirectional=both
        )

    def forward(self, x: Any) -> Any:
        return self.stack(x)[0]


class Encoder(nn.Module):
    """A layer of a transformer's encoder."""

    def __init__(
        self, size: int, heads: int, hidden: int, dropout: float, gelu: bool, first: bool,
        causal: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        activation = functional.gelu if gelu else functional.relu
        self.layer = nn.TransformerEncoderLayer(
            size, heads, hidden, dropout, activation, batch_first=True, norm_first=first
        )
        self.layer.self_attn.dropout = 0.0  # graphflow's layer does not drop attention weights
        self.causal, self._masks = causal, dict[int, Any]()

    def forward(self, x: Any) -> Any:
        if not self.causal:
            return self.layer(x)
        steps = x.shape[1]
        if steps not in self._masks:
            self._masks[steps] = nn.Transformer.generate_square_subsequent_mask(steps)
        return self.layer(x, src_mask=self._masks[steps], is_causal=True)


class Positions(nn.Module):
    """x plus a learned vector for each step."""

    def __init__(self, steps: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(steps, size) * 0.02)

    def forward(self, x: Any) -> Any:
        return x + self.weight


class Tables(nn.Module):
    """Rows of one table for each field, concatenated or added, beside dense features."""

    def __init__(self, fields: int, rows: int, size: int, adds: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, size) for _ in range(fields))
        self.adds = adds

    def forward(self, ids: Any, dense: Any) -> Any:
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return torch.cat([sum(found[1:], found[0]), dense] if self.adds else [*found, dense], 1)


class TwinNetwork(nn.Module):
    """A first part that takes all inputs, and the others."""

    def __init__(self, first: nn.Module, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.rest = first, nn.Sequential(*parts)

    def forward(self, *inputs: Any) -> Any:
        return self.rest(self.first(*inputs))


class MeanOver(nn.Module):
    """The mean over some axes."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Any) -> Any:
        return x.mean(self.axes)


class LastStep(nn.Module):
    """The last step of a sequence."""

    def forward(self, x: Any) -> Any:
        return x[:, -1]


class DoubleSize(nn.Module):
    """An image of twice the height and width, by nearest neighbours."""

    def forward(self, x: Any) -> Any:
        return functional.interpolate(x, scale_factor=2.0, mode="nearest")


STRUCTURES: dict[str, Any] = {
    each.__name__: each
    for each in (
        Residual, Recurrent, Encoder, Positions, Tables, TwinNetwork, MeanOver, LastStep,
        DoubleSize,
    )
}  # fmt: skip


def make_module(part: Part) -> Any:
    """Return the module of a part."""
    inner = [make_module(each) for each in part.inner]
    make = STRUCTURES.get(part.kind) or getattr(nn, part.kind)
    return make(*inner, *part.arguments)


def loss_of(twin: Twin, output: Any, target: Any) -> Any:
    """Return the loss that is minimised, a scalar."""
    if twin.loss == CLASSES:
        return functional.cross_entropy(output, target)
    if twin.loss == STEP_CLASSES:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())
    if twin.loss == NUMBERS:
        return functional.mse_loss(output, target)
    return functional.binary_cross_entropy_with_logits(output, target.float())


def make_optimizers(twin: Twin, model: Any) -> list[Any]:
    """Return the fastest optimisers of torch; tables of a sparse twin have their own."""
    rule, arguments = RULES[twin.optimizer]
    tables: list[Any] = []
    if twin.is_sparse:
        found = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        for table in found:
            table.sparse = True
        tables = [table.weight for table in found]
    held = {id(p) for p in tables}
    rest = [p for p in model.parameters() if id(p) not in held]
    named = {"RMSProp": "RMSprop"}.get(rule, rule)
    fused = {} if rule == "RMSProp" else {"fused": True}
    made = [getattr(torch.optim, named)(rest, **arguments, **fused)]
    if tables:
        named = "SparseAdam" if rule == "Adam" else named
        made.append(getattr(torch.optim, named)(tables, **arguments))
    return made


class TorchStep:
    """A training step of torch on so many threads: feeds in, the loss out.

    Args:
        twin: what to build. Weights depend on its seed and index.
        compiles: run the model and the loss by `torch.compile`.
    """

    def __init__(self, twin: Twin, compiles: bool = False) -> None:
        torch.manual_seed(1_000_003 * twin.seed + twin.index)
        self._feeds = twin.feeds()
        self._model = make_module(twin.body).train()
        self._optimizers = make_optimizers(twin, self._model)

        def loss(*feeds: Any) -> Any:
            return loss_of(twin, self._model(*feeds[:-1]), feeds[-1])

        self._loss = torch.compile(loss) if compiles else loss

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return copies of all weights and buffers by name."""
        return {k: v.detach().numpy().copy() for k, v in self._model.state_dict().items()}

    def step(self, threads: int) -> float:
        """Take a step on so many threads and return its loss."""
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss = self._loss(*map(torch.from_numpy, self._feeds))
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        return float(loss.item())
