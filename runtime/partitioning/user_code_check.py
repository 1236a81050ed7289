"""Finds user-defined ops and functions in a program: workers must have their modules installed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from graphflow.errors import ModuleNotAllowed
from graphflow.ir.op import Node, owner_module
from graphflow.ops.host_calls.host_call import host_functions
from graphflow.runtime.partitioning.partition import Partition


def require_user_modules(
    partitions: Mapping[int, Sequence[Partition]], ops: Collection[str]
) -> None:
    """Refuse users' ops and functions whose modules the workers do not import.

    Args:
        partitions: worker -> its partitions.
        ops: the modules that the session's workers import.

    Raises:
        ModuleNotAllowed: names the node, its line, the module and what to do.
    """
    for mine in partitions.values():
        for partition in mine:
            for node in partition.graph.walk():
                _check(node, ops)


def runs_user_code(node: Node) -> bool:
    """Return True if a node runs the user's own code."""
    return owner_module(node.op) is not None or bool(host_functions(node.attrs))


def _check(node: Node, ops: Collection[str]) -> None:
    module = owner_module(node.op)
    if module is not None and module not in ops:
        raise ModuleNotAllowed(f"{_describe_node(node)} is an op of {_remedy(module)}")
    for function in host_functions(node.attrs):
        if function.module is None:
            raise ModuleNotAllowed(
                f"{_describe_node(node)} calls {function.name}, which is in this process only, and "
                "the cluster's devices are in others: put the function into a module of its own "
                "and give that to the session, gf.Session(cluster, ops=[...]), or compute the "
                "value before the step and feed it"
            )
        if function.module not in ops:
            raise ModuleNotAllowed(
                f"{_describe_node(node)} calls {function.name} of {_remedy(function.module)}"
            )


def _describe_node(node: Node) -> str:
    return f"{node.op.name} {node.name!r} (made at {node.location})"


def _remedy(module: str) -> str:
    if module == "__main__":
        return (
            "this script, which workers cannot import: put it into a module of its own, and give "
            "that to the session, gf.Session(cluster, ops=['my_ops'])"
        )
    return (
        f"{module!r}, which the workers of this session do not import: open it with "
        f"gf.Session(cluster, ops=[{module!r}]), and start workers of your own with "
        f"`graphflow worker --allow-ops {module} ...`"
    )
