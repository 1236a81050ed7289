"""A table of a model's layers: output shapes, parameters, bytes, and predicted times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphflow.base.argument_checks import format_value
from graphflow.base.formatting import show_bytes, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.pytree import bind, flatten
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor, error_location
from graphflow.ir.spec import TensorSpec, show_shape
from graphflow.ops.networks.layers.layer_base import Layer, LayerCall, record_calls
from graphflow.placement.calibration.automatic_cluster import measured_cluster
from graphflow.placement.calibration.cluster_rates import is_described
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.building.plan_builder import plan_graph
from graphflow.placement.plans.building.plan_fetches import known_of, sizes_of
from graphflow.placement.plans.reports.tables import Printed, TextTable
from graphflow.weights.weight_names import walk

_OUTPUTS = 3
"""Outputs of a layer whose shapes are shown."""


@dataclass(frozen=True)
class LayerSummary:
    """A call of a layer.

    Attributes:
        path: the attributes that lead to the layer; "" for the model.
        kind: name of its class.
        outputs: shapes; a size that only a feed fixes has a name.
        parameters: number of trainable elements.
        nbytes: bytes of all its variables.
        seconds: predicted time of its nodes.
    """

    path: str
    kind: str
    outputs: tuple[str, ...]
    parameters: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class ModelSummary(Printed):
    """The layers of a model, in the order of their calls. Print it, or show it in a notebook.

    Attributes:
        layers: the model itself, and each call of a layer in it.
        buffers: number of elements that are not trained.
        batch: what sizes without a value are for the times.
        where: the devices for which times are predicted.
    """

    layers: tuple[LayerSummary, ...]
    buffers: int
    batch: int
    where: str

    @property
    def parameters(self) -> int:
        """Number of trainable elements."""
        return self.layers[0].parameters

    @property
    def nbytes(self) -> int:
        """Bytes of all variables."""
        return self.layers[0].nbytes

    @property
    def seconds(self) -> float:
        """Predicted time of a call."""
        return self.layers[0].seconds

    @property
    def _headline(self) -> str:
        more = f" and {self.buffers:,} in buffers" if self.buffers else ""
        return (
            f"{self.layers[0].kind}: {self.parameters:,} parameters{more}, "
            f"{show_bytes(self.nbytes)}, {show_seconds(self.seconds)} predicted for batches of "
            f"{self.batch} on {self.where}"
        )

    def _tables(self) -> Iterable[TextTable]:
        heads = ("layer", "kind", "output", "parameters", "bytes", "time")
        rows = tuple(
            (
                each.path, each.kind, _shorten(each.outputs), f"{each.parameters:,}",
                show_bytes(each.nbytes), show_seconds(each.seconds),
            )
            for each in self.layers[1:]
        )  # fmt: skip
        yield TextTable("", heads, rows or (("",) * len(heads),), left=3)


def summarize(model: Layer, shapes: Sequence[Any], batch: Any, cluster: Any) -> ModelSummary:
    """Return the table of a model; see `Layer.summary`."""
    with error_location("summary"):
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ArgumentError(f"batch must be an int above 0, not {format_value(batch)}")
        if cluster is not None and not isinstance(cluster, Cluster):
            raise ArgumentError(f"cluster must be a gf.Cluster, not {format_value(cluster)}")
        if not shapes:
            raise ArgumentError("give the shapes of the inputs: model.summary((None, 1, 28, 28))")
        fed = [_input(shape, i) for i, shape in enumerate(shapes)]
    call: Any = model  # the base class leaves its arguments to models
    with record_calls() as calls:
        result = call(*fed)
    graph = Graph([each for each in flatten(result)[0] if isinstance(each, Tensor)])
    used = measured_cluster() if cluster is None else cluster
    seconds = _predict(graph, used, batch)
    paths = {id(item): path for path, item in walk(model, translate=False)}
    rows = [_describe(call, paths, seconds) for call in calls]
    buffers = sum(int(variable.size) for variable in model.buffers().values())
    return ModelSummary(tuple(rows), buffers, batch, ", ".join(used.devices))


def _input(shape: Any, number: int) -> Tensor:
    """Return a placeholder for an input of the model.

    Raises:
        ArgumentError: something else than a shape, a spec or a tensor.
    """
    if isinstance(shape, Tensor):
        return shape
    dtype: Any = "float32"
    if isinstance(shape, TensorSpec):
        dtype, shape = shape.dtype, shape.shape
    if not isinstance(shape, tuple | list):
        raise ArgumentError(
            "each input is a tuple of sizes, such as (None, 784), or gf.spec(dtype, shape), not "
            f"{format_value(shape)}"
        )
    sizes = ["batch" if i == 0 and size is None else size for i, size in enumerate(shape)]
    return placeholder(dtype, tuple(sizes), name=f"input{number or ''}")


def _predict(graph: Graph, cluster: Cluster, batch: int) -> dict[Node, float]:
    """Return the predicted seconds of nodes."""
    shapes = {
        node.outputs[0]: tuple(s if isinstance(s, int) else batch for s in node.specs[0].shape)
        for node in graph.placeholders
    }
    sizes = sizes_of(graph, shapes)
    learned, steps = (None, None) if is_described(cluster) else known_of(cluster)
    plan = plan_graph(graph, cluster, sizes, bind(graph, sizes), learned=learned, steps=steps)
    placed = plan.by_name
    return {
        node: placed[name].finish - placed[name].start
        for node, name in graph.names.items()
        if name in placed
    }


def _describe(
    call: LayerCall, paths: Mapping[int, str], seconds: Mapping[Node, float]
) -> LayerSummary:
    trained, others = call.layer.parameters().values(), call.layer.buffers().values()
    return LayerSummary(
        paths.get(id(call.layer), ""),
        type(call.layer).__name__,
        tuple(show_shape(t.shape) for t in flatten(call.result)[0] if isinstance(t, Tensor)),
        sum(int(variable.size) for variable in trained),
        sum(int(variable.spec.nbytes) for variable in (*trained, *others)),
        sum(time for node, time in seconds.items() if call.start < node.serial < call.stop),
    )


def _shorten(outputs: Sequence[str]) -> str:
    return ", ".join(outputs[:_OUTPUTS]) + ", …" * (len(outputs) > _OUTPUTS)
