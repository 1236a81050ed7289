"""Plain data as bytes: msgpack, with strict checks of what arrives.

Lists arrive as tuples, keys must be strings, and lengths and counts are bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from graphflow.base.argument_checks import format_value
from graphflow.errors import ProtocolError

TEXT_CAP = 1 << 16  # characters of an error's text or traceback
_LENGTH_CAP = 1 << 16  # entries of a list or dict
_MAPS_CAP = 1 << 12  # dicts in one frame


def dumps(data: Any, what: str = "a message") -> bytes:
    """Return plain data as bytes; numpy's scalars become Python's.

    Args:
        what: A name of the data, for errors.

    Raises:
        ProtocolError: The data holds a value that cannot be sent.
    """
    try:
        written: bytes = msgpack.packb(data, default=_plain_scalar)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{what} holds what cannot be sent: {error}") from error
    return written


def _plain_scalar(value: object) -> object:
    """Return numpy's scalar as Python's; msgpack asks about every type that it does not know."""
    if isinstance(value, np.generic):
        return value.item()
    raise ProtocolError(f"{type(value).__name__} is not plain data")


def loads(data: bytes | memoryview, bytes_cap: int = 0) -> Any:
    """Return the plain data in bytes from the wire.

    Args:
        bytes_cap: The longest byte string that may be in it.

    Raises:
        ProtocolError: The bytes are malformed, or exceed a limit.
    """
    dict_of = _build_dict if len(data) <= _MAPS_CAP else _limit_dicts()
    try:
        return msgpack.unpackb(
            data, raw=False, use_list=False, strict_map_key=True, object_pairs_hook=dict_of,
            ext_hook=_refuse_extension, max_ext_len=0, max_str_len=4 * TEXT_CAP,
            max_bin_len=bytes_cap, max_array_len=_LENGTH_CAP, max_map_len=_LENGTH_CAP,
        )  # fmt: skip
    except ProtocolError:
        raise
    except msgpack.ExtraData:
        raise ProtocolError("bytes follow the end of a control frame") from None
    except Exception as error:  # msgpack raises a dozen types, of its own and built in
        raise ProtocolError(
            f"a control frame is not valid msgpack: {format_value(error, 200)}"
        ) from error


def _build_dict(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return a map of string keys, each at most once."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ProtocolError("a map of a control frame holds a key twice")
    if result and {*map(type, result)} != {str}:
        raise ProtocolError("a key of a map is not a string")
    return result


def _limit_dicts() -> Callable[[list[tuple[Any, Any]]], dict[str, Any]]:
    """Return `_build_dict` for one frame that might hold very many maps, with a limit on these."""
    left = _MAPS_CAP

    def build_dict(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ProtocolError(f"a control frame holds more than {_MAPS_CAP} maps")
        return _build_dict(pairs)

    return build_dict


def _refuse_extension(code: int, data: bytes) -> Any:
    """Refuse msgpack's extension types."""
    raise ProtocolError(f"a control frame holds the msgpack extension type {code}")
