"""Bands: columns that one pass reduces, read in the order in which they lie in memory.

Strip after strip, each row would be read in pieces, and a large array would come from memory in an
order that hardware prefetch does not foresee. So the strips of a band advance together: a few rows
of all of them, then the next rows, with the sums so far in memory that the first cache holds. Sums
have the order of `reductions.py`.
"""

from __future__ import annotations

from graphflow.ops.kernels.codegen.expression_trace import ScalarStep
from graphflow.ops.kernels.codegen.region import KernelSource, Region
from graphflow.ops.kernels.fusion.reductions import BLOCK, CHUNK, ReductionWriter, unsigned_minimum

_STRIPS = 32
"""Strips of a band, at most: of float32 a page, whose sums the first cache holds."""
_ROWS = 8
"""Rows at a time; divides `CHUNK`. Sums so far are loaded and stored once for all of them."""
_STREAM_ROW_BYTES, _STREAM_BYTES = 4096, 1 << 20
"""Bytes of a row from which each row is a prefetch stream of its own, of which processors track a
few. Shorter rows are one stream if they are read one at a time. That pays from `_STREAM_BYTES`
bytes on."""


def write_reduction(region: Region, wide: bool = False) -> KernelSource:
    """Write the kernel of a region with reductions.

    Args:
        wide: whether the processor has AVX-512.
    """
    if region.over == "columns":
        bands = _BandWriter(region, wide)
        if bands.fits:
            return bands.source()
    return ReductionWriter(region, wide).source()


class _BandWriter(ReductionWriter):
    """Writes the loops over some rows of a band, over its strips, and over these rows."""

    @property
    def fits(self) -> bool:
        """Return whether one pass reduces the columns and needs no column value before."""
        one_pass = all(self.ready[s] <= (self.levels[s] < 2) for s in self.used) and not any(
            self.ready[s] for s, whole in zip(self.results, self.whole, strict=True) if whole
        )
        before = any(self.levels[s] == 1 and self.ready[s] == 0 for s in self.used)
        return one_pass and not before

    # Where a band and a strip are ---------------------------------------------------------------

    def _unit_start(self) -> list[str]:
        return [
            *self._unit_addresses(),
            "  %strips.row = sub i64 %blocks, %block",
            "  %strips.all = sub i64 %stop, %u",
            *unsigned_minimum("%strips.most", str(_STRIPS), "%strips.row"),
            *unsigned_minimum("%strips", "%strips.most", "%strips.all"),
            *self._rows(),
            "  br label %turn",
            "turn:",
            "  %first = phi i64 [0, %unit], [%stop.rows, %turn.end]",
            "  %first.next = add i64 %first, %rows.most",
            *unsigned_minimum("%stop.rows", "%first.next", "%n"),
            "  %last = icmp eq i64 %stop.rows, %n",
            *self._bounds(),
            "  br label %strip",
            "strip:",
            "  %v = phi i64 [0, %turn], [%v.next, %strip.end]",
            "  %at = add i64 %block, %v",
            *self._strip_start("%at"),
        ]

    def _rows(self) -> list[str]:
        """Write how many rows are read at a time, by the array with the longest rows."""
        longest, lines = "0", []
        for s in self.streams.values():
            if s.axes[self.outer] and s.axes[-1]:
                stride, name = f"%s.{s.name}.{self.outer}", f"%longest.{s.name}"
                lines += [
                    f"  {name}.is = icmp ugt i64 {stride}, {longest}",
                    f"  {name} = select i1 {name}.is, i64 {stride}, i64 {longest}",
                ]
                longest = name
        return [
            *lines,
            f"  %bytes = mul i64 %n, {longest}",
            f"  %is.far = icmp ugt i64 %bytes, {_STREAM_BYTES}",
            f"  %is.short = icmp ult i64 {longest}, {_STREAM_ROW_BYTES}",
            "  %is.stream = and i1 %is.far, %is.short",
            f"  %rows.most = select i1 %is.stream, i64 1, i64 {_ROWS}",
        ]

    # Sums so far --------------------------------------------------------------------------------

    def _sums_address(self, level: int, step: ScalarStep) -> str:
        return f"%a{level}.{self._number(step)}"

    def _load_sums(self, level: int, begins: str, name: str) -> list[str]:
        """Load the sums of a strip on a level, or start them."""
        lines = []
        for s in self.passes[0].sums:
            kind, n = self._vector_type(s), self._number(s)
            lines += [
                f"  %pl{level}.{n} = getelementptr {kind}, ptr {self._sums_address(level, s)}, "
                "i64 %v",
                f"  %kept{level}.{n} = load {kind}, ptr %pl{level}.{n}, align 64",
                f"  {name}.{n} = select i1 {begins}, {kind} {self._neutral(s)}, "
                f"{kind} %kept{level}.{n}",
            ]
        return lines

    def _store_sums(self, level: int, name: str) -> list[str]:
        return [
            f"  store {self._vector_type(s)} {name}.{self._number(s)}, "
            f"ptr %pl{level}.{self._number(s)}, align 64"
            for s in self.passes[0].sums
        ]

    def _add_to_level(self, name: str, sums: str, value: str) -> list[str]:
        """Add the sums of the level below."""
        lines = []
        for s in self.passes[0].sums:
            n = self._number(s)
            lines += self._combine(s, f"{name}.{n}", f"{sums}.{n}", f"{value}.{n}")
        return lines

    # The loops ----------------------------------------------------------------------------------

    def _head(self) -> list[str]:
        lines = super()._head()
        memory = [
            f"  {self._sums_address(level, s)} = alloca [{_STRIPS} x {self._vector_type(s)}], "
            "align 64"
            for level in range(3 if self._is_deep(0) else 1)
            for s in self.passes[0].sums
        ]
        at = lines.index("entry:") + 1
        return [*lines[:at], *memory, *lines[at:]]

    def _pass_loops(self, k: int) -> list[str]:
        each = self.passes[k]
        self._write_body(k)
        number = self._number
        lines = [
            *self._load_sums(0, "%opens", "%s0"),
            "  %none = icmp eq i64 %n, 0",
            "  br i1 %none, label %after, label %rows",
            "rows:",
            f"  %i{k} = phi i64 [%first, %strip], [%next, %rows.end]",
            *(f"  %u0{k}.{number(s)} = phi {self._vector_type(s)} [%s0.{number(s)}, %strip], "
              f"[%w0{k}.{number(s)}, %rows.end]" for s in each.sums),
            *each.lines,
        ]  # fmt: skip
        for s in each.sums:
            lines += self._accumulate(k, s)
        lines += [
            "  br label %rows.end",
            "rows.end:",
            f"  %next = add i64 %i{k}, 1",
            "  %more = icmp ult i64 %next, %stop.rows",
            "  br i1 %more, label %rows, label %after",
            "after:",
            *(f"  %x0.{number(s)} = phi {self._vector_type(s)} [%s0.{number(s)}, %strip], "
              f"[%w0{k}.{number(s)}, %rows.end]" for s in each.sums),
        ]  # fmt: skip
        lines += self._store_or_close()
        for s in each.sums:
            kind, value = self._vector_type(s), f"%x{2 * self._is_deep(k)}.{number(s)}"
            lines.append(f"  %h{k}.{number(s)} = select i1 true, {kind} {value}, {kind} {value}")
            lines += self._fold_lanes(k, s)
        return lines + self.between[k + 1]

    def _bounds(self) -> list[str]:
        """Write whether a chunk, or a block of chunks, begins or ends with these rows."""
        if not self._is_deep(0):
            return ["  %opens = icmp eq i64 %first, 0"]
        rows = CHUNK * BLOCK
        return [
            f"  %in.chunk = and i64 %first, {CHUNK - 1}",
            "  %opens = icmp eq i64 %in.chunk, 0",
            f"  %to.chunk = and i64 %stop.rows, {CHUNK - 1}",
            "  %at.chunk = icmp eq i64 %to.chunk, 0",
            "  %closes = or i1 %at.chunk, %last",
            f"  %in.block = and i64 %first, {rows - 1}",
            f"  %opens.block = icmp ult i64 %in.block, {CHUNK}",
            f"  %to.block = and i64 %stop.rows, {rows - 1}",
            "  %at.block = icmp eq i64 %to.block, 0",
            "  %closes.block = or i1 %at.block, %last",
            f"  %opens.all = icmp ult i64 %first, {rows}",
        ]

    def _store_or_close(self) -> list[str]:
        """Store the sums of these rows, or finish if they are the last.

        At the end of a chunk or a block, they are added to the level above first.
        """
        if not self._is_deep(0):
            return [
                "  br i1 %last, label %finish, label %leave0",
                "leave0:", *self._store_sums(0, "%x0"), "  br label %strip.end",
                "finish:",
            ]  # fmt: skip
        return [
            "  br i1 %closes, label %close1, label %leave0",
            "leave0:", *self._store_sums(0, "%x0"), "  br label %strip.end",
            "close1:", *self._load_sums(1, "%opens.block", "%s1"),
            *self._add_to_level("%x1", "%s1", "%x0"),
            "  br i1 %closes.block, label %close2, label %leave1",
            "leave1:", *self._store_sums(1, "%x1"), "  br label %strip.end",
            "close2:", *self._load_sums(2, "%opens.all", "%s2"),
            *self._add_to_level("%x2", "%s2", "%x1"),
            "  br i1 %last, label %finish, label %leave2",
            "leave2:", *self._store_sums(2, "%x2"), "  br label %strip.end",
            "finish:",
        ]  # fmt: skip

    def _foot(self) -> list[str]:
        return [
            "  br label %strip.end",
            "strip.end:",
            "  %v.next = add i64 %v, 1",
            "  %more.strips = icmp ult i64 %v.next, %strips",
            "  br i1 %more.strips, label %strip, label %turn.end",
            "turn.end:",
            "  br i1 %last, label %unit.end, label %turn",
            *self._next_unit("%strips"),
        ]
