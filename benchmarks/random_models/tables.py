"""Tables: lookups of features in rows of variables, which dense layers read."""

from __future__ import annotations

import graphflow as gf
from benchmarks.random_models.network import Network, Signal

MAX_ROWS = 200_000


def lookup_features(net: Network, width: int) -> Signal:
    """Return the rows of some fields' tables, concatenated or added, beside dense features."""
    fields, rows, dim = net.integer(1, 32), net.integer(10, MAX_ROWS), net.integer(4, 128)
    has_own_tables, pooled = net.happens(0.5), net.happens(0.3)
    net.note(
        f"{fields} fields", f"{fields if has_own_tables else 1} tables of {rows} × {dim}",
        "rows added" if pooled else "",
    )  # fmt: skip
    net.count(elements=2.0 * net.batch * fields * dim)
    with net.layer():
        if has_own_tables:
            found = [look_up(net, net.feed(below=rows), rows, dim) for _ in range(fields)]
            h = sum(found[1:], found[0]) if pooled else gf.concat(found, axis=1)
        else:
            each = look_up(net, net.feed(fields, below=rows), rows, dim)
            h = gf.sum(each, axis=1) if pooled else gf.reshape(each, (-1, fields * dim))
        size = dim if pooled else fields * dim
        if net.happens(0.5):
            more = min(width, net.integer(4, 256))
            h, size = gf.concat([h, net.feed(more)], axis=1), size + more
    return Signal(h, (size,))


def look_up(net: Network, ids: gf.Tensor, rows: int, dim: int) -> gf.Tensor:
    """Return the rows of a new table, by `gf.take` or by `gf.nn.embedding`."""
    table = net.weight(rows, dim, fan=dim)
    by_embedding = net.happens(0.5)
    return gf.nn.embedding(ids, table) if by_embedding else gf.take(table, ids, axis=0)


def embed_tokens(net: Network, width: int) -> tuple[Signal, gf.Tensor]:
    """Return a sequence of embedded tokens with positions, and the table (tokens, width)."""
    tokens, steps = net.integer(20, 30_000), net.integer(4, 256)
    net.note(f"{tokens} tokens")
    net.count(elements=2.0 * net.batch * steps * width)
    with net.layer():
        table = net.weight(tokens, width, fan=width)
        h = gf.nn.embedding(net.feed(steps, below=tokens), table)
        return Signal(h + net.weight(steps, width, fan=width), (steps, width)), table
