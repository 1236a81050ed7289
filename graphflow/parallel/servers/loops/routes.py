"""Routes: how a tensor travels between a server and its workers, in the loops of both.

A push route carries a gradient, or what else crosses the cut, from each worker to a server. A pull
route carries a variable's value back. Each has channels of its own, and may carry state from turn
to turn at both ends. `make_push` and `make_pull` decide which route a tensor takes, and
`may_share_push` and `may_share_pull` whether small tensors travel in one message.

A state is a list of tensors. Its first values are those of variables, which the window assigns
when it ends (`worker_states`, `server_states`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party, PartyChannel
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec
from graphflow.parallel.servers.step_cut import PushedTensor
from graphflow.parallel.sharding.emission.sharded_graph import ShardedVariable

State = list[Tensor]
"""The tensors that a loop carries for one end of a route."""


class _TensorRoute:
    """Carries a tensor between a server and its workers.

    Args:
        loops: the loops of the window.
        spec: the spec of the tensor.
        workers: the number of workers.
    """

    def __init__(self, loops: ConcurrentLoops, spec: TensorSpec, workers: int) -> None:
        self.spec = spec
        self._channels = _channels(loops, spec, workers)

    def worker_states(self, worker: int) -> Sequence[Node]:
        """Return the variables whose values a worker's loop carries for this route."""
        return ()

    def server_states(self) -> Sequence[Node]:
        """Return the variables whose values the server's loop carries for this route."""
        return ()

    @property
    def variables(self) -> Mapping[Node, ShardedVariable]:
        """The shards of the variables of all states."""
        return {}

    def begin(self, party: Party, worker: int) -> State:
        """Begin a window in a worker, before its loop; return the first state."""
        return [node.outputs[0] for node in self.worker_states(worker)]

    @property
    def is_filtered(self) -> bool:
        """True if a filter makes messages smaller. The last tensor of the sender's state is then
        the bytes that it has sent, and those without the filter, int64 (2,)."""
        return False

    @property
    def nbytes(self) -> int:
        """The bytes of one message."""
        return int(self.spec.nbytes)


class PushRoute(_TensorRoute):
    """Carries a tensor from each worker to a server.

    Args:
        loops: the loops of the window.
        spec: the spec of the tensor.
        workers: the number of workers.
    """

    @property
    def reads_value(self) -> bool:
        """True if workers need the value of the variable whose gradient they push."""
        return False

    def open(self) -> State:
        """Return the first state of a server."""
        return [node.outputs[0] for node in self.server_states()]

    def send(
        self, party: Party, worker: int, value: Tensor, state: State, at: Tensor | None = None
    ) -> State:
        """Send the tensor of a turn, in a worker's loop; return the next state.

        Args:
            party, worker: the worker.
            value: the tensor.
            state: the state.
            at: the value of the variable, if `reads_value`.
        """
        party.send(self._channels[worker], value)
        return state

    def take(self, party: Party, which: Tensor, state: State) -> tuple[Tensor, State]:
        """Receive the tensor of the worker whose push comes next, in the server's loop.

        Args:
            party: the server.
            which: the number of the worker, int32.
            state: the state.

        Returns:
            The tensor, of the spec of the route, and the next state.
        """
        return party.merge(self._channels, which)[1], state


class PullRoute(_TensorRoute):
    """Carries the value of a variable from its server to the workers.

    Args:
        loops: the loops of the window.
        spec: the spec of the variable.
        workers: the number of workers.
    """

    def open(self, party: Party, value: Tensor) -> State:
        """Begin a window in a server, before its loop; return the first state.

        Args:
            party: the server.
            value: the value of the variable.
        """
        return [node.outputs[0] for node in self.server_states()]

    def answer(self, party: Party, value: Tensor, mask: Tensor | None, state: State) -> State:
        """Send a value to some workers, in the server's loop; return the next state.

        Args:
            party: the server.
            value: the value of the variable.
            mask: bool, (workers,): those that are answered; None: all.
            state: the state.
        """
        party.send_where(self._channels, value, mask)
        return state

    def receive(self, party: Party, worker: int, state: State) -> tuple[Tensor, State]:
        """Receive the value for a turn, in a worker's loop.

        Returns:
            The value, of the spec of the variable, and the next state.
        """
        return party.receive(self._channels[worker]), state


Route = PushRoute | PullRoute


def may_share_push(push: PushedTensor) -> bool:
    """Return True if a pushed tensor may share a message with others; such a message has a plain
    route."""
    return True


def may_share_pull(variable: Node) -> bool:
    """Return True if a variable may share a message with others when it is pulled; such a message
    has a plain route."""
    return True


def make_push(
    loops: ConcurrentLoops, pushes: Sequence[PushedTensor], spec: TensorSpec, workers: int
) -> PushRoute:
    """Return the route of pushed tensors.

    Args:
        loops: the loops of the window.
        pushes: the tensors that share the message, in the step; none for a fetch.
        spec: the spec of the message in a turn.
        workers: the number of workers.
    """
    return PushRoute(loops, spec, workers)


def make_pull(
    loops: ConcurrentLoops, variables: Sequence[Node], spec: TensorSpec, workers: int
) -> PullRoute:
    """Return the route by which workers pull variables that share a message of a spec."""
    return PullRoute(loops, spec, workers)


def _channels(loops: ConcurrentLoops, spec: TensorSpec, workers: int) -> tuple[PartyChannel, ...]:
    return tuple(loops.channel(spec.shape, spec.dtype.name) for _ in range(workers))


__all__ = [
    "PullRoute", "PushRoute", "Route", "State", "make_pull", "make_push", "may_share_pull",
    "may_share_push",
]  # fmt: skip
