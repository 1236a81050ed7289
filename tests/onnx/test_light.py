"""The nine networks that come with onnx: loaded, placed over two workers, and compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import graphflow as gf
from tests.onnx.models import text

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
# The others are made of the same ops, and bring half a gigabyte of weights.
NETWORKS = ("densenet121", "inception_v2", "resnet50", "shufflenet", "squeezenet")
ON_REQUEST = ("bvlc_alexnet", "inception_v1", "vgg19", "zfnet512")


@pytest.fixture(scope="module")
def cluster() -> Iterator[gf.Cluster]:
    yield gf.Cluster.local(workers=2, threads=1)


def image(m: gf.onnx.Model) -> tuple[str, Any]:
    """The input that the stored outputs belong to: elements counted from 0 to 1."""
    ((name, tensor),) = m.inputs.items()
    shape = tuple(int(size) for size in tensor.shape)  # type: ignore[arg-type]
    count = int(np.prod(shape))
    return name, (np.arange(count).reshape(shape) / count).astype("float32")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "network", [*NETWORKS, *(pytest.param(name, marks=pytest.mark.slow) for name in ON_REQUEST)]
)
def test_a_network_over_two_workers_gives_the_stored_output(
    network: str, cluster: gf.Cluster
) -> None:
    m = gf.onnx.load(FOLDER / f"light_{network}.onnx")
    stored = (FOLDER / f"light_{network}_output_0.pb").read_bytes()
    expected = numpy_helper.to_array(onnx.TensorProto.FromString(stored))
    name, x = image(m)
    (output,) = m.outputs.values()
    with gf.Session(cluster) as s:
        got = s.run(output, {m.inputs[name]: x})
        plan = s.plan()
    assert m.whole
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    assert len(plan.placement) > 20, "the cost model placed its nodes"


def with_random_weights(path: Path) -> onnx.ModelProto:
    """The network with other numbers for its weights, which are all the same in the file."""
    model = onnx.load(path)
    rng = np.random.default_rng(5)
    shapes = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    shapes.update((n.output[0], numpy_helper.to_array(n.attribute[0].t))
                  for n in model.graph.node if n.op_type == "Constant")  # fmt: skip
    kept = []
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes:
            shape = tuple(int(s) for s in shapes[node.input[0]])
            fan_in = max(1, int(np.prod(shape[1:])))
            weights = (rng.standard_normal(shape) * np.sqrt(2 / fan_in)).astype("float32")
            if len(shape) == 1:  # among them variances
                weights = np.abs(weights) + np.float32(0.5)
            model.graph.initializer.append(numpy_helper.from_array(weights, node.output[0]))
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    if kept[-1].op_type == "Softmax":  # over one element it would hide everything
        model.graph.output[0].name = kept[-1].input[0]
        del model.graph.node[-1]
    # Under opset 9 onnx's evaluator trains where batches are normalised by given moments.
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            model.opset_import[0].version = 15
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "network", ["squeezenet", pytest.param("shufflenet", marks=pytest.mark.slow)]
)
def test_a_network_with_random_weights_agrees_with_onnx(network: str, cluster: gf.Cluster) -> None:
    proto = with_random_weights(FOLDER / f"light_{network}.onnx")
    m = gf.onnx.load(proto)
    assert len(m.variables) > 20
    name, _ = image(m)
    x = np.random.default_rng(6).standard_normal(m.inputs[name].shape).astype("float32")
    (expected,) = ReferenceEvaluator(proto).run(None, {name: x})
    (output,) = m.outputs.values()
    with gf.Session(cluster) as s:
        got = s.run(output, {m.inputs[name]: x})
    assert np.std(expected) > 0, "the weights matter"
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_model_with_steps_on_the_host_runs_its_graphs_over_two_workers(
    cluster: gf.Cluster,
) -> None:
    proto = text(
        """g (float[N] x) => (float[K] y) {
        big = Exp(x)
        where = NonZero(x)
        at = Transpose <perm = [1, 0]> (where)
        y = GatherND(big, at)
    }"""
    )
    m = gf.onnx.load(proto)
    with gf.Session(cluster) as s:
        for x in ([0, 1, 2], [3, 0, 0, 4, 5]):
            got = m.run({"x": np.array(x, "float32")}, session=s)["y"]
            assert np.allclose(got, np.exp([v for v in x if v]))
