"""graphflow as an ONNX backend, for tools and test suites that drive backends:

onnx.backend.test.BackendTest(graphflow.onnx.backend.Backend, __name__)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import ModelProto, NodeProto, ValueInfoProto, helper
from onnx.backend import base

from graphflow.errors import OnnxError, UnsupportedOnnxError
from graphflow.onnx.model import Model, load
from graphflow.sessions.session import DEADLINE


class BackendRep(base.BackendRep):
    """A loaded model, ready to run many times."""

    def __init__(self, model: Model, deadline: float = DEADLINE) -> None:
        self.model = model
        self._deadline = deadline

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the model, and return its outputs as a named tuple in the order of the model.

        Args:
            inputs: the inputs in the order of the model, or by name.
        """
        if not isinstance(inputs, Mapping | list | tuple):
            inputs = [inputs]
        results = self.model.run(inputs, deadline=self._deadline)
        make = base.namedtupledict("Outputs", list(results))
        outputs: tuple[Any, ...] = make(*results.values())
        return outputs


class Backend(base.Backend):
    """Prepares and runs ONNX models on the CPU of this process."""

    @classmethod
    def is_compatible(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Return True if every node of a model has a translation."""
        try:
            load(model)
        except UnsupportedOnnxError:
            return False
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Load a model.

        Raises:
            OnnxError: the model is broken, has nodes without a translation, or the device is not
                the CPU.
        """
        if not cls.supports_device(device):
            raise OnnxError(
                f"this backend runs on the CPU, not on {device!r}; to use other devices, load the "
                "model with gf.onnx.load, and run its outputs in a session over a cluster"
            )
        return BackendRep(load(model), kwargs.get("deadline", DEADLINE))

    @classmethod
    def run_model(
        cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any
    ) -> tuple[Any, ...]:
        """Load a model, and run it once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node under the opset `opset_version` (default: the newest)."""
        values = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
        names = [name for name in node.input if name]
        given = [_value_info(name, value) for name, value in zip(names, values, strict=True)]
        made = [ValueInfoProto(name=name) for name in node.output if name]
        version = kwargs.get("opset_version")
        imports = None if version is None else [helper.make_opsetid(node.domain, version)]
        graph = helper.make_graph([node], "node", given, made)
        model = helper.make_model(graph, opset_imports=imports)
        return cls.run_model(model, values, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return True for the CPU only. For other devices, run `m.outputs` in a session."""
        return device.split(":", maxsplit=1)[0] == "CPU"


def _value_info(name: str, value: Any) -> ValueInfoProto:
    """Return the ONNX type of a value, with its shape."""
    if not hasattr(value, "dtype"):
        return ValueInfoProto(name=name)
    code = helper.np_dtype_to_tensor_dtype(value.dtype)
    return helper.make_tensor_value_info(name, code, value.shape)


prepare = Backend.prepare
run_model = Backend.run_model
run_node = Backend.run_node
is_compatible = Backend.is_compatible
supports_device = Backend.supports_device
