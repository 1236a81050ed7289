"""Every CUDA source that is generated compiles: over the registry, and of whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.ops.kernels.cuda.region_kernels import CudaKernel, cuda_kernel, module_text
from graphflow.runtime.memory.memory_layout import plan_layout
from graphflow.runtime.partitioning.partition import partition
from tests.gpu.compilers import compiler
from tests.gpu.regions import along_rows
from tests.ops.kernels.cuda.test_region_kernels import cases
from tests.runtime.programs import place_nodes

GPU = "/worker:0/gpu:0"
pytestmark = pytest.mark.skipif(
    compiler() is None, reason="there is neither nvcc nor NVRTC (pip install nvidia-cuda-nvrtc)"
)


def kernels_of(*fetches: Tensor) -> list[CudaKernel]:
    """Of a model on a GPU."""
    graph = Graph(fetches).verify()
    layout = plan_layout(partition(graph, place_nodes(graph, GPU))[GPU], {})
    return [cuda_kernel(fused.region) for fused in dict.fromkeys(layout.regions.values())]


def mlp() -> list[Tensor]:
    x, labels = gf.placeholder("float32", (16, 20)), gf.placeholder("int32", (16,))
    w, v = (gf.variable(np.ones(s, "float32")) for s in ((20, 32), (32, 10)))
    b = gf.variable(np.zeros(32, "float32"))
    loss = gf.mean(gf.nn.cross_entropy(gf.nn.gelu(x @ w + b) @ v, labels))
    return [loss, gf.optim.Adam(0.01).minimize(loss)]


def transformer_block(dtype: str) -> list[Tensor]:
    x = gf.placeholder(dtype, (2, 8, 16))
    w = gf.variable(np.ones((16, 16), "float32"))
    given = w.astype(dtype)
    q = gf.reshape(x @ given, (2, 8, 2, 8))
    heads = gf.permute_dims(q, (0, 2, 1, 3))
    h = x + gf.reshape(
        gf.permute_dims(gf.nn.attention(heads, heads, heads, causal=True), (0, 2, 1, 3)), x.shape
    )
    y = gf.nn.layer_norm(h.astype("float32"))
    z = gf.nn.silu(y) * gf.nn.softmax(y, axis=-1)
    loss = gf.mean(z * z)
    return [loss, gf.optim.SGD(0.1, momentum=0.9).minimize(loss)]


def of_models() -> list[CudaKernel]:
    models: list[Any] = [mlp(), transformer_block("float32"), transformer_block("bfloat16")]
    return [kernel for model in models for kernel in kernels_of(*model)]


def test_kernels_over_the_registry_and_of_models_compile(tmp_path: Path) -> None:
    compile_ = compiler()
    assert compile_ is not None
    some = [cuda_kernel(single.region(shapes)[0]) for single, shapes in cases(every=False)]
    rows = [cuda_kernel(single.region(shapes)[0]) for single, shapes in along_rows()]
    models = of_models()
    assert len(models) > 10
    compile_(module_text([*some, *rows, *models]), tmp_path)


@pytest.mark.slow
def test_kernels_in_every_dtype_and_with_wide_indices_become_machine_code(tmp_path: Path) -> None:
    compile_ = compiler(machine_code=True)
    assert compile_ is not None
    regions = [single.region(shapes)[0] for single, shapes in cases(every=True)]
    regions += [single.region(shapes)[0] for single, shapes in along_rows()]
    wide = [cuda_kernel(region, wide=True) for region in regions[::7]]
    compile_(module_text([*map(cuda_kernel, regions), *wide]), tmp_path)


def test_a_source_that_is_wrong_is_refused(tmp_path: Path) -> None:
    compile_ = compiler()
    assert compile_ is not None
    with pytest.raises(AssertionError, match="undefined"):
        compile_('extern "C" __global__ void wrong() { nowhere(); }', tmp_path)
