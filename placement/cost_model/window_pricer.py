"""Prices `concurrent` nodes: parties on their devices, messages over links.

With rules, the parties' turns are simulated (`simulation/turns.py`). Without, the node takes as
long as its slowest party computes, sends, and waits for the latencies of what it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from math import fsum
from typing import NamedTuple

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Body, bind_attrs
from graphflow.ir.op import Node
from graphflow.ops.control_flow.concurrent import parties_of
from graphflow.ops.control_flow.turn_rules import TurnRules
from graphflow.placement.calibration.cluster_rates import link_classes
from graphflow.placement.calibration.roofline import Rates
from graphflow.placement.calibration.trace_corrections import (
    Evidence,
    TraceCorrections,
    median_ratio,
)
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.channel_bytes import Messages, channel_messages
from graphflow.placement.cost_model.node_errors import NodeErrors
from graphflow.placement.cost_model.node_times import NodeTimes
from graphflow.placement.cost_model.party_nodes import PartyNode, home_of, party_devices
from graphflow.placement.cost_model.window_costs import (
    PartyWork,
    party_works,
    turn_bucket,
    window_link,
)
from graphflow.placement.problems.arrays import Floats
from graphflow.placement.simulation.jitter import Jitter
from graphflow.placement.simulation.turns import TurnBar, TurnSeconds, simulate_window


class WindowLink(NamedTuple):
    """The messages from one device to another in a window."""

    source: str
    target: str
    transfers: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PricedWindow:
    """A `concurrent` node as it is predicted.

    Attributes:
        node: the node.
        devices: device of each party.
        seconds: from its start to its end.
        busy: seconds in which each party computes or sends.
        bars: the parts of a window with rules.
        links: what travels between devices.
        high: with jitter, the seconds that nine draws of ten stay below.
        evidence: the observations of the longest turn, if all turns were observed.
    """

    node: Node
    devices: tuple[str, ...]
    seconds: float
    busy: tuple[float, ...]
    bars: tuple[TurnBar, ...] = ()
    links: tuple[WindowLink, ...] = ()
    high: float | None = None
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True, eq=False)
class WindowPricer:
    """Prices the `concurrent` nodes of a graph on a cluster.

    Args:
        rates: of each device.
        classes: kind of each device, by name.
        speeds: shares of their machines' speed, by device.
        busy: their neighbours are busy.
        latency, bandwidth: (d, d) of links, by the place of a device in `rates`.
        learned: corrects the turns that were traced.
        jitter: makes turns longer at random.
    """

    rates: Mapping[str, Rates]
    classes: Mapping[str, str]
    speeds: Mapping[str, float]
    busy: bool
    latency: Floats
    bandwidth: Floats
    learned: TraceCorrections | None = None
    jitter: Jitter | None = None

    def price(
        self, node: Node, bindings: Mapping[str, int], devices: Sequence[str]
    ) -> PricedWindow:
        """Return a node's window.

        Args:
            devices: of each party.
        """
        attrs = bind_attrs(node.attrs, bindings)
        parties = parties_of(attrs)
        plain = party_works(node, bindings, [self.rates[name] for name in devices])
        known = list(map(self._evidence, parties, range(len(parties)), devices, plain))
        works = list(map(self._correct_work, devices, plain, known))
        made = PricedWindow(node, tuple(devices), 0.0, ())
        if all(found.is_own for found, work in zip(known, plain, strict=True) if work.turn > 0):
            made = replace(made, evidence=known[int(np.argmax([work.turn for work in works]))])
        if len(set(devices)) == 1:  # one party runs at a time
            busy = tuple(work.once + work.turns * work.turn for work in works)
            return replace(made, seconds=fsum(busy), busy=busy)
        moved = _Traffic(self, tuple(devices), channel_messages(parties))
        rules: TurnRules | None = attrs.get("rules")
        if rules is None or not sum(rules.turns):
            return _price_without_rules(made, works, moved)
        return self._simulate(made, works, moved, rules)

    def _evidence(self, body: Body, party: int, device: str, work: PartyWork) -> Evidence:
        """Return the observations of a party's turns."""
        if not self.learned or work.turn <= 0:
            return Evidence()
        bucket = turn_bucket(body, party, self.classes[device], self.busy, work.turn)
        return self.learned.evidence(bucket)

    def _correct_work(self, device: str, work: PartyWork, found: Evidence) -> PartyWork:
        """Return a party's work with its turns as traces have shown them, at its device's speed."""
        ratio = median_ratio(found.ratios) if found.is_own else 1.0
        speed = self.speeds[device]
        return PartyWork(work.turn * ratio / speed, work.once / speed, work.turns)

    def _simulate(
        self, made: PricedWindow, works: Sequence[PartyWork], moved: _Traffic, rules: TurnRules
    ) -> PricedWindow:
        servers, workers = rules.servers, rules.workers
        seconds = TurnSeconds(
            np.array([works[k].turn for k in workers]),
            np.array([works[s].turn for s in servers]),
            np.array([[moved.send_seconds(k, s) for s in servers] for k in workers]),
            np.array([[moved.send_seconds(s, k) for k in workers] for s in servers]),
            np.array([[moved.delay(k, s) for s in servers] for k in workers]),
        )
        scales = [None] if self.jitter is None else self.jitter.scales(rules)
        draws = sorted(
            (simulate_window(rules, seconds, scale) for scale in scales),
            key=lambda each: each.seconds,
        )
        middle, high = draws[(len(draws) - 1) // 2], draws[round(0.9 * (len(draws) - 1))]
        lead = max(work.once for work in works)
        turns = {k: middle.turns[k] for k in workers}
        pushes = float(sum(turns.values()))
        return replace(
            made,
            seconds=middle.seconds + lead,
            busy=tuple(middle.busy.get(i, 0.0) + work.once for i, work in enumerate(works)),
            bars=tuple(
                bar._replace(start=bar.start + lead, finish=bar.finish + lead)
                for bar in middle.bars
            ),
            links=moved.links(lambda m: turns.get(m.sender, turns.get(m.receiver, pushes))),
            high=None if self.jitter is None else high.seconds + lead,
        )


def window_links(
    cluster: Cluster, latency: Floats, bandwidth: Floats, learned: TraceCorrections | None
) -> tuple[Floats, Floats]:
    """Return latencies and bandwidths in windows, as traces have shown them."""
    if not learned:
        return latency, bandwidth
    latency, bandwidth = latency.copy(), bandwidth.copy()
    for (i, j), kind in link_classes(cluster).items():
        known = latency[i, j], bandwidth[i, j]
        latency[i, j], bandwidth[i, j] = learned.link(window_link(kind), known)
    return latency, bandwidth


def price_windows(
    times: NodeTimes,
    parties: Sequence[PartyNode],
    pricer: WindowPricer,
    compute: Floats,
    errors: NodeErrors | None,
) -> dict[tuple[Node, str], PricedWindow]:
    """Price the `concurrent` nodes of a graph on each device that they may be on.

    Args:
        parties: the problem's nodes after those of `times`.
        compute: (n, d) seconds; those of the windows are written here.
        errors: of these; those of windows whose turns were observed are written here.
    """
    found: dict[tuple[Node, str], PricedWindow] = {}
    cluster, names = times.cluster, times.cluster.devices
    for node in times.graph.of_op("concurrent"):
        i = times.index[node]
        for at in np.flatnonzero(np.isfinite(compute[i, :-1])).tolist():
            devices = party_devices(node, cluster, names[at])
            window = found[node, names[at]] = pricer.price(node, times.bindings, devices)
            compute[i, at] = window.seconds
            if errors is not None and window.evidence.is_own:
                errors.note_observed(i, at, window.evidence)
    for i, party in enumerate(parties, start=times.count):
        home = home_of(party.node, cluster)
        compute[i, names.index(party.device)] = found[party.node, home].seconds
    return found


@dataclass(frozen=True, eq=False)
class _Traffic:
    """The messages of a node whose parties are on known devices."""

    pricer: WindowPricer
    devices: tuple[str, ...]
    messages: Sequence[Messages]

    def _link(self, source: int, target: int) -> tuple[float, float]:
        """Return latency and bandwidth between two parties."""
        places = list(self.pricer.rates)
        at, to = places.index(self.devices[source]), places.index(self.devices[target])
        if at == to:
            return 0.0, np.inf
        return float(self.pricer.latency[at, to]), float(self.pricer.bandwidth[at, to])

    def send_seconds(self, source: int, target: int) -> float:
        """Return for how long the messages of a turn keep their sender busy."""
        sent = [m for m in self.messages if (m.sender, m.receiver) == (source, target)]
        return sum(m.nbytes * m.turn for m in sent) / self._link(source, target)[1]

    def bandwidth(self, source: int, target: int) -> float:
        """Return the bytes per second between two parties."""
        return self._link(source, target)[1]

    def delay(self, source: int, target: int) -> float:
        """Return how much later than it was sent a message arrives."""
        return self._link(source, target)[0]

    def links(self, turns: Callable[[Messages], float]) -> tuple[WindowLink, ...]:
        """Return what travels between devices.

        Args:
            turns: tells for a channel how many turns send into it.
        """
        found: dict[tuple[str, str], WindowLink] = {}
        for sent in self.messages:
            ends = self.devices[sent.sender], self.devices[sent.receiver]
            if ends[0] == ends[1]:
                continue
            count = sent.count(turns(sent))
            size = count * sent.nbytes
            latency, bandwidth = self._link(sent.sender, sent.receiver)
            before = found.get(ends, WindowLink(*ends, 0, 0, 0.0))
            found[ends] = WindowLink(
                *ends,
                before.transfers + count,
                before.bytes + size,
                before.seconds + size / bandwidth + count * latency,
            )
        return tuple(found.values())


def _price_without_rules(
    made: PricedWindow, works: Sequence[PartyWork], moved: _Traffic
) -> PricedWindow:
    """Return the window as long as its slowest party takes."""

    def turns(sent: Messages) -> float:
        return works[sent.sender].turns * sent.share

    busy = [work.once + work.turns * work.turn for work in works]
    waits = [0.0] * len(works)
    for sent in moved.messages:
        count, ends = sent.count(turns(sent)), (sent.sender, sent.receiver)
        busy[sent.sender] += count * sent.nbytes / moved.bandwidth(*ends)
        waits[sent.receiver] += count * moved.delay(*ends)
    return replace(
        made,
        seconds=max(map(sum, zip(busy, waits, strict=True))),
        busy=tuple(busy),
        links=moved.links(turns),
    )
