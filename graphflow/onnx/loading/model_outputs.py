"""A model's outputs as tensors; the error for an output that is none names a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphflow.errors import OnnxError
from graphflow.ir.op import Tensor
from graphflow.ir.spec import show_shape
from graphflow.onnx.loading.reading.value_kinds import Known
from graphflow.onnx.loading.translation.segments import ImportedSegment


class ModelOutputs(Mapping[str, Tensor]):
    """A model's outputs by name. Access to an output that is no tensor raises OnnxError."""

    def __init__(self, names: Sequence[str], segment: ImportedSegment, file: str) -> None:
        self._names = tuple(names)
        self._segment = segment
        self._file = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return f"<Outputs of {self._file}: {', '.join(self._names)}>"

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise OnnxError(f"{self._file} has no output {name!r}; it has {', '.join(self._names)}")
        value = self._segment.values.get(name)
        if isinstance(value, Known):
            return value.tensor()
        if isinstance(value, Tensor):
            return value
        stop = self._segment.stop
        why = stop.why if stop is not None else "it is not a tensor"
        raise OnnxError(
            f"output {name!r} of {self._file} is not a tensor of one graph: {why}; "
            f"{_remedy(self._segment)}"
        )


def _remedy(segment: ImportedSegment) -> str:
    """Return the remedies: arguments of load that make it one graph, or m.run."""
    stop = segment.stop
    host = "use m.run, which takes the steps on the host as well"
    if stop is None:
        return host
    options = []
    symbolic = {n: t.shape for n, t in segment.inputs.items() if not t.spec.is_concrete}
    if stop.fed:
        values = ", ".join(f"{name!r}: …" for name in stop.fed)
        options.append(f"give what decides it to load(values={{{values}}})")
    if stop.sized and symbolic:
        shapes = ", ".join(f"{name!r}: {show_shape(shape)}" for name, shape in symbolic.items())
        options.append(f"give all sizes, as numbers, to load(shapes={{{shapes}}})")
    if stop.kind == "rank":
        options.append("give all sizes, as numbers, to load(shapes=…)")
    return ", ".join([" and ".join(options), f"or {host}"]) if options else host


__all__ = ["ModelOutputs"]
