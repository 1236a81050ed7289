"""Feeds: what converts, what is refused, and that any layout of an array is the same array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import graphflow as gf
from graphflow.errors import FeedError
from graphflow.frontend.feeds import convert
from graphflow.ir.spec import DTYPES


def _convert(dtype: str, shape: Any, value: Any) -> np.ndarray[Any, Any]:
    return convert(gf.placeholder(dtype, shape, name="p").node, value)


@pytest.mark.parametrize(
    ("dtype", "shape", "value"),
    [
        ("float32", (), 1),
        ("float32", (), 1.5),
        ("float32", (), True),
        ("float32", (None,), [1, 2, 3]),
        ("float32", (None,), [0.1, 0.2]),
        ("float32", (None,), []),
        ("int64", (None,), []),
        ("float32", (None,), np.arange(3, dtype="float64")),
        ("float32", (None,), np.arange(3, dtype=">f8")),
        ("float32", (None,), np.arange(3, dtype="int16")),
        ("float16", (None,), [0.5, 0.25]),
        ("bfloat16", (None,), [0.5, 0.25]),
        ("bfloat16", (), 1),
        ("float32", (None,), np.ones(2, "bfloat16")),
        ("complex64", (None,), [1, 2.5]),
        ("complex64", (None,), [1j, 2]),
        ("complex64", (), np.complex128(1j)),
        ("complex128", (), np.float32(1)),
        ("float64", (None,), np.arange(3, dtype="float32")),
        ("float64", (None,), np.arange(3, dtype="int32")),
        ("int64", (None,), np.arange(3, dtype="int8")),
        ("int8", (None,), [-128, 127]),
        ("uint64", (), 2**63),
        ("float32", (2, None), ((1, 2), (3, 4))),
        ("float32", (None,), range(4)),
        ("bool", (None,), [True, False]),
        ("float32", (None,), [np.float32(1), np.float64(2)]),
    ],
)
def test_what_converts_keeps_its_values(dtype: str, shape: Any, value: Any) -> None:
    array = _convert(dtype, shape, value)
    assert array.dtype == dtype
    assert np.array_equal(array, np.asarray(value).astype(dtype))


@pytest.mark.parametrize(
    ("dtype", "shape", "value", "told"),
    [
        ("float32", (), 1j, "complex128"),
        ("float32", (None,), ["a"], "<U1; give numbers"),
        ("float32", (), None, "object; give numbers"),
        ("float32", (), "1.5", "<U3"),
        ("float32", (None,), [[1], [1, 2]], "no array"),
        ("float32", (None,), np.arange(3), r"int64, .*give value.astype\('float32'\)"),
        ("float32", (), 2**24 + 1, r"int64, .*give np.asarray\(value, 'float32'\)"),
        ("float32", (), 2**63 - 1, "int64"),
        ("int64", (), 1.0, "float64"),
        ("int64", (), 2**63, "uint64"),
        ("int64", (), 2**70, "object"),
        ("int8", (), 128, "int64"),
        ("uint8", (), -1, "int64"),
        ("uint64", (), -1, "int64"),
        ("int32", (None,), np.arange(3, dtype="int64"), "int64"),
        ("bool", (), 1, "int64"),
        ("float16", (), np.float32(1), "float32"),
        ("bfloat16", (), np.float32(1), "float32"),
        ("bfloat16", (), np.float16(1), "float16"),
        ("bfloat16", (), 257, "int64"),
        ("complex64", (), 2**24 + 1, "int64"),
        ("complex64", (), "1j", "<U2"),
        ("float32", (3,), [1, 2], r"\(3,\), the given value \(2,\)"),
        ("float32", (), [1], r"\(\), the given value \(1,\)"),
        ("float32", (None, 3), np.zeros(3, "float32"), r"\(None, 3\), the given value \(3,\)"),
        ("float32", ("n",), 5.0, r"\(n,\), the given value \(\)"),
        ("float32", (), {1: 2}, "object"),
    ],
)
def test_what_does_not_convert_names_placeholder_line_and_both_sides(
    dtype: str, shape: Any, value: Any, told: str
) -> None:
    with pytest.raises(FeedError, match=told) as caught:
        _convert(dtype, shape, value)
    assert "placeholder 'p' (made at " in str(caught.value)
    assert "test_feeds.py:" in str(caught.value)


def test_symbolic_tensors_are_no_values() -> None:
    t = gf.constant(1.0)
    with pytest.raises(FeedError, match="symbolic"):
        _convert("float32", (), t)
    with pytest.raises(FeedError, match="no array"):
        _convert("float32", (None,), [t, t])


def test_a_masked_or_foreign_array_is_taken_by_its_array_interface() -> None:
    class Foreign:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
            return np.array([1, 2], "float32")

    assert _convert("float32", (None,), Foreign()).tolist() == [1, 2]


ONES = np.ones(3, "float32")
MASKED = np.ma.array(np.array([1, -9999, 3], "float32"), mask=[False, True, False])


class _Gradient:
    requires_grad = True

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad")


class _Sparse:
    def tocsr(self) -> None: ...
    def toarray(self) -> None: ...


class _Series:
    dtype = "Float32"

    def to_numpy(self) -> None: ...
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.array([1.0, None, 2.0], object)


class _Exported:
    """An array that only has DLPack's methods."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class _OnGpu(_Exported):
    """An array in a GPU's memory, as CuPy's and torch's are: numpy cannot read it."""

    def __dlpack__(self, **how: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 1)


class _CupyArray(_OnGpu):
    def get(self) -> np.ndarray[Any, Any]:
        return self._array


class _TorchTensor(_OnGpu):
    requires_grad = True

    def cpu(self) -> None: ...


REFUSED = {
    "masked": (MASKED, r"1 of 3 elements masked; give value\.filled"),
    "list of masked": ([MASKED], r"elements masked; give value\.filled"),
    "gradient": (_Gradient(), r"requires grad; give value\.detach\(\)"),
    "sparse": (_Sparse(), r"sparse matrix \(_Sparse\); give value\.toarray\(\)"),
    "on a GPU": (_OnGpu(ONES), r"an array on CUDA device 1; copy it to host memory"),
    "of CuPy": (_CupyArray(ONES), r"an array on CUDA device 1; give value\.get\(\)"),
    "of torch on a GPU": (_TorchTensor(ONES), r"device 1; give value\.detach\(\)\.cpu\(\)"),
    "series": (_Series(), r"_Series of dtype Float32.*to_numpy\(dtype, na_value"),
}


def _host_call(value: Any) -> Any:
    with gf.Session() as s:
        return s.run(
            gf.host_call(lambda x: value, gf.constant([0.0]), spec=gf.spec("float32", (3,)))
        )


def _stream(value: Any) -> Any:
    x = gf.placeholder("float32", (None,), name="p")
    with gf.Session() as s:
        return list(s.run(x + 1, [{x: value}], steps=1))


def _set(value: Any) -> Any:
    w = gf.variable(np.zeros(3, "float32"), name="p")
    with gf.Session() as s:
        s.set(w, value)
        return s.get(w)


ENTRANCES: dict[str, Any] = {
    "feed": lambda value: _convert("float32", (None,), value),
    "stream": _stream,
    "constant": gf.constant,
    "variable": gf.variable,
    "set": _set,
    "assign": lambda v: gf.assign(gf.variable(np.zeros(3, "float32"), name="p"), v),
    "host_call": _host_call,
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_no_entrance_takes_values_that_are_missing(entrance: str, kind: str) -> None:
    value, told = REFUSED[kind]
    with pytest.raises(gf.errors.GraphflowError, match=told) as caught:
        ENTRANCES[entrance](value)
    if entrance in ("feed", "stream", "set", "assign"):
        assert "'p' (made at " in str(caught.value)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_every_entrance_takes_dlpack_and_masked_arrays_without_a_mask(entrance: str) -> None:
    for value in (_Exported(ONES), np.ma.array(ONES)):
        ENTRANCES[entrance](value)


def test_arrays_of_other_libraries_are_viewed_not_copied() -> None:
    given = np.arange(3.0, dtype="float32")
    assert np.shares_memory(_convert("float32", (None,), _Exported(given)), given)


def test_arrays_of_other_libraries_keep_their_dtype_and_are_operands() -> None:
    doubles = _Exported(np.ones(3))
    x = gf.placeholder("float64", (3,))
    assert {t.dtype.name for t in (gf.constant(doubles), gf.variable(doubles))} == {"float64"}
    with gf.Session() as s:
        values = s.run([x + doubles, doubles - x, gf.maximum(x, doubles)], {x: doubles})
    assert [v.tolist() for v in values] == [[2.0] * 3, [0.0] * 3, [1.0] * 3]


def test_fetched_arrays_are_exported_by_dlpack() -> None:
    x = gf.placeholder("float32", (3,))
    v = gf.variable(ONES)
    with gf.Session() as s:
        for value in [*s.run([x, x * 2, v, gf.constant(ONES)], {x: ONES}), s.get(v)]:
            assert np.shares_memory(np.from_dlpack(value), value)
            value.__dlpack__()  # consumers of the older protocol take no read-only arrays


def test_tensors_of_a_graph_have_no_memory_to_export() -> None:
    x = gf.placeholder("float32", (3,), name="p")
    with pytest.raises(gf.errors.GraphError, match=r"p \(made at .*use .*Session\.run for values"):
        np.from_dlpack(x)


@pytest.mark.parametrize("value", [np.float64(1e300), -1e300, [0, 1e39], np.array([[0.0, 1e300]])])
def test_a_number_that_the_dtype_cannot_hold_is_refused(value: Any) -> None:
    shape = (None,) * np.ndim(value)
    where = r" at index \((0, )?1,?\)" if shape else ""
    with (
        np.errstate(all="raise"),
        pytest.raises(FeedError, match=rf"e\+\d+{where} is out of the range of float32"),
    ):
        _convert("float32", shape, value)
    for made in (gf.constant, gf.variable):
        with pytest.raises(gf.errors.DTypeError, match="is out of the range of float32"):
            made(value, dtype="float32")


def test_infinities_and_nan_convert() -> None:
    given = np.array([np.inf, -np.inf, np.nan, 3.4e38])
    assert np.array_equal(_convert("float32", (4,), given), given.astype("f"), equal_nan=True)


def test_feeds_go_by_name_too() -> None:
    with gf.name_scope("in"):
        x = gf.placeholder("float32", (2,), name="x")
    y, y2 = (gf.placeholder("float32", (), name="y") for _ in range(2))
    loss = gf.sum(x * y)
    feeds = {"in/x": [1.0, 2.0], "y": 3.0}
    with gf.Session() as s:
        for _ in range(3):
            assert s.run(loss, feeds) == 9
        assert s.run(gf.sum(x), feeds) == 3  # y is another fetch's
        assert list(s.run(loss, [feeds] * 3, steps=3)) == [9, 9, 9]
        assert s.run_async(loss, feeds).result() == 9
        with pytest.raises(FeedError, match=r"'in/z'.*has this name; did you mean 'in/x'\?"):
            s.run(loss, {**feeds, "in/z": 1.0})
        with pytest.raises(FeedError, match="fed twice"):
            s.run(loss, {**feeds, y: 1.0})
        with pytest.raises(FeedError, match="several placeholders have this name"):
            s.run(y + y2, {"y": 1.0})


def test_one_dict_of_feeds_serves_several_fetches() -> None:
    x = gf.placeholder("float32", ("n",), name="x")
    other = gf.placeholder("float32", ("n",), name="other")
    loss = gf.sum(2 * x)
    with gf.Session() as s:
        s.run(gf.sum(other), {other: [1.0]})
        for size in (2, 3, 3, 2):
            feeds = {x: np.ones(size, "float32"), other: np.ones(7, "float32")}
            assert s.run(loss, feeds) == 2 * size
        assert list(s.run(loss, [feeds] * 4, steps=4)) == [4] * 4
        with pytest.raises(FeedError, match=r"'x' .*is not fed"):
            s.run(loss, {other: np.ones(2, "float32")})


@st.composite
def _layouts(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """An array behind some strides, order, byte order and flags; sizes may be 0."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    known = np.dtype("float32") if dtype.kind == "V" else dtype  # hypothesis knows no bfloat16
    elements = {"allow_nan": False} if known.kind in "fc" else None
    array = draw(hnp.arrays(known, shape, elements=elements)).astype(dtype)
    for axis in range(array.ndim):
        step = draw(st.sampled_from([1, 2, -1]))
        array = array[(slice(None),) * axis + (slice(None, None, step),)]
    if draw(st.booleans()):
        array = np.asfortranarray(array) if array.ndim else array
    if draw(st.booleans()):
        array = array.T
    if draw(st.booleans()):
        array = array.astype(array.dtype.newbyteorder(">"))
    if draw(st.booleans()):
        array = array.view()
        array.flags.writeable = False
    return array


@given(array=_layouts())
def test_any_layout_of_an_array_is_fed_as_the_same_array(array: np.ndarray[Any, Any]) -> None:
    native = array.astype(array.dtype.newbyteorder("="))
    x = gf.placeholder(native.dtype.name, (None,) * array.ndim)
    before = array.copy()
    with gf.Session() as s:
        same, moved = s.run([x, gf.reshape(gf.where(x == x, x, x), (-1,))], {x: array})
    assert same.dtype == native.dtype and same.flags.writeable
    assert same.tobytes() == native.tobytes()
    assert moved.tobytes() == native.tobytes()
    assert np.array_equal(before, array)


def test_batches_of_any_size_run_under_one_placement() -> None:
    x = gf.placeholder("float32", (None, 3))
    total = gf.sum(x, axis=0)
    with gf.Session() as s:
        for rows in (4, 4, 1, 0, 7):
            batch = np.arange(rows * 3, dtype="float32").reshape(rows, 3)
            assert np.array_equal(s.run(total, {x: batch}), batch.sum(0))


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]], ids=["one", "two"])
def test_a_placeholder_of_which_only_the_size_counts_is_fed_too(devices: list[str]) -> None:
    """The gradient of sum(x + b) to b is the number of rows of x."""
    x = gf.placeholder("float32", (None,), name="x")
    b = gf.variable(0.0, name="b")
    train = gf.optim.SGD(1.0).minimize(gf.sum(x + b))
    other = gf.placeholder("float32", (None,), name="other")
    cluster = gf.Cluster.here(devices=devices)
    with gf.Session(cluster) as s:
        for rows in (3, 3, 0, 2):
            s.run(train, {x: np.zeros(rows)})
        assert s.get(b) == -8
        assert s.run(gf.ones(x.shape), {x: [7, 7]}).tolist() == [1, 1]
        with pytest.raises(FeedError, match="give the placeholder"):
            s.run(train)
        with pytest.raises(FeedError, match=r"'other'.*unknown"):
            s.run(train, {x: [1], other: [1]})
    assert gf.plan(train, cluster, {x: (3,)}).makespan > 0


def test_a_named_size_is_shared_and_the_two_that_differ_are_named() -> None:
    x = gf.placeholder("float32", ("n", 2), name="x")
    y = gf.placeholder("float32", ("n",), name="y")
    out = gf.sum(x, axis=1) + y
    with gf.Session() as s:
        assert s.run(out, {x: np.ones((3, 2)), y: [1, 2, 3]}).tolist() == [3, 4, 5]
        with pytest.raises(FeedError, match=r"'y'.*'n' is 2 here, but 3 in placeholder 'x'"):
            s.run(out, {x: np.ones((3, 2)), y: [1, 2]})
        assert s.run(out, {x: np.ones((1, 2)), y: [1]}).tolist() == [3]
