"""Exchanges: what the groups of collectives become that lie on several devices.

    partition ─collective_start, collective_finish→ a program's lines ─`exchanges.py`→
        shared memory between processes of one host (`shared_memory_transport.py`,
        `shared_counters.py`) rounds of parcels between hosts (`schedules.py`,
        `message_transport.py`) NCCL between GPUs (`nccl.py`)

`group_setup.py` is where ranks agree on a way, `device_queue.py` the order in which a device works.
`rank_buffers.py` says what each rank gives and gets. Every way combines tensors in the order that
`ops/communication/reduction_order.py` fixes, so that none changes a bit.
"""
