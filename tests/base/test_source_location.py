"""The user's line."""

from __future__ import annotations

import os

import numpy as np

import graphflow as gf


def test_a_script_whose_path_is_no_utf8_runs_on_workers() -> None:
    file = os.fsdecode(b"/home/caf\xe9/s\xc3\xbc.py")
    names: dict[str, gf.Tensor] = {}
    exec(
        compile("import graphflow as gf\ny = gf.placeholder('float32', (2,)) * 2", file, "exec"),
        names,
    )
    y = names["y"]
    assert y.node.location == ("/home/caf\N{REPLACEMENT CHARACTER}/sü.py", 2)
    with gf.Session(gf.Cluster.local(1)) as s:
        x = y.node.inputs[0]
        assert s.run(y, {x: np.ones(2, "float32")}).tolist() == [2, 2]
