"""A host on which worker 2 finds no shared memory, as on another machine."""

from __future__ import annotations

import os
from typing import Any

from graphflow.runtime.host import host


class Host(host.DeviceHost):
    def __init__(self, worker: int, *args: Any, **more: Any) -> None:
        if worker == 2:
            os.environ["GRAPHFLOW_SHARED_MEMORY"] = "off"
        super().__init__(worker, *args, **more)
