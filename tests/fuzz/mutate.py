"""Changes of inputs, from a seed: of their bytes, and of the structure that the bytes stand for.

Changing bytes alone rarely gets past the first check of a decoder; so where the form of an input is
known, it is taken apart, something in it is replaced by what a stranger might put there, and it is
put together again.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

LONGEST = 1 << 16
"""Bytes of an input; longer ones find nothing else, and take their time."""

NUMBERS = (0, 1, -1, 2, 7, 64, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -(2**31), 2**32,
           2**48, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1)  # fmt: skip
TEXTS = (
    "", "x", "0", "-1", "nan", "inf", "../../etc/passwd", "/dev/zero", "a/b", "\x00", "é", "\ud7ff",
    "'); import os; os.abort(); ('", "{}", "__class__", "float32", "object", "O", "<f4", "edge",
    "part", "feed", "variable", "placeholder", "tcp://127.0.0.1:1", "x" * 300,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, *NUMBERS, 0.0, -0.0, 0.5, 1e308, float("inf"), float("nan"), *TEXTS, [], {},
    [[]], [0], [0, 0], [-1], [2**62, 2**62], [None] * 9, {"": 0}, {"x": {}}, {"array": 0},
    {"dim": [[["n"], 1]]}, b"", b"\0" * 24, [2**40, 2**40, 0], [["x", "float32", [2], bytes(8)]],
    [[[[[[[[[[1]]]]]]]]]], [1] * 100,
)  # fmt: skip

NESTS = (b"[" * 20_000, b'{"a":' * 8_000, b"[" * 9_000 + b"]" * 9_000, b"a." * 10_000,
         b"1" * 5_000, b"{a=" * 5_000, b"\x91" * 20_000, b"\x81\xa1a" * 8_000,
         b"\x91" * 1_000 + b"\xc0", b"[" * 900 + b"]" * 900)  # fmt: skip
"""Depth beyond any stack, depth that can be read but not shown, and numbers beyond what Python
reads as text."""

_WORDS = re.compile(r"\w+|[^\w\s]|\s+")


class Mutator:
    """Makes inputs of seeds; the same ones for the same number."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        self._forms: dict[str, Callable[[bytes], bytes]] = {
            "msgpack": self._msgpack,
            "json": self._json,
            "text": self._text,
            "bytes": self._bytes,
        }

    def make(self, seeds: Sequence[bytes], form: str) -> bytes:
        """A new input: a seed with some changes."""
        data = self.random.choice(seeds)
        if self.random.random() < 0.05:
            data = self._splice(data, self.random.choice(seeds))
        return self.change(data, form)

    def change(self, data: bytes, form: str) -> bytes:
        """An input with one to four changes, of its structure where it has one."""
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 4))):
            structured = self.random.random() < 0.8
            data = self._forms[form if structured else "bytes"](data)[:LONGEST]
        return data

    # By form --------------------------------------------------------------------------------------

    def _msgpack(self, data: bytes) -> bytes:
        try:
            value = msgpack.unpackb(data, strict_map_key=False)
            return bytes(msgpack.packb(self._replace_part(value)))
        except Exception:  # changed already into something that is no msgpack
            return self._bytes(data)

    def _json(self, data: bytes) -> bytes:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return self._bytes(data)
        text = json.dumps(self._replace_part(value), default=str)
        return text.encode("utf-8", "surrogatepass")

    def _text(self, data: bytes) -> bytes:
        words = _WORDS.findall(data.decode("utf-8", "replace"))
        if not words:
            return self._bytes(data)
        at = self.random.randrange(len(words))
        match self.random.randrange(5):
            case 0:
                words[at] = str(self.random.choice(VALUES))
            case 1:
                del words[at]
            case 2:
                words.insert(at, self.random.choice(words))
            case 3:
                other = self.random.randrange(len(words))
                words[at], words[other] = words[other], words[at]
            case _:
                end = at + self.random.randint(1, 12)
                words[at:at] = words[at:end] * self.random.choice((1, 2, 50))
        return "".join(words).encode()

    def _bytes(self, data: bytes) -> bytes:
        changed = bytearray(data or b"\0")
        at = self.random.randrange(len(changed))
        match self.random.randrange(7):
            case 0:
                changed[at] ^= 1 << self.random.randrange(8)
            case 1:
                changed[at] = self.random.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xDD, 0xDF, 0xFF))
            case 2:
                del changed[at : at + self.random.choice((1, 2, 8, 100))]
            case 3:
                changed[at:at] = self.random.randbytes(self.random.choice((1, 4, 32)))
            case 4:
                run = changed[at : at + self.random.choice((1, 4, 64))]
                changed[at:at] = run * self.random.choice((1, 3, 200))
            case 5:
                changed[at:at] = self.random.choice(NESTS)
            case _:
                width = self.random.choice((1, 2, 4, 8))
                number = self.random.choice(NUMBERS) & (256**width - 1)
                order = self.random.choice(("little", "big"))
                changed[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
        return bytes(changed)

    def _splice(self, first: bytes, second: bytes) -> bytes:
        return (
            first[: self.random.randint(0, len(first))]
            + second[self.random.randint(0, len(second)) :]
        )

    # Structure ------------------------------------------------------------------------------------

    def _replace_part(self, value: Any) -> Any:
        """A structure with one part of it changed."""
        value = copy.deepcopy(value)
        places = _places(value)
        if not places:
            return self.random.choice(VALUES)
        container, key = self.random.choice(places)
        match self.random.randrange(7):
            case 0 | 1 | 2:
                container[key] = copy.deepcopy(self.random.choice(VALUES))
            case 3:  # another part of the same structure
                other, name = self.random.choice(places)
                container[key] = copy.deepcopy(other[name])
            case 4:
                del container[key]
            case 5 if isinstance(container, list):
                container.insert(key, copy.deepcopy(self.random.choice(container)))
            case 5:
                container[str(self.random.choice(TEXTS))] = container[key]
            case _ if isinstance(container[key], int | float) and abs(container[key]) < 1e300:
                container[key] += self.random.choice((1, -1, 7, 2**32))
            case _:
                container[key] = [container[key]]
        return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a structure."""
    found, stack = [], [value]
    while stack and len(found) < 20_000:
        each = stack.pop()
        if isinstance(each, list | dict):
            for key in range(len(each)) if isinstance(each, list) else list(each):
                found.append((each, key))
                stack.append(each[key])
    return found
