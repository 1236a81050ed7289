"""How far the memory of a process grows while it trains: deep MLP, deep GPT.

    python benchmarks/runtime/memory.py [--threads 1] [--output results/memory.json]

Each contender trains for a few steps in a process of its own; what counts is the most memory that
was resident at once, beyond what was when its library was imported and the data was there. Beside
it stands what our plan predicted and our session recorded. Checkpointed: groups of layers in
`gf.checkpoint`, `torch.utils.checkpoint` and `jax.checkpoint`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import gpt
from peers import pinned, write
from training import Model, Ours, jax_step, torch_step

STEPS = 4
LAYERS, WIDTH, BATCH = 20, 1024, 4096
GOAL = 1.0


# A deep MLP --------------------------------------------------------------------------------------


def mlp(checkpoint: bool) -> Model:
    """With `checkpoint`, each group of five layers is one region."""
    random = np.random.default_rng(0)
    named = {}
    for i in range(LAYERS):
        w = random.normal(size=(WIDTH, WIDTH)) * np.sqrt(2 / WIDTH)
        named |= {f"w{i}": w.astype("float32"), f"b{i}": np.zeros(WIDTH, "float32")}
    feeds = tuple(random.normal(size=(BATCH, WIDTH)).astype("float32") for _ in range(2))

    def ours(p: Any, x: Any, y: Any) -> Any:
        import graphflow as gf

        def group(x: Any, *layers: Any) -> Any:
            for w, b in layers:
                x = gf.nn.relu(x @ w + b)
            return x

        for layers in groups(p):
            x = (gf.checkpoint(group) if checkpoint else group)(x, *layers)
        return gf.mean(gf.square(x - y))

    def torch(p: Any, x: Any, y: Any) -> Any:
        import torch
        from torch.utils import checkpoint as recomputed

        def group(x: Any, *layers: Any) -> Any:
            for w, b in layers:
                x = torch.relu(torch.addmm(b, x, w))
            return x

        for layers in groups(p):
            if checkpoint:
                x = recomputed.checkpoint(group, x, *layers, use_reentrant=False)
            else:
                x = group(x, *layers)
        return torch.nn.functional.mse_loss(x, y)

    def jax(p: Any, x: Any, y: Any) -> Any:
        import jax
        import jax.numpy as jnp

        def group(x: Any, *layers: Any) -> Any:
            for w, b in layers:
                x = jax.nn.relu(x @ w + b)
            return x

        for layers in groups(p):
            x = (jax.checkpoint(group) if checkpoint else group)(x, *layers)
        return jnp.mean((x - y) ** 2)

    title = f"MLP of {LAYERS} layers of {WIDTH}, batch {BATCH}"
    return Model(title, GOAL, named, feeds, ours, torch, jax, rate=1e-4)


def groups(p: Any) -> list[list[tuple[Any, Any]]]:
    """Weights and biases of five layers each."""
    layers = [(p[f"w{i}"], p[f"b{i}"]) for i in range(LAYERS)]
    return [layers[i : i + 5] for i in range(0, LAYERS, 5)]


# A deep GPT --------------------------------------------------------------------------------------


def deep_gpt(checkpoint: bool) -> Model:
    """The GPT of `gpt.py` with six blocks and 256 tokens."""
    gpt.LAYERS, gpt.TIME = 6, 256
    return replace(gpt.model(), title="six GPT blocks (B 8, T 256, d 256, h 4)")


MODELS: dict[str, tuple[Callable[[bool], Model], tuple[bool, ...]]] = {
    "mlp": (mlp, (False, True)),
    "gpt": (deep_gpt, (False,)),
}
CONTENDERS: dict[str, Callable[[Model], Callable[[], float]]] = {
    "graphflow": Ours,
    "torch": torch_step,
    "jax": jax_step,
}


# Measuring ---------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def most_resident() -> int:
    """The most bytes that were since `forget`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget() -> None:
    """Let the most resident bytes be those of now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(contender: str, name: str, checkpoint: bool) -> dict[str, Any]:
    """What one contender takes, in this process."""
    importlib.import_module(contender)
    model = MODELS[name][0](checkpoint)
    gc.collect()
    forget()
    before = resident()
    step = CONTENDERS[contender](model)
    losses = [step() for _ in range(STEPS)]
    told: dict[str, Any] = {"growth": most_resident() - before, "losses": losses}
    if isinstance(step, Ours):
        told |= step.memory()
    return told


def measured(contender: str, name: str, checkpoint: bool, threads: int) -> dict[str, Any] | None:
    """The same in a process of its own; None where the library is missing."""
    flags = ["--measure", contender, "--model", name, "--threads", str(threads)]
    command = [sys.executable, __file__, *flags, *(["--checkpoint"] if checkpoint else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  {contender} is left out: {done.stderr.strip().splitlines()[-1]}")
        return None
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compared(name: str, checkpoint: bool, threads: int) -> dict[str, Any]:
    """All contenders on one model, as plain data; printed too."""
    title = MODELS[name][0](checkpoint).title + (", checkpointed" if checkpoint else "")
    print(f"\n{title}")
    found = {c: f for c in CONTENDERS if (f := measured(c, name, checkpoint, threads))}
    ours = found["graphflow"]
    for contender, told in sorted(found.items(), key=lambda item: item[1]["growth"]):
        assert np.allclose(told["losses"], ours["losses"], rtol=1e-2), found
        ratio = ours["growth"] / told["growth"]
        note = "" if contender == "graphflow" else f"   graphflow / {contender} = {ratio:.2f}"
        print(f"  {contender:<10} {told['growth'] / 2**20:8.0f} MiB{note}", flush=True)
    print(f"  planned {ours['planned'] / 2**20:.0f} MiB, recorded {ours['recorded'] / 2**20:.0f}")
    growth = {contender: told["growth"] for contender, told in found.items()}
    ratios = {c: growth["graphflow"] / g for c, g in growth.items() if c != "graphflow"}
    result = {
        "title": title,
        "growth_bytes": growth,
        "ratios": ratios,
        "planned_bytes": ours["planned"],
        "recorded_bytes": ours["recorded"],
        "goal": GOAL,
    }
    if ratios:
        best = max(ratios, key=ratios.__getitem__)
        result |= {"best_peer": best, "ratio_to_best": ratios[best]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="memory of a training step")
    parser.add_argument("--threads", type=int, default=1, help="processors for each contender")
    parser.add_argument("--output", type=Path, default=None, help="JSON file")
    parser.add_argument("--measure", choices=CONTENDERS, help="one contender, in this process")
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--checkpoint", action="store_true")
    options = parser.parse_args()
    pinned(options.threads)
    if options.measure:
        print(json.dumps(measure(options.measure, options.model, options.checkpoint)))
        return
    results = [
        compared(name, checkpoint, options.threads)
        for name, (_, ways) in MODELS.items()
        for checkpoint in ways
    ]
    write("memory", results, options.output)


if __name__ == "__main__":
    main()
