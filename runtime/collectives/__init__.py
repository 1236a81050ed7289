"""Collectives between devices: programs start and finish them, one of three transports runs them.

    partition ─collective_start, collective_finish→ a program's lines ─`program_collectives.py`→
        shared memory within a host    `shared_memory_transport.py`, `shared_counters.py`
        messages between hosts         `message_transport.py`, by the rounds of `schedules.py`
        NCCL between GPUs              `nccl.py`

The workers of a group agree on a transport in `group_setup.py`. `device_queue.py` runs a device's
collectives in order. `rank_buffers.py` defines what each rank contributes and receives. Every
transport combines tensors in the order that `ops/communication/reduction_order.py` fixes, so the
choice changes no bits.

Cut edges within a host also use shared memory (`shared_memory_edges.py`).
"""
