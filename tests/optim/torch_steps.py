"""Write what torch's optimisers make of the network of `test_rules`.

Run `python -m tests.optim.torch_steps` where torch is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler as schedulers

from tests.optim.test_rules import INPUT, STARTS, STEPS, WANTED

o = torch.optim
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any] | None]] = {
    "adam": (lambda p: o.Adam(p, 0.05), None),
    "adamw": (lambda p: o.AdamW(p, 0.05, amsgrad=True), None),
    "amsgrad": (lambda p: o.Adam(p, 0.05, (0.9, 0.9), weight_decay=0.1, amsgrad=True), None),
    "nadam": (lambda p: o.NAdam(p, 0.05, weight_decay=0.1), None),
    "radam": (lambda p: o.RAdam(p, 0.05, weight_decay=0.1), None),
    "adadelta": (lambda p: o.Adadelta(p, 1.0, weight_decay=0.1), None),
    "adafactor": (lambda p: o.Adafactor(p, 0.05, weight_decay=0.1), None),
    "lbfgs": (lambda p: o.LBFGS(p, 0.3, max_iter=1, history_size=4), None),
    "sgd": (lambda p: o.SGD(p, 0.05, 0.9, weight_decay=0.1, nesterov=True), None),
    "linear": (lambda p: o.Adam(p, 0.1), lambda a: schedulers.LinearLR(a, 0.2, 1.0, 20)),
    "cosine": (lambda p: o.Adam(p, 0.1), lambda a: schedulers.CosineAnnealingLR(a, STEPS, 0.01)),
    "exponential": (lambda p: o.Adam(p, 0.1), lambda a: schedulers.ExponentialLR(a, 0.9)),
    "one_cycle": (
        lambda p: o.Adam(p, 0.1),
        lambda a: schedulers.OneCycleLR(a, 0.2, STEPS + 1, cycle_momentum=False),
    ),
    "piecewise": (lambda p: o.Adam(p, 0.1), lambda a: schedulers.MultiStepLR(a, [10, 30], 0.5)),
    "plateau": (
        lambda p: o.SGD(p, 1.5),
        lambda a: schedulers.ReduceLROnPlateau(a, factor=0.5, patience=2),
    ),
}


def train_with_torch(
    make: Callable[[Any], Any], schedule: Callable[[Any], Any] | None
) -> list[Any]:
    """Return the flat parameters after the steps."""
    parameters = [torch.nn.Parameter(torch.tensor(a)) for a in STARTS]
    w, v, b, s = parameters
    x, wanted = torch.tensor(INPUT), torch.tensor(WANTED)
    optimizer = make(parameters)
    after = schedule(optimizer) if schedule else None

    def loss() -> Any:
        optimizer.zero_grad()
        found = torch.mean((s * (torch.tanh(x @ w) @ v) + b - wanted) ** 2)
        found.backward()
        return found

    for _ in range(STEPS):
        last = optimizer.step(loss)
        if isinstance(after, schedulers.ReduceLROnPlateau):
            after.step(last.item())
        elif after is not None:
            after.step()
    return [parameter.detach().numpy().ravel().tolist() for parameter in parameters]


if __name__ == "__main__":
    found = {name: train_with_torch(*case) for name, case in CASES.items()}
    lines = ",\n".join(f'"{name}": {json.dumps(arrays)}' for name, arrays in found.items())
    Path(__file__).with_name("torch_steps.json").write_text(f"{{\n{lines}\n}}\n")
