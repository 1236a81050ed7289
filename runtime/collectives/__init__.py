"""Exchanges: what the groups of collectives become that lie on several devices.

    partition ─collective_start, collective_finish→ a program's lines ─`exchanges.py`→
        shared memory between processes of one host (`shared.py`, `gate.py`)
        rounds of parcels between hosts (`rounds.py`, `parcels.py`)
        NCCL between GPUs (`nccl.py`)

`site.py` is where ranks agree on a way, `lanes.py` the order in which a device works. `pieces.py`
says what each rank gives and gets. Every way combines tensors in the order that
`ops/reduction_order.py` fixes, so that none changes a bit.
"""
