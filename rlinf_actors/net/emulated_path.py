"""The model of an emulated network: how long a message takes from one worker to another. Pure.

A path is a sequence of stages. A stage with a bandwidth sends one message after the other: a message begins when the
stage is free and the message's first byte has arrived, and takes its size divided by the bandwidth. A stage passes a
message on while it still receives it, so several stages of one bandwidth cost its time once. The stages are: the
bandwidth group of the sender, the path itself, the latency, and the bandwidth group of the receiver.

A lost message is sent again after a time, and later messages wait behind it, as in TCP. Messages never overtake one
another on a path.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rlinf_actors.config.net_emulation_config import ALL, DRIVER, NODE, CrossDCPair, NetEmulationConfig, normal

MBIT = 1e6 / 8
"""Bytes in a megabit."""
RETRANSMIT_S = 0.2
"""Shortest time until a lost message is sent again, if the configuration does not set it: TCP's in Linux."""
MOST_LOSSES = 30
"""Most times that one message is lost, so that it arrives at last."""

Span = tuple[float, float]
"""Times of the first and the last byte of a message."""


class Stage(Protocol):
    """A bandwidth that messages share."""

    def carry(self, span: Span, size: int) -> Span:
        """Return when a message of *size* bytes that arrives at the stage in *span* leaves the stage."""


class Bandwidth:
    """A stage whose messages all come from this process.

    Args:
        rate: bytes a second.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free = 0.0

    def carry(self, span: Span, size: int) -> Span:
        left, self._free = carried(self._free, self.rate, span, size)
        return left


def carried(free: float, rate: float, span: Span, size: int) -> tuple[Span, float]:
    """Return when a message leaves a stage that is free from the time *free*, and when the stage is free again."""
    first = max(span[0], free)
    last = max(span[1], first + size / rate)
    return (first, last), last


class Transfer(msgspec.Struct):
    """One message to several receivers, such as a broadcast: each bandwidth group carries it once.

    `spans` has the times at which the message left the stages that have carried it.
    """

    spans: dict[int, Span] = msgspec.field(default_factory=dict)

    def carry(self, stage: Stage, span: Span, size: int) -> Span:
        found = self.spans.get(id(stage))
        if found is None:
            found = self.spans[id(stage)] = stage.carry(span, size)
        return max(found[0], span[0]), max(found[1], span[1])


class EmulatedPath:
    """The path from one worker to another.

    Args:
        pair: the properties of the path.
        uplink, downlink: the bandwidth groups of sender and receiver, None for no limit.
        seed: seed of jitter and losses.
    """

    def __init__(
        self, pair: CrossDCPair, uplink: Stage | None = None, downlink: Stage | None = None, seed: str = ""
    ) -> None:
        self._uplink = uplink
        self._downlink = downlink
        self._own = None if pair.bandwidth_mbps is None else Bandwidth(pair.bandwidth_mbps * MBIT)
        self._latency = pair.delay_ms / 1e3
        self._jitter = pair.jitter_ms / 1e3
        self._loss = pair.loss
        again = max(RETRANSMIT_S, 2 * self._latency)
        self._again = again if pair.retransmit_ms is None else pair.retransmit_ms / 1e3
        self._random = random.Random(seed)
        self._arrived = 0.0

    def depart(self, now: float, size: int, transfer: Transfer | None = None) -> float:
        """Return the time at which a message of *size* bytes arrives that is sent at the time *now*.

        *transfer* is given if the same message is sent to several receivers, and is the same object for all of them.
        """
        shared = transfer or Transfer()
        span = (now, now)
        if self._uplink is not None:
            span = shared.carry(self._uplink, span, size)
        if self._own is not None:
            span = self._own.carry(span, size)
        late = self._late()
        span = (span[0] + late, span[1] + late)
        if self._downlink is not None:
            span = shared.carry(self._downlink, span, size)
        self._arrived = max(self._arrived, span[1])
        return self._arrived

    def _late(self) -> float:
        """Return the latency of the next message: with jitter, and with the time for sending it again after losses."""
        late = self._latency
        if self._jitter:
            late = max(0.0, late + self._random.uniform(-self._jitter, self._jitter))
        if self._loss:
            losses = 0
            while losses < MOST_LOSSES and self._random.random() < self._loss:
                losses += 1
            late += losses * self._again
        return late


class Budgets(Protocol):
    """Makes the stages of bandwidth groups."""

    def __call__(self, name: str, rate: float) -> Stage:
        """Return the stage *name*, of *rate* bytes a second. Processes that use the same name share its bandwidth."""


class Topology:
    """All emulated paths of a configuration. `path` returns the same object for the same two workers.

    Args:
        config: the configuration.
        budgets: makes the stages of bandwidth groups; by default they belong to this process.
    """

    def __init__(self, config: NetEmulationConfig, budgets: Budgets | None = None) -> None:
        self._seed = config.seed
        self._make = budgets or (lambda name, rate: Bandwidth(rate))
        self._pairs: dict[tuple[str, str], CrossDCPair] = {}
        for pair in config.crossdc_pairs:
            src, dst = normal(pair.src), normal(pair.dst)
            self._pairs[src, dst] = pair
            if config.symmetric:
                self._pairs[dst, src] = pair
        self._rates: dict[str, tuple[int, float]] = {}
        for index, group in enumerate(config.bandwidth_groups):
            for member in group.members:
                self._rates[normal(member)] = (index, group.bandwidth_mbps * MBIT)
        self._stages: dict[str, Stage] = {}
        self._paths: dict[tuple[str, str, CrossDCPair, int, int], EmulatedPath] = {}

    def path(self, src: Sequence[str], dst: Sequence[str]) -> EmulatedPath | None:
        """Return the path between two workers, None if the network between them is not emulated.

        *src* and *dst* are what `endpoints` returns for the workers.
        """
        pair = next((self._pairs[a, b] for a in src for b in dst if (a, b) in self._pairs), None)
        if pair is None:
            return None
        up, down = self._stage(src, "up"), self._stage(dst, "down")
        key = (src[0], dst[0], pair, id(up), id(down))  # not only the names: a worker may come back on another node
        if key not in self._paths:
            seed = f"{self._seed} {src[0]} {dst[0]}"
            self._paths[key] = EmulatedPath(pair, up, down, seed)
        return self._paths[key]

    def _stage(self, endpoint: Sequence[str], way: str) -> Stage | None:
        found = next((self._rates[name] for name in endpoint if name in self._rates), None)
        if found is None:
            return None
        index, rate = found
        name = f"{index} {way}"
        if name not in self._stages:
            self._stages[name] = self._make(name, rate)
        return self._stages[name]


def endpoints(name: str, node_rank: int = -1) -> tuple[str, ...]:
    """Return the endpoints that a configuration may use for a worker or driver, the most specific first.

    Args:
        name: ``group:rank``, ``group:rank:child`` for a child member, or ``driver``.
        node_rank: rank of its node, -1 if it is unknown.
    """
    group, _, ranks = name.partition(":")
    rank = ranks.partition(":")[0]
    found = [normal(f"{group}:{rank}"), normal(group)] if rank else [normal(group)]
    if node_rank >= 0:
        found += [f"{NODE}:{node_rank}", f"{NODE}:{ALL}"]
    return tuple(found)


__all__ = ["DRIVER", "Bandwidth", "EmulatedPath", "Stage", "Topology", "Transfer", "carried", "endpoints"]
