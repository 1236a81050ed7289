"""Train on a Parquet file that is larger than the memory which the program may use.

    pip install '.[data]'
    python examples/larger_than_memory.py
    python examples/larger_than_memory.py --rows 2000000 --memory 300 --out /tmp/large

The program writes rows of 32 numbers and a target to one file, in row groups. Then it forbids
itself more than --memory MiB beyond what it has, by setrlimit. An attempt to read the file into one
array fails. gf.fit trains on it in shuffled order nevertheless: gf.data reads row groups when their
rows are due, and keeps some of them. It writes larger_than_memory.svg.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # returns memory at once

import numpy as np
from command_line import check_folder, positive_int, run_program, save_curve

import graphflow as gf

COLUMNS = 32
GROUP = 5_000  # rows
MIB = 1 << 20


def write_rows(file: Path, rows: int) -> np.ndarray:
    """Write a file of row groups, and return the weights by which targets follow from rows."""
    import pyarrow
    from pyarrow import parquet

    random = np.random.default_rng(0)
    weights = random.normal(size=COLUMNS).astype("float32")
    shape = pyarrow.list_(pyarrow.float32(), COLUMNS)
    schema = pyarrow.schema([("x", shape), ("y", pyarrow.float32())])
    with parquet.ParquetWriter(file, schema, compression=None, use_dictionary=False) as stream:
        for first in range(0, rows, GROUP):
            x = random.normal(size=(min(GROUP, rows - first), COLUMNS)).astype("float32")
            y = x @ weights + 0.1 * random.normal(size=len(x)).astype("float32")
            columns = [pyarrow.FixedSizeListArray.from_arrays(x.ravel(), type=shape), y]
            stream.write_table(pyarrow.table(columns, schema=schema))
    return weights


def limit_memory(mebibytes: int) -> None:
    """Forbid this process more than so many MiB beyond the memory that it has."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + mebibytes * MIB, resource.RLIM_INFINITY))


def main() -> None:
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "rows.parquet"
    try:
        weights = write_rows(file, options.rows)
        size = file.stat().st_size
        x = gf.placeholder("float32", (None, COLUMNS), name="x")
        y = gf.placeholder("float32", (None,), name="y")
        w = gf.variable(np.zeros(COLUMNS, "float32"), name="w")
        loss = gf.mean(gf.square(x @ w - y))
        train = gf.optim.SGD(0.005).minimize(loss)
        data = gf.data.parquet(file, memory=options.memory * MIB // 4)
        data = data.shuffle(seed=0, blocks=8).batch(options.batch)
        with gf.Session() as session:
            gf.fit(train, data, loss=loss, steps=2, session=session, progress=False)  # compiles
            limit_memory(options.memory)
            print(f"file: {size / MIB:.0f} MiB; memory that may be added: {options.memory} MiB")
            try:
                np.ones(size, np.uint8)
            except MemoryError:
                print("one array of the file's size: no memory, as should be")
            begun = time.perf_counter()
            history = gf.fit(train, data, loss=loss, epochs=1, session=session)
            seconds = time.perf_counter() - begun
            wrong = float(np.abs(session.get(w) - weights).max())
    finally:
        file.unlink(missing_ok=True)
    print(
        f"{data.rows:,} rows in {seconds:.1f} s, {size / MIB / seconds:.0f} MiB/s; "
        f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}, weights within {wrong:.3f}"
    )
    save_curve(history, options.out / "larger_than_memory.svg")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=positive_int, default=1_500_000, metavar="N")
    parser.add_argument("--memory", type=positive_int, default=120, metavar="MIB")
    parser.add_argument("--batch", type=positive_int, default=1000, metavar="ROWS")
    parser.add_argument("--out", type=Path, default=Path("larger_than_memory"), metavar="FOLDER")
    options = parser.parse_args()
    size = options.rows * (COLUMNS + 1) * 4 / MIB
    if size < options.memory:
        parser.error(
            f"--rows {options.rows}: these are {size:.0f} MiB, which fit into --memory "
            f"{options.memory}"
        )
    check_folder(parser, "--out", options.out)
    return options


if __name__ == "__main__":
    run_program(main)
