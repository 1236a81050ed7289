"""numpy's functions beside tensors: operators are ours, all else is refused with a remedy."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, GraphError, GraphflowError
from graphflow.ir.name_hints import (
    ATTRIBUTE_HINTS,
    FUNCTION_HINTS,
    MODULE_CALL_HINTS,
    install_module_hints,
    unsupported_message,
)

OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.matmul, operator.lt, operator.le, operator.gt, operator.ge, operator.eq,
    operator.ne, operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift,
]  # fmt: skip


@pytest.mark.parametrize("applied", OPERATORS)
def test_an_operator_between_an_array_and_a_tensor_is_ours(
    applied: Callable[[Any, Any], Any],
) -> None:
    a, b = np.array([[7, 2], [3, 4]]), np.array([[2, 1], [3, 2]])
    x = gf.placeholder("int64", (2, 2))
    with gf.Session() as s:
        assert s.run(applied(a, x), {x: b}).tolist() == applied(a, b).tolist()
        if applied is not operator.matmul:
            assert s.run(applied(a[0, 0], x), {x: b}).tolist() == applied(a[0, 0], b).tolist()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (np.exp, "np.exp at .*; use gf.exp, or"),
        (np.absolute, "use gf.abs, or"),
        (np.add.reduce, "np.add at"),
        (lambda x: np.concatenate([x, x]), "np.concatenate at .*; use gf.concat, or"),
        (np.linalg.det, "np.linalg.det at .*; use gf.linalg.det, or"),
        (np.fft.fft, "np.fft.fft at .*; use gf.fft.fft, or"),
        (np.histogram, "np.histogram at .*; use gf.histogram, or"),
        (
            lambda x: np.percentile(x, 50),
            r"np.percentile at .*; use gf.quantile\(x, q / 100\); or Session.run",
        ),
        (np.cov, "np.cov at .* is built; use Session.run for values$"),
        (np.sinc, r"np.sinc at .*; use gf.where\(x == 0, 1.0, .*; or Session.run for values$"),
        (np.mean, "np.mean at .*; use gf.mean, or"),
    ],
)
def test_another_function_of_numpy_is_refused_with_the_users_line_and_a_remedy(
    asked: Callable[[Any], Any], told: str
) -> None:
    x = gf.placeholder("float32", (2, 2), name="x")
    with pytest.raises(GraphError, match=told) as caught:
        asked(x)
    assert "test_numpy_interop.py:" in str(caught.value).partition(": x (made at")[0]


def test_functions_that_ask_for_an_attribute_are_answered() -> None:
    x = gf.placeholder("float32", ("n", 2))
    assert np.shape(x) == x.shape and np.ndim(x) == 2 and np.real(x) is x.real


def test_every_remedy_is_there() -> None:
    for part in (np, np.linalg, np.fft):
        for name in dir(part):
            function = getattr(part, name)
            if isinstance(function, np.ufunc | FunctionType):
                for found in re.findall(
                    r"use gf\.([\w.]+), or", unsupported_message(function, "x")
                ):
                    operator.attrgetter(found)(gf)
    for told in (*ATTRIBUTE_HINTS.values(), *FUNCTION_HINTS.values()):
        for found in re.findall(r"gf\.([\w.]+)", told):
            operator.attrgetter(found)(gf)


@pytest.mark.parametrize("name", FUNCTION_HINTS)
def test_a_name_that_modules_have_elsewhere_is_told_what_stands_for_it(name: str) -> None:
    for module in (gf, gf.nn):
        with pytest.raises(AttributeError, match=rf"'{name}'; it is .*") as caught:
            getattr(module, name)
        assert (caught.value.name, caught.value.obj) == (name, module)


@pytest.mark.parametrize("name", ["GraphflowError", "OpError", "WorkerLost"])
def test_an_error_is_told_to_be_among_the_errors(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}'; it is gf\.errors\.{name}$"):
        getattr(gf, name)


def test_a_module_that_is_called_says_what_to_use() -> None:
    """Each module that is seen as `gf.name`, also those that are loaded later."""
    assert gf.Session is not None and gf.Plan is not None
    install_module_hints(gf)  # as the next access does: other tests have loaded more modules
    found = {
        name: module
        for name, module in vars(gf).items()
        if isinstance(module, ModuleType) and module.__name__.startswith("graphflow.")
    }
    assert {"frontend", "sessions", "ir", "nn", "optim", "random", "init"} <= {*found}
    for name, module in found.items():
        told = rf"gf\.{name}\(…\) at .*test_numpy_interop.*: gf\.{name} is a module; "
        with pytest.raises(ArgumentError, match=told):
            module(1, shape=2)  # type: ignore[operator]
    with pytest.raises(AttributeError, match=r"gf\.constant\(value\) makes a tensor"):
        gf.tensor([1.0])
    for told in MODULE_CALL_HINTS.values():
        for each in re.findall(r"gf\.([\w.]+)", told):
            operator.attrgetter(each)(gf)


@pytest.mark.parametrize("given", [([1.0, 2.0],), (3,), (2, 3), ()])
def test_a_tensor_that_is_made_as_in_torch_says_what_to_use(given: Any) -> None:
    told = r"gf\.Tensor\(…\) at .*test_numpy_interop.*gf\.constant\(value\) makes a tensor"
    with pytest.raises(ArgumentError, match=told):
        gf.Tensor(*given)
    with pytest.raises(ArgumentError, match=told):
        gf.Tensor(*given, dtype="float32")


def test_a_dataset_that_is_made_as_in_tensorflow_says_what_to_use() -> None:
    with pytest.raises(AttributeError, match=r"Dataset has .*; it is gf\.data\.arrays\(x=…, y=…\)"):
        gf.data.Dataset.from_tensor_slices([1.0])
    with pytest.raises(AttributeError, match=r"Dataset has no attribute 'other'$"):
        gf.data.Dataset.other  # noqa: B018


def test_a_name_with_a_slip_is_told_what_was_meant() -> None:
    for slip, name in (
        ("placholder", "placeholder"),
        ("Sesion", "Session"),
        ("gradient", "gradients"),
    ):
        with pytest.raises(AttributeError, match=f"did you mean '{name}'"):
            getattr(gf, slip)


def test_an_attribute_that_tensors_have_elsewhere_is_told_what_stands_for_it() -> None:
    x = gf.placeholder("float32", (2, 2), name="x")
    for name, told in ATTRIBUTE_HINTS.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; use {re.escape(told)}"):
            getattr(x, name)
    with pytest.raises(AttributeError, match=r"no attribute 'sumn'$"):
        x.sumn  # type: ignore[attr-defined]  # noqa: B018
    for name, told in (
        ("isnan", "gf.isnan(x, …)"), ("cumprod", "gf.cumprod(x, …)"), ("tan", "gf.tan(x, …)"),
        ("slogdet", "gf.linalg.slogdet(x, …)"), ("unfold", "gf.nn.unfold(x, …)"),
        ("amax", "gf.max"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; use {re.escape(told)}$"):
            getattr(x, name)
    with pytest.raises(GraphError, match=r"x \(made at .* at .*test_numpy_interop.*gf.scatter"):
        x[0] = 1


def test_names_in_modules_and_of_optimisers_with_a_slip_are_told_what_was_meant() -> None:
    for module, slip, told in (
        (gf.optim, "adam", "'Adam'"), (gf.parallel, "Dta", "'Data'"), (gf.nn, "Liner", "'Linear'"),
        (gf.init, "glorat", "'glorot'"), (gf.linalg, "choleski", "'cholesky'"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=f"'{slip}'; did you mean {told}"):
            getattr(module, slip)
    assert not hasattr(gf.linalg, "__path__") and not hasattr(gf.nn, "nothing_like_this")
    for name in ("step", "zero_grad", "apply_gradients"):
        with pytest.raises(AttributeError, match=rf"Adam has no .*'{name}'; train = .*minimize"):
            getattr(gf.optim.Adam(0.1), name)
    with pytest.raises(AttributeError, match="did you mean 'minimize'"):
        gf.optim.SGD(0.1).minimise  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda: gf.placeholder("flaot32", (2,)), "'flaot32'.*did you mean 'float32'"),
        (lambda: gf.init.glorot(4, 2), "dtype 2 .*a shape is one argument, such as"),
        (
            lambda: gf.device("cuda:0").__enter__(),
            "'cuda:0' is not a device name; did you mean 'gpu:0'",
        ),
        (lambda: gf.device("gpu0").__enter__(), "did you mean 'gpu:0'"),
        (lambda: gf.device("/Worker:1/CPU:0").__enter__(), "did you mean '/worker:1/cpu:0'"),
        (lambda: gf.device("worker1").__enter__(), "did you mean '/worker:1'"),
        (lambda: gf.device("/device:GPU:0").__enter__(), "did you mean 'gpu:0'"),
        (lambda: gf.device("fast").__enter__(), "not a device name; write '/worker"),
        (lambda: gf.constant("a"), "a tensor of str 'a'; give a tensor, a number"),
        (
            lambda: gf.optim.SGD(0.1).minimize(gf.mean(gf.ones((2,)))),
            "make weights with gf.variable",
        ),
        (lambda: gf.assign(gf.ones((2,)), 1.0), r"is not a variable; gf.variable\(initial\) makes"),
    ],
)
def test_a_beginners_mistake_is_told_what_to_do(mistake: Callable[[], Any], told: str) -> None:
    with pytest.raises(GraphflowError, match=told):
        mistake()


@pytest.mark.parametrize("number", [np.log(1000.0), np.array(2.0)])
def test_an_op_that_minds_float64_tells_which_scalar_of_numpy_made_it(number: Any) -> None:
    x = gf.placeholder("float32", (2, 8))
    wide = gf.nn.Linear(8, 8)(gf.tanh(x * number))
    with pytest.raises(DTypeError, match=r"float64 since multiply at .*interop.*float\(…\)"):
        gf.nn.GroupNorm(2, 8)(wide)
    gf.nn.GroupNorm(2, 8)(gf.nn.Linear(8, 8)(x * float(number)))
    with pytest.raises(DTypeError) as caught:
        gf.nn.GroupNorm(2, 8)(gf.placeholder("float64", (2, 8)) * 2.0)
    assert "since" not in str(caught.value)
