"""Training steps of LeNet-5 and of ResNet-18, both on images of 32×32.

    python benchmarks/models/vision.py [--threads 1] [--rounds 10] [--output results/vision.json]

torch runs in its own layout and in channels_last. Batch norm works with the moments of the batch.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import pinned_arguments, write
from training import Arrays, Model, contest

LENET_BATCH, RESNET_BATCH, CLASSES = 64, 16, 10
WIDTHS, BLOCKS = (64, 128, 256, 512), 2


def _scaled(random: np.random.Generator, *shape: int) -> np.ndarray:
    fan = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
    return (random.normal(size=shape) * np.sqrt(2 / fan)).astype("float32")


def images(batch: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    x = random.normal(size=(batch, channels, 32, 32)).astype("float32")
    return x, random.integers(0, CLASSES, batch)


def _jax_conv(x: Any, w: Any, stride: int = 1, padding: int = 0) -> Any:
    import jax

    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), [(padding, padding)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )  # fmt: skip


def _jax_entropy(logits: Any, y: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))


# LeNet-5 ----------------------------------------------------------------------------------------


def lenet_weights() -> Arrays:
    random = np.random.default_rng(0)
    named = {}
    for i, (n, m) in enumerate(pairwise((1, 6, 16))):
        named[f"c{i}"], named[f"cb{i}"] = _scaled(random, m, n, 5, 5), np.zeros(m, "float32")
    for i, (n, m) in enumerate(pairwise((400, 120, 84, CLASSES))):
        named[f"w{i}"], named[f"b{i}"] = _scaled(random, n, m), np.zeros(m, "float32")
    return named


def lenet_graphflow(p: Any, x: Any, y: Any) -> Any:
    import graphflow as gf

    for i in range(2):
        x = gf.nn.relu(gf.nn.conv2d(x, p[f"c{i}"], p[f"cb{i}"]))
        x = gf.nn.max_pool2d(x, 2)
    x = gf.reshape(x, (LENET_BATCH, 400))
    for i in range(3):
        x = x @ p[f"w{i}"] + p[f"b{i}"]
        x = gf.nn.relu(x) if i < 2 else x
    return gf.mean(gf.nn.cross_entropy(x, y))


def lenet_torch(p: Any, x: Any, y: Any) -> Any:
    from torch.nn import functional

    for i in range(2):
        x = functional.relu(functional.conv2d(x, p[f"c{i}"], p[f"cb{i}"]))
        x = functional.max_pool2d(x, 2)
    x = x.reshape(LENET_BATCH, 400)
    for i in range(3):
        x = x @ p[f"w{i}"] + p[f"b{i}"]
        x = functional.relu(x) if i < 2 else x
    return functional.cross_entropy(x, y)


def lenet_jax(p: Any, x: Any, y: Any) -> Any:
    import jax

    for i in range(2):
        x = jax.nn.relu(_jax_conv(x, p[f"c{i}"]) + p[f"cb{i}"][:, None, None])
        x = jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(LENET_BATCH, 400)
    for i in range(3):
        x = x @ p[f"w{i}"] + p[f"b{i}"]
        x = jax.nn.relu(x) if i < 2 else x
    return _jax_entropy(x, y)


# ResNet-18 --------------------------------------------------------------------------------------


def _units() -> list[tuple[str, int, int, int]]:
    """Name, inputs, outputs and stride of each basic block."""
    found, before = [], WIDTHS[0]
    for i, width in enumerate(WIDTHS):
        for j in range(BLOCKS):
            found.append((f"s{i}{j}", before, width, 2 if i and not j else 1))
            before = width
    return found


def resnet_weights() -> Arrays:
    random = np.random.default_rng(0)
    named: dict[str, np.ndarray] = {}

    def conv(name: str, n: int, m: int, k: int) -> None:
        named[name] = _scaled(random, m, n, k, k)
        named[f"{name}.scale"], named[f"{name}.shift"] = np.ones(m, "f4"), np.zeros(m, "f4")

    conv("stem", 3, WIDTHS[0], 3)
    for name, n, m, stride in _units():
        conv(f"{name}.a", n, m, 3)
        conv(f"{name}.b", m, m, 3)
        if stride > 1:
            conv(f"{name}.past", n, m, 1)
    return {**named, "head": _scaled(random, WIDTHS[-1], CLASSES) * 0.1}


def _resnet(p: Any, x: Any, conv: Any, relu: Any) -> Any:
    """The trunk, by a library's convolution with its norm, and its relu."""
    x = relu(conv(p, "stem", x, 1, 1))
    for name, _, _, stride in _units():
        past = conv(p, f"{name}.past", x, stride, 0) if stride > 1 else x
        y = relu(conv(p, f"{name}.a", x, stride, 1))
        x = relu(conv(p, f"{name}.b", y, 1, 1) + past)
    return x


def resnet_graphflow(p: Any, x: Any, y: Any) -> Any:
    import graphflow as gf

    def conv(p: Any, name: str, x: Any, stride: int, padding: int) -> Any:
        x = gf.nn.conv2d(x, p[name], None, stride, padding)
        scale, shift = p[f"{name}.scale"], p[f"{name}.shift"]
        start = gf.zeros(scale.shape)  # of the running moments, which nobody asks for
        return gf.nn.batch_norm(x, scale, shift, start, start, training=True)[0]

    x = _resnet(p, x, conv, gf.nn.relu)
    return gf.mean(gf.nn.cross_entropy(gf.mean(x, axis=(2, 3)) @ p["head"], y))


def resnet_torch(p: Any, x: Any, y: Any) -> Any:
    from torch.nn import functional

    def conv(p: Any, name: str, x: Any, stride: int, padding: int) -> Any:
        x = functional.conv2d(x, p[name], None, stride, padding)
        scale, shift = p[f"{name}.scale"], p[f"{name}.shift"]
        return functional.batch_norm(x, None, None, scale, shift, training=True)

    x = _resnet(p, x, conv, functional.relu)
    return functional.cross_entropy(x.mean((2, 3)) @ p["head"], y)


def resnet_jax(p: Any, x: Any, y: Any) -> Any:
    import jax

    def conv(p: Any, name: str, x: Any, stride: int, padding: int) -> Any:
        x = _jax_conv(x, p[name], stride, padding)
        x = x - x.mean((0, 2, 3), keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean((0, 2, 3), keepdims=True) + 1e-5)
        return x * p[f"{name}.scale"][:, None, None] + p[f"{name}.shift"][:, None, None]

    return _jax_entropy(_resnet(p, x, conv, jax.nn.relu).mean((2, 3)) @ p["head"], y)


def resnet_tensorflow(p: Any, x: Any, y: Any) -> Any:
    import tensorflow as tf

    def conv(p: Any, name: str, x: Any, stride: int, padding: int) -> Any:
        around = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
        x = tf.nn.conv2d(x, p[name], stride, around if padding else "VALID")
        scale, shift = p[f"{name}.scale"], p[f"{name}.shift"]
        return tf.compat.v1.nn.fused_batch_norm(x, scale, shift, epsilon=1e-5)[0]

    x = _resnet(p, x, conv, tf.nn.relu)
    logits = tf.reduce_mean(x, (1, 2)) @ p["head"]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def models() -> dict[str, Model]:
    return {
        "lenet": Model(
            f"LeNet-5, batch {LENET_BATCH}", 0.95, lenet_weights(), images(LENET_BATCH, 1),
            lenet_graphflow, lenet_torch, lenet_jax, layout="channels_last",
        ),
        "resnet": Model(
            f"ResNet-18 on 32×32, batch {RESNET_BATCH}", 0.95, resnet_weights(),
            images(RESNET_BATCH, 3), resnet_graphflow, resnet_torch, resnet_jax,
            rate=0.01, layout="channels_last", tensorflow=resnet_tensorflow,
        ),
    }  # fmt: skip


def main() -> None:
    options = pinned_arguments("LeNet and ResNet training steps", rounds=10)
    each = {"lenet": 5, "resnet": 1}
    results = [contest(m, options.rounds, each[name]) for name, m in models().items()]
    write("vision", results, options.output)


if __name__ == "__main__":
    main()
