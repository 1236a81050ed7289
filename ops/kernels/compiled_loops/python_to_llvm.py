"""Plain Python loops as LLVM text: what `native` compiles.

A function is translated for the types of its arguments, and so is all that it calls. Names are
places on the stack, which LLVM's passes turn into registers; types of local names follow from what
they are given, an int that is ever given a float being one throughout.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
from dataclasses import field
from functools import cache
from types import FunctionType, ModuleType

from graphflow.base.digest import sha256
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import CompileError
from graphflow.ops.kernels.compiled_loops import atomics
from graphflow.ops.kernels.compiled_loops.llvm_lines import (
    ITEM,
    LLVM,
    STORED,
    Lines,
    LlvmValue,
    constant,
    join_kinds,
    zero,
)
from graphflow.ops.kernels.compiled_loops.memory_hints import prefetch

MATH = ("exp", "log", "sqrt")
ATOMIC = ("atomic_add", "atomic_load", "yield_thread")
_ARITHMETIC = {
    ast.Add: ("add", "fadd"), ast.Sub: ("sub", "fsub"), ast.Mult: ("mul", "fmul"),
    ast.BitAnd: ("and", ""), ast.BitOr: ("or", ""), ast.BitXor: ("xor", ""),
    ast.LShift: ("shl", ""), ast.RShift: ("ashr", ""),
}  # fmt: skip
_COMPARISON = {
    ast.Eq: ("eq", "oeq"), ast.NotEq: ("ne", "une"), ast.Lt: ("slt", "olt"),
    ast.LtE: ("sle", "ole"), ast.Gt: ("sgt", "ogt"), ast.GtE: ("sge", "oge"),
}  # fmt: skip


@dataclass
class _Unit:
    """The functions of a module, as they are asked for: texts by name and argument types.

    Attributes:
        trees: the functions by name, each with the module that it stands in.
    """

    trees: dict[str, tuple[ast.FunctionDef, ModuleType]]
    texts: dict[str, str] = field(default_factory=dict)
    returns: dict[str, str] = field(default_factory=dict)

    def function(self, name: str, kinds: str) -> tuple[str, str]:
        """Symbol and return type of a function for arguments of these types."""
        symbol = f"{name}.{kinds}"
        if symbol not in self.returns:
            tree, module = self.trees[name]
            if len(tree.args.args) != len(kinds):
                raise CompileError(
                    f"{name} takes {len(tree.args.args)} arguments, not {len(kinds)}"
                )
            known: dict[str, str] = {}
            result = "v"
            while True:  # until the types of local names have settled
                body = _Body(self, tree, module, kinds, dict(known), result)
                body.run()
                if body.kinds == known and body.result == result:
                    break
                known, result = body.kinds, body.result
            self.returns[symbol] = result
            self.texts[symbol] = body.text(symbol)
        return symbol, self.returns[symbol]


class _Body:
    """One function, statement by statement."""

    def __init__(
        self, unit: _Unit, tree: ast.FunctionDef, module: ModuleType, kinds: str,
        known: dict[str, str], result: str,
    ) -> None:  # fmt: skip
        self.unit, self.tree, self.module, self.result = unit, tree, module, result
        self.arguments = [(a.arg, k) for a, k in zip(tree.args.args, kinds, strict=True)]
        self.kinds = known
        self.out = Lines(f"{module.__name__}.{tree.name}")
        self.loops: list[tuple[str, str]] = []
        self.views: dict[str, LlvmValue] = {}
        for name, kind in self.arguments:
            if kind not in ITEM:
                self.kinds.setdefault(name, kind)

    def text(self, symbol: str) -> str:
        """The whole function."""
        given, entry = [], []
        for name, kind in self.arguments:
            given.append(f"{LLVM[kind]} %{name}.given")
            if kind in ITEM:
                given.append(f"i64 %{name}.length")
        for name, kind in self.kinds.items():
            entry.append(f"  %{name} = alloca {LLVM[kind]}")
        for name, kind in self.arguments:
            if kind not in ITEM:
                wide = self.out.convert(LlvmValue(kind, f"%{name}.given"), self.kinds[name], entry)
                entry.append(f"  store {LLVM[wide.kind]} {wide.text}, ptr %{name}")
        end = "ret void" if self.result == "v" else f"ret {LLVM[self.result]} {zero(self.result)}"
        last = [] if not self.out.open else [f"  {end}"]
        return "\n".join(
            [f'define internal {LLVM[self.result]} @"{symbol}"({", ".join(given)}) {{', "entry:",
             *entry, *self.out.lines, *last, "}"]
        )  # fmt: skip

    def run(self) -> None:
        """Translate the statements."""
        self._block(self.tree.body)

    # Statements -------------------------------------------------------------------------------

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if not self.out.open:
                return
            method = getattr(self, f"_{type(statement).__name__.lower()}", None)
            if method is None:
                raise self._error(statement)
            method(statement)

    def _pass(self, node: ast.Pass) -> None:
        return

    def _expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self._value(node.value)

    def _assign(self, node: ast.Assign) -> None:
        if isinstance(node.value, ast.Tuple):
            values = [self._value(v) for v in node.value.elts]
            for target in node.targets:
                if not isinstance(target, ast.Tuple) or len(target.elts) != len(values):
                    raise self._error(node)
                for one, value in zip(target.elts, values, strict=True):
                    self._store(one, value)
            return
        found = self._value(node.value)
        for target in node.targets:
            self._store(target, found)

    def _augassign(self, node: ast.AugAssign) -> None:
        right = self._value(node.value)
        self._store(node.target, self._binary(node.op, self._value(node.target), right, node))

    def _return(self, node: ast.Return) -> None:
        if node.value is None:
            self.out.emit("ret void")
        else:
            value = self._value(node.value)
            self.result = join_kinds(self.result, value.kind)
            value = self.out.convert(value, self.result)
            self.out.emit(f"ret {LLVM[value.kind]} {value.text}")
        self.out.open = False

    def _if(self, node: ast.If) -> None:
        yes, no, end = self.out.label("yes"), self.out.label("no"), self.out.label("end")
        self._branch(node.test, yes, no)
        self.out.start(yes)
        self._block(node.body)
        self.out.jump(end)
        self.out.start(no)
        self._block(node.orelse)
        self.out.jump(end)
        self.out.start(end)

    def _while(self, node: ast.While) -> None:
        test, body, end = self.out.label("test"), self.out.label("body"), self.out.label("done")
        self.out.jump(test)
        self.out.start(test)
        self._branch(node.test, body, end)
        self.out.start(body)
        self._loop(node.body, test, end)
        self.out.jump(test)
        self.out.start(end)

    def _for(self, node: ast.For) -> None:
        call = node.iter
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        if (
            not name or not isinstance(call, ast.Call) or node.orelse
            or getattr(call.func, "id", "") != "range"
        ):  # fmt: skip
            raise self._error(node)
        bounds = [self._value(a).text for a in call.args]
        first, stop = ("0", bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        step = ast.literal_eval(call.args[2]) if len(bounds) == 3 else 1
        counter = f"{name}.counter{node.lineno}"
        self.kinds[counter] = "i"
        test, body, again, end = map(self.out.label, ("test", "body", "again", "done"))
        self.out.emit(f"store i64 {first}, ptr %{counter}")
        self.out.jump(test)
        self.out.start(test)
        at = self.out.emit(f"load i64, ptr %{counter}", "i")
        go = self.out.emit(f"icmp {'slt' if step > 0 else 'sgt'} i64 {at.text}, {stop}", "b")
        self.out.emit(f"br i1 {go.text}, label %{body}, label %{end}")
        self.out.start(body)
        self._store(ast.Name(name), at)
        self._loop(node.body, again, end)
        self.out.jump(again)
        self.out.start(again)
        at = self.out.emit(f"load i64, ptr %{counter}", "i")
        after = self.out.emit(f"add i64 {at.text}, {step}", "i")
        self.out.emit(f"store i64 {after.text}, ptr %{counter}")
        self.out.jump(test)
        self.out.start(end)

    def _loop(self, body: list[ast.stmt], again: str, end: str) -> None:
        self.loops.append((again, end))
        self._block(body)
        self.loops.pop()

    def _break(self, node: ast.Break) -> None:
        self.out.jump(self.loops[-1][1])

    def _continue(self, node: ast.Continue) -> None:
        self.out.jump(self.loops[-1][0])

    def _store(self, target: ast.expr, value: LlvmValue) -> None:
        if isinstance(target, ast.Name):
            if value.kind in ITEM:  # a slice: a view, for as long as this name is not given again
                self.views[target.id] = value
                return
            kind = join_kinds(self.kinds.get(target.id, ""), value.kind)
            self.kinds[target.id] = kind
            value = self.out.convert(value, kind)
            self.out.emit(f"store {LLVM[kind]} {value.text}, ptr %{target.id}")
            return
        if not isinstance(target, ast.Subscript):
            raise self._error(target)
        self.out.store(value, self._place(target))

    # Values -----------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> LlvmValue:
        if isinstance(node, ast.Constant):
            return constant(node.value)
        method = getattr(self, f"_{type(node).__name__.lower()}_value", None)
        if method is None:
            raise self._error(node)
        found: LlvmValue = method(node)
        return found

    def _name_value(self, node: ast.Name) -> LlvmValue:
        for name, kind in self.arguments:
            if name == node.id and kind in ITEM:
                return LlvmValue(kind, f"%{name}.given", f"%{name}.length")
        if node.id in self.views:
            return self.views[node.id]
        kind = self.kinds.get(node.id, "")
        if kind:
            return self.out.emit(f"load {LLVM[kind]}, ptr %{node.id}", kind)
        value = getattr(self.module, node.id, None)
        if isinstance(value, int | float):
            return constant(value)
        raise self._error(node)

    def _subscript_value(self, node: ast.Subscript) -> LlvmValue:
        if not isinstance(node.slice, ast.Slice):
            return self.out.load(self._place(node))
        array = self._value(node.value)
        if node.slice.lower is None or node.slice.upper is None:
            raise self._error(node)
        first, stop = self._value(node.slice.lower), self._value(node.slice.upper)
        item = STORED[array.kind]
        start = self.out.emit(
            f"getelementptr {item}, ptr {array.text}, i64 {first.text}", array.kind
        )
        count = self.out.emit(f"sub i64 {stop.text}, {first.text}", "i")
        return LlvmValue(array.kind, start.text, count.text)

    def _place(self, node: ast.Subscript) -> LlvmValue:
        """The address of an item, with the letter of its array."""
        array = self._value(node.value)
        if array.kind not in ITEM:
            raise self._error(node)
        index = self.out.convert(self._value(node.slice), "i")
        return self.out.emit(
            f"getelementptr {STORED[array.kind]}, ptr {array.text}, i64 {index.text}", array.kind
        )

    def _binop_value(self, node: ast.BinOp) -> LlvmValue:
        return self._binary(node.op, self._value(node.left), self._value(node.right), node)

    def _binary(
        self, op: ast.operator, left: LlvmValue, right: LlvmValue, node: ast.AST
    ) -> LlvmValue:
        if isinstance(op, ast.Div):
            left, right = (self.out.convert(v, "f") for v in (left, right))
            return self.out.emit(f"fdiv double {left.text}, {right.text}", "f")
        kind = join_kinds(join_kinds(left.kind, right.kind), "i")
        left, right = (self.out.convert(v, kind) for v in (left, right))
        if isinstance(op, ast.FloorDiv | ast.Mod) and kind == "i":
            return self.out.whole(isinstance(op, ast.Mod), left.text, right.text)
        names = _ARITHMETIC.get(type(op))
        name = names[kind == "f"] if names else ""
        if not name:
            raise self._error(node)
        return self.out.emit(f"{name} {LLVM[kind]} {left.text}, {right.text}", kind)

    def _unaryop_value(self, node: ast.UnaryOp) -> LlvmValue:
        value = self._value(node.operand)
        if isinstance(node.op, ast.Not):
            return self.out.emit(f"xor i1 {self.out.truth(value)}, true", "b")
        if isinstance(node.op, ast.Invert) and value.kind == "i":
            return self.out.emit(f"xor i64 {value.text}, -1", "i")
        if isinstance(node.op, ast.USub):
            if value.kind == "f":
                return self.out.emit(f"fneg double {value.text}", "f")
            return self.out.emit(f"sub i64 0, {self.out.convert(value, 'i').text}", "i")
        raise self._error(node)

    def _compare_value(self, node: ast.Compare) -> LlvmValue:
        left, found = self._value(node.left), ""
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self._value(comparator)
            kind = join_kinds(join_kinds(left.kind, right.kind), "i")
            a, b = (self.out.convert(v, kind) for v in (left, right))
            word = "fcmp" if kind == "f" else "icmp"
            how = _COMPARISON[type(op)][kind == "f"]
            one = self.out.emit(f"{word} {how} {LLVM[kind]} {a.text}, {b.text}", "b").text
            found = self.out.emit(f"and i1 {found}, {one}", "b").text if found else one
            left = right
        return LlvmValue("b", found)

    def _boolop_value(self, node: ast.BoolOp) -> LlvmValue:
        return self._compile_choice(node, node, ast.Constant(True), ast.Constant(False))

    def _ifexp_value(self, node: ast.IfExp) -> LlvmValue:
        return self._compile_choice(node, node.test, node.body, node.orelse)

    def _compile_choice(
        self, node: ast.expr, test: ast.expr, first: ast.expr, second: ast.expr
    ) -> LlvmValue:
        yes, no, end = self.out.label("yes"), self.out.label("no"), self.out.label("end")
        name = f"choice{node.lineno}.{node.col_offset}"
        self._branch(test, yes, no)
        for label, branch in ((yes, first), (no, second)):
            self.out.start(label)
            self._store(ast.Name(name), self._value(branch))
            self.out.jump(end)
        self.out.start(end)
        return self._name_value(ast.Name(name))

    def _call_value(self, node: ast.Call) -> LlvmValue:
        name = getattr(node.func, "id", "")
        values = [self._value(a) for a in node.args]
        if node.keywords or not name:
            raise self._error(node)
        if name in ATOMIC and getattr(self.module, name, None) is getattr(atomics, name):
            found = self.out.atomic(name, values)
            if found is None:
                raise self._error(node)
            return found
        if name == "prefetch" and getattr(self.module, name, None) is prefetch:
            if [v.kind in ITEM for v in values] != [True, False] or values[1].kind != "i":
                raise self._error(node)
            return self.out.prefetch(values[0], values[1])
        if name in self.unit.trees:
            return self._compile_call(name, values)
        if name in ("min", "max") and len(values) > 1:
            return self.out.extreme(name, values)
        if name == "len" and values[0].kind in ITEM:
            return LlvmValue("i", values[0].length)
        if name in ("float", "int", "bool") and len(values) == 1:
            if name == "bool":
                return LlvmValue("b", self.out.truth(values[0]))
            if name == "int" and values[0].kind == "f":
                return self.out.emit(f"fptosi double {values[0].text} to i64", "i")
            return self.out.convert(values[0], name[0])
        if name in MATH and getattr(self.module, name, None) is getattr(math, name):
            x = self.out.convert(values[0], "f")
            return self.out.emit(f"call double @{name}(double {x.text})", "f")
        raise self._error(node)

    def _compile_call(self, name: str, values: list[LlvmValue]) -> LlvmValue:
        symbol, result = self.unit.function(name, "".join(v.kind for v in values))
        given = []
        for value in values:
            given.append(f"{LLVM[value.kind]} {value.text}")
            if value.kind in ITEM:
                given.append(f"i64 {value.length}")
        return self.out.emit(f'call {LLVM[result]} @"{symbol}"({", ".join(given)})', result)

    def _branch(self, test: ast.expr, yes: str, no: str) -> None:
        """Branch to one of two labels, with short-circuit evaluation."""
        if isinstance(test, ast.BoolOp):
            both = isinstance(test.op, ast.And)
            for part in test.values[:-1]:
                go = self.out.label("next")
                self._branch(part, go if both else yes, no if both else go)
                self.out.start(go)
            self._branch(test.values[-1], yes, no)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._branch(test.operand, no, yes)
        else:
            truth = self.out.truth(self._value(test))
            self.out.emit(f"br i1 {truth}, label %{yes}, label %{no}")

    def _error(self, node: ast.AST) -> CompileError:
        line = getattr(node, "lineno", self.tree.lineno)
        return CompileError(
            f"{self.out.where}, line {line}: {ast.unparse(node)[:80]!r} has no native form"
        )


def program(module: ModuleType, name: str, kinds: str) -> tuple[str, str, str]:
    """LLVM text for a function and all that it calls; the symbol to call, and what it returns."""
    functions, inner, symbol, result = _functions(module, name, kinds)
    outside, inside, lines = [], [], []
    for i, kind in enumerate(kinds):
        outside.append(f"{'i64' if kind == 'b' else LLVM[kind]} %a{i}")
        inside.append(f"{LLVM[kind]} %a{i}" + (".bit" if kind == "b" else ""))
        if kind == "b":
            lines.append(f"  %a{i}.bit = icmp ne i64 %a{i}, 0")
        if kind in ITEM:
            outside.append(f"i64 %n{i}")
            inside.append(f"i64 %n{i}")
    call = f'call {LLVM[result]} @"{inner}"({", ".join(inside)})'
    back = "i64" if result == "b" else LLVM[result]
    if result == "v":
        lines += [f"  {call}", "  ret void"]
    else:
        lines.append(f"  %r = {call}")
        lines += ["  %wide = zext i1 %r to i64"] if result == "b" else []
        lines.append(f"  ret {back} {'%wide' if result == 'b' else '%r'}")
    entry = "\n".join([f"define {back} @{symbol}({', '.join(outside)}) {{", *lines, "}"])
    return f"{_DECLARED}\n{functions}\n{entry}\n", symbol, result


def table_program(module: ModuleType, name: str, kinds: str) -> tuple[str, str]:
    """LLVM text for a function without a result, as entries of tables of native calls run it.

    Its first two arguments are `start` and `stop`. The table of pointers holds its arrays. The
    table of sizes holds its numbers and the lengths of its arrays, in the order of the arguments.

    Returns:
        The text, and the symbol to call.
    """
    functions, inner, symbol, result = _functions(module, name, kinds)
    if kinds[:2] != "ii" or result != "v":
        raise CompileError(f"{name} is no function of start, stop and more that returns None")
    lines, given, pointers = [], ["i64 %start", "i64 %stop"], 0
    for i, kind in enumerate(kinds[2:]):
        if kind in ITEM:
            lines += [
                f"  %p{i} = getelementptr ptr, ptr %ptrs, i64 {pointers}",
                f"  %a{i} = load ptr, ptr %p{i}, align 8",
            ]
            given.append(f"ptr %a{i}")
            pointers += 1
        stored = "i64" if kind in ITEM else LLVM[kind]
        lines += [
            f"  %q{i} = getelementptr i64, ptr %sizes, i64 {i}",
            f"  %n{i} = load {stored}, ptr %q{i}, align 8",
        ]
        given.append(f"{stored} %n{i}")
    lines += [f'  call void @"{inner}"({", ".join(given)})', "  ret void"]
    head = f"define void @{symbol}(ptr %ptrs, ptr %sizes, i64 %start, i64 %stop) {{"
    return "\n".join([_DECLARED, functions, head, *lines, "}", ""]), symbol


_DECLARED = "\n".join(
    [f"declare double @{f}(double)" for f in MATH]
    + ["declare i32 @sched_yield()", "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"]
)


def _functions(module: ModuleType, name: str, kinds: str) -> tuple[str, str, str, str]:
    """The texts of a function and all that it calls, its name in them, a symbol, and what it
    returns."""
    unit = _Unit(_trees(module))
    inner, result = unit.function(name, kinds)
    functions = "\n".join(unit.texts.values())
    symbol = f"graphflow_{sha256((functions + inner).encode()).hex()[:32]}"
    return functions, inner, symbol, result


@cache
def _trees(module: ModuleType) -> dict[str, tuple[ast.FunctionDef, ModuleType]]:
    """The functions of a module of loops, and those of the modules it imports them from."""
    trees: dict[str, tuple[ast.FunctionDef, ModuleType]] = {}
    for value in vars(module).values():
        source = value.__module__ if isinstance(value, FunctionType) else module.__name__
        if source != module.__name__:
            trees |= _trees(sys.modules[source])
    tree = ast.parse(inspect.getsource(module))
    own = {node.name: (node, module) for node in tree.body if isinstance(node, ast.FunctionDef)}
    return trees | own
