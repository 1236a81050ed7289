"""The writer of a region's CUDA kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import cache
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import Untraceable
from graphflow.ir.spec import as_dtype
from graphflow.ops.kernels.codegen.expression_trace import ScalarStep
from graphflow.ops.kernels.codegen.functions import FUNCTIONS
from graphflow.ops.kernels.codegen.region import Region
from graphflow.ops.kernels.codegen.scalar_steps import write_step
from graphflow.ops.kernels.codegen.vector_writer import ELEMENTS, Floats, Module
from graphflow.ops.kernels.cuda.scalar_writer import C_TYPES, CudaScalarWriter
from graphflow.ops.kernels.fusion.row_passes import COMBINING_STEPS, neutral_element

THREADS = 256
"""Threads of a block, of an elementwise kernel and of one over rows."""
COLUMN_THREADS = 512
_ONCE, _ROW, _ELEMENT = 0, 1, 2


def itemsize_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def element_of(dtype: np.dtype[Any]) -> str:
    halves = {"float16": "half", "bfloat16": "bfloat"}
    return halves.get(dtype.name) or ELEMENTS[dtype.name]


def storage_type(dtype: np.dtype[Any]) -> str:
    return "u8" if dtype.kind == "b" else C_TYPES[element_of(dtype)]


@dataclass
class CudaRegionWriter:
    """Writes the kernel of a region whose steps are added in order."""

    region: Region
    wide: bool
    needs: dict[str, str] = field(default_factory=dict)
    results: list[ScalarStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.module = Module()
        self.steps: list[ScalarStep] = []
        self.levels: dict[ScalarStep, int] = {}
        self.stages: dict[ScalarStep, int] = {}
        rank = self.region.rank
        self.reduced = {"": None, "rows": rank - 1, "columns": rank - 2}[self.region.over]

    @property
    def vector(self) -> int:
        """Elements of a vector: 16 bytes of the widest dtype."""
        moving = [itemsize_of(o.dtype) for o in self.region.operands if o.axes[-1]]
        return max(1, 16 // max([*moving, *(r.dtype.itemsize for r in self.results)]))

    def add(self, step: ScalarStep) -> None:
        """Add the next step: find what it depends on, and after how many passes it is known."""
        self.steps.append(step)
        stage = max((self.stages[a] for a in step.args), default=0)
        level = max((self.levels[a] for a in step.args), default=_ONCE)
        if step.kind == "input":
            axes = self.region.operands[step.value].axes
            along = self.reduced is None or axes[self.reduced]
            level = _ELEMENT if along and any(axes) else _ROW if any(axes) else _ONCE
        elif step.kind == "place":
            level = _ELEMENT
        elif step.kind in COMBINING_STEPS:
            level, stage = _ROW, stage + 1
        self.levels[step], self.stages[step] = level, stage

    # Steps ------------------------------------------------------------------------------------

    def write(self, step: ScalarStep, lines: list[str], values: dict[ScalarStep, str]) -> None:
        """Write a step that is neither an input nor a reduction."""
        lanes = CudaScalarWriter(self.module, lines)
        element = element_of(step.dtype)
        if step.kind == "constant":
            values[step] = lanes.constant(step.value, element)
        elif step.kind == "count":
            values[step] = lanes.define(element, f"({C_TYPES[element]})d{self.reduced}")
        elif step.kind == "place":
            values[step] = lanes.define(element, f"({C_TYPES[element]})i")
        else:
            args = [values[a] for a in step.args]
            values[step] = self._write_computed(lanes, step, args)

    def _write_computed(self, lanes: CudaScalarWriter, step: ScalarStep, args: list[str]) -> str:
        element = element_of(step.dtype)
        source = element_of(step.args[0].dtype)
        if step.kind == "convert" and "half" in (source, element):
            way = "from" if source == "half" else "to"
            return lanes.define(element, f"gf_{way}_half({args[0]})")
        if step.kind == "convert" and "bfloat" in (source, element):
            way = "from" if source == "bfloat" else "to"
            return lanes.define(element, f"gf_{way}_bfloat({args[0]})")
        if step.kind in FUNCTIONS:
            name = f"gf_{step.kind}_{element}"
            if name not in self.needs:
                self.needs[name] = _write_float_function(name, step.kind, element)
            return lanes.define(element, f"{name}({', '.join(args)})")
        return write_step(lanes, step, args)

    def _reduction(self, step: ScalarStep) -> str:
        """Return the name of the function that combines the lanes' values."""
        element = element_of(step.dtype)
        name = f"gf_{step.kind}_{element}"
        if name not in self.needs:
            kind = C_TYPES[element]
            lines: list[str] = []
            pair = ScalarStep(
                COMBINING_STEPS[step.kind],
                (_any_step(step.dtype), _any_step(step.dtype)),
                step.dtype,
            )
            value = write_step(CudaScalarWriter(Module(), lines), pair, ["a", "b"])
            self.needs[name] = _TREE_REDUCTION.format(
                name=name, type=kind, body="\n".join(lines), value=value
            )
        return name

    # Places -----------------------------------------------------------------------------------

    def offset(self, axes: Sequence[bool]) -> str:
        """Return the index of an operand's element at the coordinates c0, c1…."""
        terms, step = [], ""
        for axis in reversed(range(len(axes))):
            if axes[axis]:
                terms.append(f"c{axis}{step}")
                step += f" * d{axis}"
        return " + ".join(reversed(terms)) or "0"

    def _coordinates(self, of: str, axes: Sequence[int]) -> list[str]:
        """Return statements that split an index into coordinates, the last axis running fastest."""
        lines, left = [], of
        for axis in reversed(axes[1:]):
            lines.append(f"    const I c{axis} = {left} % d{axis}, t{axis} = {left} / d{axis};")
            left = f"t{axis}"
        return [*lines, *(f"    const I c{axis} = {left};" for axis in axes[:1])]

    def _load(
        self, step: ScalarStep, values: dict[ScalarStep, str], lines: list[str], place: str
    ) -> None:
        test = " != 0" if step.dtype.kind == "b" else ""
        lanes = CudaScalarWriter(self.module, lines)
        values[step] = lanes.define(element_of(step.dtype), f"in{step.value}[{place}]{test}")

    # The frame --------------------------------------------------------------------------------

    def text(self) -> str:
        parameters = [
            f"const {storage_type(self._dtype(i))}* in{i}" for i in range(len(self.region.operands))
        ]
        parameters += [f"{storage_type(r.dtype)}* out{i}" for i, r in enumerate(self.results)]
        numbers = {"": ("n", "vectors"), "rows": ("rows", "lanes"), "columns": ("outer", "width")}
        parameters += [f"u64 {name}_" for name in numbers[self.region.over]]
        parameters += [f"u64 d{axis}_" for axis in range(self.region.rank)]
        threads = COLUMN_THREADS if self.region.over == "columns" else THREADS
        head = [
            f'extern "C" __global__ void __launch_bounds__({threads})',
            f"@NAME@({', '.join(parameters)}) {{",
            f"  typedef {'u64' if self.wide else 'u32'} I;",
            *(f"  const I {name} = (I){name}_;" for name in numbers[self.region.over]),
            *(f"  const I d{axis} = (I)d{axis}_;" for axis in range(self.region.rank)),
        ]
        before, body = (
            ([], self._write_row_passes()) if self.region.over else self._write_elementwise()
        )
        return "\n".join([*before, *head, *body, "}", ""])

    def _dtype(self, number: int) -> np.dtype[Any]:
        return as_dtype(self.region.operands[number].dtype)

    # Elementwise ------------------------------------------------------------------------------

    def _write_elementwise(self) -> tuple[list[str], list[str]]:
        """Write a function of one element, and the loops over elements."""
        operands = [s for s in self.steps if s.kind == "input"]
        if not operands:
            raise Untraceable("a region reads nothing")
        values: dict[ScalarStep, str] = {}
        lines: list[str] = []
        for step in self.steps:
            if step.kind != "input":
                self.write(step, lines, values)
            else:
                values[step] = f"x{step.value}" + (" != 0" if step.dtype.kind == "b" else "")
                if step.dtype.kind == "b":
                    values[step] = CudaScalarWriter(self.module, lines).define("i1", values[step])
        given = [f"const {storage_type(s.dtype)} x{s.value}" for s in operands]
        given += [f"{storage_type(r.dtype)}& y{i}" for i, r in enumerate(self.results)]
        stores = [
            f"  y{i} = {f'({values[r]}) ? 1 : 0' if r.dtype.kind == 'b' else values[r]};"
            for i, r in enumerate(self.results)
        ]
        function = [
            f"static __device__ __forceinline__ void @NAME@_at({', '.join(given)}) {{",
            *lines, *stores, "}",
        ]  # fmt: skip
        return function, [
            "  const I stride = (I)gridDim.x * blockDim.x;",
            "  const I first = (I)blockIdx.x * blockDim.x + threadIdx.x;",
            *self._vector_loop(operands),
            *self._element_loop(operands),
        ]

    def _vector_loop(self, operands: Sequence[ScalarStep]) -> list[str]:
        vector = self.vector
        lines = [
            "  for (I q = first; q < vectors; q += stride) {",
            f"    const I e = q * {vector};",
        ]
        lines += self._coordinates("e", range(self.region.rank))
        given = []
        for step in operands:
            axes, i, kind = (
                self.region.operands[step.value].axes,
                step.value,
                storage_type(step.dtype),
            )
            place = "e" if all(axes) else self.offset(axes)
            if axes[-1]:
                pack = f"gf_pack<{kind}, {vector}>"
                lines.append(f"    const {pack} p{i} = *(const {pack}*)(in{i} + ({place}));")
                given.append(f"p{i}.v[k]")
            else:
                lines.append(f"    const {kind} p{i} = in{i}[{place}];")
                given.append(f"p{i}")
        for i, r in enumerate(self.results):
            lines.append(f"    gf_pack<{storage_type(r.dtype)}, {vector}> r{i};")
            given.append(f"r{i}.v[k]")
        lines += [
            "    #pragma unroll",
            f"    for (int k = 0; k < {vector}; ++k) @NAME@_at({', '.join(given)});",
        ]
        for i, r in enumerate(self.results):
            lines.append(f"    *(gf_pack<{storage_type(r.dtype)}, {vector}>*)(out{i} + e) = r{i};")
        return [*lines, "  }"]

    def _element_loop(self, operands: Sequence[ScalarStep]) -> list[str]:
        lines = [f"  for (I e = vectors * {self.vector} + first; e < n; e += stride) {{"]
        lines += self._coordinates("e", range(self.region.rank))
        given = []
        for step in operands:
            axes = self.region.operands[step.value].axes
            given.append(f"in{step.value}[{'e' if all(axes) else self.offset(axes)}]")
        for i, r in enumerate(self.results):
            lines.append(f"    {storage_type(r.dtype)} r{i};")
            given.append(f"r{i}")
        lines.append(f"    @NAME@_at({', '.join(given)});")
        lines += [f"    out{i}[e] = r{i};" for i in range(len(self.results))]
        return [*lines, "  }"]

    # Along rows -------------------------------------------------------------------------------

    def _write_row_passes(self) -> list[str]:
        """Write the passes over each row, between which its reductions become known."""
        last = max(self.stages.values(), default=0)
        values: dict[ScalarStep, str] = {}
        lines: list[str] = []
        for stage in range(last + 1):
            for step in self.steps:
                if self.stages[step] == stage and self.levels[step] != _ELEMENT:
                    self._row_step(step, lines, values)
            waiting = [
                s for s in self.steps if s.kind in COMBINING_STEPS and self.stages[s] == stage + 1
            ]
            if waiting:
                lines += self._write_pass(waiting, values)
        return [*self._row_loop_head(), *lines, *self._write_stores(values), "  }"]

    def _row_step(self, step: ScalarStep, lines: list[str], values: dict[ScalarStep, str]) -> None:
        if step in values:
            return  # the value of a reduction, from its pass
        if step.kind == "input":
            self._load(step, values, lines, self.offset(self.region.operands[step.value].axes))
        else:
            self.write(step, lines, values)

    def _row_loop_head(self) -> list[str]:
        """Write the head of the loop over rows, which all threads of a block run together."""
        outer = list(range(self.region.rank - 1))
        if self.region.over == "rows":
            return [
                f"  __shared__ u64 shared[{THREADS}];",
                "  const u32 lane = threadIdx.x % lanes, groups = blockDim.x / lanes, apart = 1;",
                "  const u32 group = threadIdx.x / lanes;",
                "  for (I base = (I)blockIdx.x * groups; base < rows; "
                "base += (I)gridDim.x * groups) {",
                "    const bool real = base + group < rows;",
                "    const I row = real ? base + group : rows - 1;",
                *self._coordinates("row", outer),
            ]
        rank = self.region.rank
        return [
            f"  __shared__ u64 shared[{COLUMN_THREADS}];",
            "  const u32 apart = width, lane = threadIdx.x / apart, lanes = blockDim.x / apart;",
            f"  const I tiles = (d{rank - 1} + width - 1) / width;",
            "  for (I tile = blockIdx.x; tile < outer * tiles; tile += gridDim.x) {",
            "    const I column = tile % tiles * width + threadIdx.x % apart;",
            f"    const bool real = column < d{rank - 1};",
            f"    const I c{rank - 1} = real ? column : d{rank - 1} - 1, row = tile / tiles;",
            *self._coordinates("row", range(rank - 2)),
        ]

    def _lane_loop(
        self, wanted: Iterable[ScalarStep], values: dict[ScalarStep, str]
    ) -> tuple[list[str], Any]:
        """Write the loop over a lane's elements of the row, with the steps that `wanted` needs."""
        mine = dict(values)
        lines = [
            f"    for (I i = lane; i < d{self.reduced}; i += lanes) {{",
            f"      const I c{self.reduced} = i;",
        ]
        needed = set(wanted)
        for step in reversed(self.steps):
            if step in needed and self.levels[step] == _ELEMENT:
                needed.update(step.args)
        for step in self.steps:
            if step in needed and self.levels[step] == _ELEMENT:
                if step.kind == "input":
                    axes = self.region.operands[step.value].axes
                    self._load(step, mine, lines, self.offset(axes))
                else:
                    self.write(step, lines, mine)
        return lines, mine

    def _write_pass(
        self, waiting: Sequence[ScalarStep], values: dict[ScalarStep, str]
    ) -> list[str]:
        loop, mine = self._lane_loop([s.args[0] for s in waiting], values)
        before: list[str] = []
        after: list[str] = []
        for step in waiting:
            element = element_of(step.dtype)
            name = self.module.name().removeprefix("%")
            start = CudaScalarWriter(self.module, []).constant(neutral_element(step), element)
            before.append(f"    {C_TYPES[element]} {name} = {start};")
            lanes = CudaScalarWriter(self.module, loop)
            pair = ScalarStep(
                COMBINING_STEPS[step.kind],
                (_any_step(step.dtype), _any_step(step.dtype)),
                step.dtype,
            )
            loop.append(f"      {name} = {write_step(lanes, pair, [name, mine[step.args[0]]])};")
            call = f"{self._reduction(step)}(shared, {name}, lane, lanes, apart)"
            values[step] = CudaScalarWriter(self.module, after).define(element, call)
        return [*before, *loop, "    }", *after]

    def _write_stores(self, values: dict[ScalarStep, str]) -> list[str]:
        """Write the stores: of elements in a last pass, of rows by the first lane."""
        whole = [(i, r) for i, r in enumerate(self.results) if self.levels[r] == _ELEMENT]
        full = (True,) * self.region.rank
        applied = [self.region.ops[i] for i in self.region.results]
        whole += [
            (i, r)
            for i, r in enumerate(self.results)
            if self.levels[r] != _ELEMENT and applied[i].whole
        ]
        lines = []
        if whole:
            loop, mine = self._lane_loop([r for _, r in whole], values)
            lines += ["    if (real) {", *loop]
            lines += [
                f"      out{i}[{self.offset(full)}] = {_storage_value(r, mine[r])};"
                for i, r in whole
            ]
            lines += ["    }", "    }"]
        some = tuple(axis != self.reduced for axis in range(self.region.rank))
        lines += [
            f"    if (real && lane == 0) out{i}[{self.offset(some)}] = "
            f"{_storage_value(r, values[r])};"
            for i, r in enumerate(self.results)
            if not applied[i].whole
        ]
        return lines


def _storage_value(step: ScalarStep, value: str) -> str:
    return f"({value}) ? 1 : 0" if step.dtype.kind == "b" else value


@cache
def _any_step(dtype: np.dtype[Any]) -> ScalarStep:
    """Return a step that stands for any value of a dtype."""
    return ScalarStep("input", (), dtype, 0)


@cache
def _write_float_function(name: str, kind: str, element: str) -> str:
    """Write a function of floats (exp, erf…) that the kernels of a module call."""
    lines: list[str] = []
    names = ["x", "y"][: 2 if kind == "power" else 1]
    value = FUNCTIONS[kind](Floats(CudaScalarWriter(Module(), lines), element), *names)
    parameters = ", ".join(f"const {element} {n}" for n in names)
    head = f"static __device__ __forceinline__ {element} {name}({parameters}) {{"
    return "\n".join([head, *lines, f"  return {value};", "}"])


_TREE_REDUCTION = """static __device__ {type} {name}(
    u64* memory, const {type} mine, const u32 lane, const u32 lanes, const u32 apart) {{
  {type}* const shared = ({type}*)memory + threadIdx.x;
  __syncthreads();
  *shared = mine;
  __syncthreads();
  for (u32 half = lanes / 2; half > 0; half /= 2) {{
    if (lane < half) {{
      const {type} a = *shared, b = shared[half * apart];
{body}
      *shared = {value};
    }}
    __syncthreads();
  }}
  return *(shared - lane * apart);
}}"""
