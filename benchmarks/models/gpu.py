"""Training steps on a GPU: the MLP, two GPT blocks, LeNet and ResNet-18, against torch.compile
(reduce-overhead, which captures CUDA graphs) and JAX on the same GPU.

    python benchmarks/models/gpu.py [--rounds 40] [--models mlp gpt lenet resnet] [--output FILE]

The batch comes from numpy and the loss goes back as a Python float in each step, so that all copy
the same. torch and JAX keep to float32 proper (no TF32), as graphflow does. Also: our step with
CUDA graphs off, the GPU's memory, and whether replayed steps give the bits of those run one by one.
Where there is no GPU it says so, and ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
import gpt
import mlp
import vision
from peers import Steps, arguments, interleaved, optional, report, write
from training import Model, Ours, agree, first, jax_step

GRAPHS = "GRAPHFLOW_CUDA_GRAPHS"


@contextmanager
def environment(**settings: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def no_gpu() -> str | None:
    """Why there is nothing to time here."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return "CuPy is not installed (pip install 'graphflow[gpu]')"
    except Exception as error:  # CuPy's own, of a missing driver
        return f"CuPy finds no GPU ({error})"
    return None if count else "CuPy finds no GPU"


def models(names: list[str]) -> list[Model]:
    found: dict[str, Callable[[], Model]] = {
        "mlp": lambda: mlp.model(128),
        "gpt": gpt.model,
        "lenet": lambda: vision.models()["lenet"],
        "resnet": lambda: vision.models()["resnet"],
    }
    return [found[name]() for name in names]


def torch_step(model: Model) -> Callable[[], float]:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("this torch sees no GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    cuda = torch.device("cuda")

    parameters = {
        k: torch.from_numpy(v.copy()).to(cuda).requires_grad_() for k, v in model.parameters.items()
    }
    optimiser = torch.optim.SGD(parameters.values(), model.rate, model.momentum, fused=True)
    loss_of = torch.compile(model.torch, mode="reduce-overhead")
    pinned = [torch.from_numpy(a).pin_memory() for a in model.feeds]

    def step() -> float:
        torch.compiler.cudagraph_mark_step_begin()  # the last step's tensors may be written over
        optimiser.zero_grad()
        loss = loss_of(parameters, *(a.to(cuda, non_blocking=True) for a in pinned))
        loss.backward()
        optimiser.step()
        return loss.item()  # type: ignore[no-any-return]

    return step


def jax_on_gpu(model: Model) -> Callable[[], float]:
    import jax

    if jax.default_backend() != "gpu":
        raise ImportError("this JAX sees no GPU")
    jax.config.update("jax_default_matmul_precision", "highest")
    return jax_step(model)


def ours(model: Model) -> Ours:
    """Our step on the first GPU. Its first call compiles it, under the settings that hold then."""
    import graphflow as gf

    return Ours(model, gf.Cluster.here(devices=["gpu:0"]))


def same_bits(model: Model, steps: int = 6) -> bool:
    """Whether a run of steps gives the same losses with CUDA graphs and without."""
    losses = []
    for setting in ("on", "off"):
        with environment(**{GRAPHS: setting}):
            step = ours(model)
            losses.append(np.array([step() for _ in range(steps)]))
    return losses[0].tobytes() == losses[1].tobytes()


def contest(model: Model, rounds: int) -> dict[str, Any]:
    steps: Steps = {
        "graphflow": ours(model),
        "graphflow, no graphs": ours(model),
        **optional("torch.compile", lambda: torch_step(model)),
        **optional("jax", lambda: jax_on_gpu(model)),
    }
    firsts = {}
    for name, step in steps.items():
        with environment(**{GRAPHS: "off" if name.endswith("no graphs") else "on"}):
            firsts[name] = first(step)
    agree(model.title, {name: losses for name, (_, losses) in firsts.items()})
    result = report(f"{model.title} (GPU)", interleaved(steps, rounds), goal=0.95)
    result["replayed_bits_are_those_run_one_by_one"] = same_bits(model)
    timed = steps["graphflow"]
    assert isinstance(timed, Ours)
    result["profile_ms"] = timed.profile()
    return result


def main() -> None:
    parser = arguments("training steps on a GPU")
    parser.add_argument(
        "--models", nargs="+", default=["mlp", "gpt", "lenet", "resnet"],
        choices=["mlp", "gpt", "lenet", "resnet"],
    )  # fmt: skip
    options = parser.parse_args()
    missing = no_gpu()
    if missing is not None:
        print(f"nothing to time: {missing}")
        return
    results = [contest(model, options.rounds) for model in models(options.models)]
    write("gpu", results, options.output)


if __name__ == "__main__":
    main()
