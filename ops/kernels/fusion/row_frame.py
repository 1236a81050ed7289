"""The function around the passes over a row, and its loop over units: rows or column strips.

Pointers, sizes and strides are loaded once. Each unit then finds its indices along the outer axes
and the addresses of its streams.
"""

from __future__ import annotations

from graphflow.ops.kernels.codegen.vector_writer import ELEMENTS
from graphflow.ops.kernels.fusion.row_passes import LANES, PassPlanner


class RowFrame(PassPlanner):
    """Writes the code before and after the loops of the passes."""

    def _head(self) -> list[str]:
        """Write the function up to the first pass: loads, and the start of each unit."""
        count = len(self.region.operands) + len(self.region.results)
        lines = ["(ptr %ptrs, ptr %sizes, i64 %start, i64 %stop) {", "entry:"]
        for i in range(count + bool(self.kept)):
            lines += [
                f"  %pp{i} = getelementptr ptr, ptr %ptrs, i64 {i}",
                f"  %p{i} = load ptr, ptr %pp{i}, align 8",
            ]
        lines.append("  %n = load i64, ptr %sizes, align 8")
        lines += self._sizes()
        moving = {s.number: s for each in self.passes for s in (*each.reads, *each.writes)}
        if not self.down:
            lines += [
                f"  %t.{s.name} = alloca <{LANES} x {s.stored}>, align 64" for s in moving.values()
            ]
        lines += self._lane_mask() if not self.down else []
        slots = "%n" if self.down else "%slots"
        lines += ["  %slots = add i64 %vectors, 1"] if not self.down else []
        if self.kept:
            lines.append(f"  %zsize = mul i64 {slots}, {LANES * 8}")
            for i in range(len(self.kept)):
                lines += [
                    f"  %zo{i} = mul i64 %zsize, {i}",
                    f"  %z{i} = getelementptr i8, ptr %p{count}, i64 %zo{i}",
                ]
        kinds = {s.dtype.name for s in self.used if s.kind == "count"}
        for name in sorted(kinds):
            lines.append(f"  %count.{ELEMENTS[name]} = uitofp i64 %n to {ELEMENTS[name]}")
        lines += self.entry
        lines += [
            "  br label %unit",
            "unit:",
            "  %u = phi i64 [%start, %entry], [%u.next, %unit.end]",
        ]
        return [*lines, *self._unit_start(), *self.between[0]]

    def _sizes(self) -> list[str]:
        """Load sizes of axes, and strides of streams in bytes."""
        lines, at = [], 1
        if self.down:
            lines += [
                "  %widthp = getelementptr i64, ptr %sizes, i64 1",
                "  %width = load i64, ptr %widthp, align 8",
                f"  %width.up = add i64 %width, {LANES - 1}",
                f"  %blocks = lshr i64 %width.up, {LANES.bit_length() - 1}",
            ]
            at = 2
        for axis in range(1, self.outer):
            lines += [
                f"  %dp{axis} = getelementptr i64, ptr %sizes, i64 {at}",
                f"  %d{axis} = load i64, ptr %dp{axis}, align 8",
            ]
            at += 1
        for s in self.streams.values():
            for axis in range(self.moves):
                place = at + s.number * self.moves + axis
                name = f"{s.name}.{axis}"
                lines += [
                    f"  %sp.{name} = getelementptr i64, ptr %sizes, i64 {place}",
                    f"  %s.{name} = load i64, ptr %sp.{name}, align 8",
                ]
        return lines

    def _lane_mask(self) -> list[str]:
        """Write how many vectors a row has, and a mask of the last one's lanes."""
        index = ", ".join(f"i32 {i}" for i in range(LANES))
        kind = f"<{LANES} x i32>"
        return [
            f"  %vectors = lshr i64 %n, {LANES.bit_length() - 1}",
            f"  %rest = and i64 %n, {LANES - 1}",
            "  %even = icmp eq i64 %rest, 0",
            "  %rest32 = trunc i64 %rest to i32",
            f"  %rest.1 = insertelement {kind} poison, i32 %rest32, i64 0",
            f"  %rests = shufflevector {kind} %rest.1, {kind} poison, "
            f"<{LANES} x i32> zeroinitializer",
            f"  %lanes = icmp ult {kind} <{index}>, %rests",
        ]

    def _unit_start(self) -> list[str]:
        return [*self._unit_addresses(), *(self._strip_start("%block") if self.down else ())]

    def _unit_addresses(self) -> list[str]:
        """Write the unit's index along each outer axis, and its streams' addresses.

        For columns these are the addresses of the first strip (%r), for rows the final ones (%b).
        """
        lines, left, name = [], "%u", "b"
        if self.down:
            lines, left, name = ["  %block = urem i64 %u, %blocks",
                                 "  %row = udiv i64 %u, %blocks"], "%row", "r"  # fmt: skip
        for axis in range(self.outer - 1, 0, -1):
            lines += [
                f"  %at{axis} = urem i64 {left}, %d{axis}",
                f"  %left{axis} = udiv i64 {left}, %d{axis}",
            ]
            left = f"%left{axis}"
        lines.append(f"  %at0 = add i64 {left}, 0")
        for s in self.streams.values():
            total = "0"
            for axis in range(self.outer):
                moved = f"{s.name}.{axis}"
                lines += [
                    f"  %m.{moved} = mul i64 %at{axis}, %s.{moved}",
                    f"  %o.{moved} = add i64 {total}, %m.{moved}",
                ]
                total = f"%o.{moved}"
            lines.append(f"  %{name}.{s.name} = getelementptr i8, ptr %p{s.number}, i64 {total}")
        return lines

    def _strip_start(self, block: str) -> list[str]:
        """Write a strip's first column, a mask of its columns, and its streams' addresses."""
        index = ", ".join(f"i32 {i}" for i in range(LANES))
        kind = f"<{LANES} x i32>"
        lines = [
            f"  %column = shl i64 {block}, {LANES.bit_length() - 1}",
            "  %there = sub i64 %width, %column",
            f"  %full = icmp uge i64 %there, {LANES}",
            f"  %some = select i1 %full, i64 {LANES}, i64 %there",
            "  %there.1 = trunc i64 %some to i32",
            f"  %there.2 = insertelement {kind} poison, i32 %there.1, i64 0",
            f"  %theres = shufflevector {kind} %there.2, {kind} poison, "
            f"<{LANES} x i32> zeroinitializer",
            f"  %lanes = icmp ult {kind} <{index}>, %theres",
        ]
        for s in self.streams.values():
            lines += [
                f"  %cb.{s.name} = mul i64 %column, {s.itemsize if s.axes[-1] else 0}",
                f"  %b.{s.name} = getelementptr i8, ptr %r.{s.name}, i64 %cb.{s.name}",
            ]
        return lines

    def _foot(self) -> list[str]:
        """Write the rest of the function, after the last pass."""
        return ["  br label %unit.end", *self._next_unit("1")]

    def _next_unit(self, done: str) -> list[str]:
        return [
            "unit.end:",
            f"  %u.next = add i64 %u, {done}",
            "  %units = icmp ult i64 %u.next, %stop",
            "  br i1 %units, label %unit, label %done",
            "done:",
            "  ret void",
            "}",
        ]
