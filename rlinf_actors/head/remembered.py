"""What a head cannot learn again from agents and drivers: values, and how they change. Pure.

`head.store` keeps it on disk. Everything else that a head knows is told again by those who come back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

import msgspec

from rlinf_actors.wire.keys import KeyState
from rlinf_actors.wire.values import NodeReport

NODE, REPLACED, CLIENT, WORKER = "node", "replaced", "client", "worker"
"""Kinds of what a head gives up on: incarnations of agents and of clients, and ids of workers."""
KEPT = 4096
"""So many of each kind are remembered; the oldest are forgotten."""


class KnownNode(msgspec.Struct, frozen=True):
    """A node that has registered. `rank` is None until it is frozen; a `lost` one is not waited for; `member` is the
    name of the agent's key, "" without one.
    """

    report: NodeReport
    incarnation: str
    is_head: bool = False
    rank: Union[int, None] = None
    lost: bool = False
    member: str = ""


class ForgetNode(msgspec.Struct, frozen=True):
    """Its rank is free."""

    id: str


class ForgetKey(msgspec.Struct, frozen=True):
    """A key that has ended long ago: it is not listed any more, which is refused too."""

    public: str


class KnownJob(msgspec.Struct, frozen=True):
    """A job of a head with keys: `proof` tells its token from others, `owner` is the name of the driver's key."""

    namespace: str
    proof: str
    owner: str


class ForgetJob(msgspec.Struct, frozen=True):
    """A job has ended."""

    namespace: str


class GaveUp(msgspec.Struct, frozen=True):
    """Others were told that this one has ended; if it is still there, it is refused for that reason."""

    kind: str
    id: str
    reason: str


class ForgetGaveUp(msgspec.Struct, frozen=True):
    """That is too long ago, or too many came after it."""

    kind: str
    id: str


class Latch(msgspec.Struct, frozen=True):
    """An emergency stop is in force; `key` is a namespace or robots.ALL, `text` a line for people."""

    key: str
    text: str


class Unlatch(msgspec.Struct, frozen=True):
    """An emergency stop was released."""

    key: str


class Drain(msgspec.Struct, frozen=True):
    """A node takes no new workers, and why, until somebody lifts that: also while it is away."""

    id: str
    why: str


class Undrain(msgspec.Struct, frozen=True):
    """The node takes new workers again."""

    id: str


Change = Union[
    KnownNode, ForgetNode, GaveUp, ForgetGaveUp, Latch, Unlatch, Drain, Undrain,
    KeyState, ForgetKey, KnownJob, ForgetJob,
]  # fmt: skip


@dataclass
class Remembered:
    """What an earlier head at this place knew.

    Attributes:
        epoch: how many heads have started here, this one included.
        nodes: those that had registered.
        given_up: (kind, id) to the reason, the oldest first.
        stops: emergency stops in force.
        drained: ids of the nodes that take no new workers, and why.
        keys: public keys, also those that have ended.
        jobs: of a head with keys.
    """

    epoch: int = 0
    nodes: list[KnownNode] = field(default_factory=list)
    given_up: dict[tuple[str, str], str] = field(default_factory=dict)
    stops: dict[str, str] = field(default_factory=dict)
    drained: dict[str, str] = field(default_factory=dict)
    keys: list[KeyState] = field(default_factory=list)
    jobs: list[KnownJob] = field(default_factory=list)
