"""Plain data: what goes in comes out, and what is none is refused."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import ProtocolError
from graphflow.runtime.wire.msgpack_codec import dumps, loads

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(values)
def test_plain_data_comes_out_as_it_went_in(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert loads(memoryview(dumps(value))) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_plain_data_or_refused(data: bytes) -> None:
    try:
        loads(data)
    except ProtocolError:
        return
    assert loads(data) is not ...


def test_scalars_of_numpy_count_as_python_numbers() -> None:
    assert loads(dumps((np.int64(3), np.float32(0.5), np.bool_(True)))) == (3, 0.5, True)


@pytest.mark.parametrize("value", [object(), 1j, {1, 2}, 1 << 64, np.zeros(2)])
def test_what_is_no_plain_data_is_not_written(value: Any) -> None:
    with pytest.raises(ProtocolError):
        dumps((1, value), "a Read message")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (msgpack.packb(b"four"), "not valid msgpack"),
        (msgpack.packb({1: 2}), "msgpack|not a string"),
        (b"\x82\xa1a\x01\xa1a\x02", "holds a key twice"),
        (msgpack.packb(msgpack.ExtType(1, b"")), "extension|msgpack"),
        (msgpack.packb(1) + b"\0", "bytes follow"),
        (msgpack.packb([{}] * 5000), "more than 4096 maps"),
        (msgpack.packb("t" * 300_000), "not valid msgpack"),
        (msgpack.packb([0] * 70_000), "not valid msgpack"),
        (b"\x91" * 20_000, "not valid msgpack"),
        (b"", "not valid msgpack"),
    ],
)
def test_what_is_none_or_too_much_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        loads(data)


def test_bytes_may_be_among_it_up_to_a_cap() -> None:
    assert loads(msgpack.packb((1, b"four")), 4) == (1, b"four")
    with pytest.raises(ProtocolError, match="not valid msgpack"):
        loads(msgpack.packb((1, b"fives")), 4)
