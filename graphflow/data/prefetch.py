"""Prepare batches ahead on a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_END = object()


def prefetch_items(items: Iterator[T], ahead: int) -> Iterator[T]:
    """Yield items that a thread prepares, at most `ahead` of them before they are asked for.

    An error comes up where its item would have come. The thread ends when the iterator is closed,
    or forgotten.
    """
    waiting: queue.Queue[Any] = queue.Queue(ahead)
    over = threading.Event()

    def put(item: Any) -> bool:
        while not over.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def prepare() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
        except BaseException as error:
            put((None, error))
        else:
            put((_END, None))

    thread = threading.Thread(target=prepare, name="graphflow-data", daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        over.set()
