"""What all control messages have in common: their base, and the version of the protocol.

House rules. A head serves peers of `OLDEST` to `PROTOCOL`, and a worker takes links from them, so that a cluster can be
upgraded node by node, the head first. So a message or frame only ever gains fields with a default; the default stands
for what the older version does. A new message goes only to a peer whose session speaks the protocol that has it, or to
one that may drop it while nobody waits for an answer.

What a message may hold: its length, and the numbers that go into timers, sums and system calls.

Receivers drop what is beyond: msgspec refuses it while it decodes. So who writes a message must not make it, and what
users give is checked by the functions below, where it comes in.

What decoding raises for bytes that are not what they should be. Pure.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated

import msgspec
from msgspec import Meta

from rlinf_actors.errors import UsageError

PROTOCOL = 7
"""The newest protocol that this version speaks: raised with each release that adds to the control messages
(`wire.control_codec`), to values.py or to frames.py.
"""
OLDEST = 6
"""The oldest protocol that this version speaks: the one before."""
CHILD_MEMBERS = 7
"""The first protocol in which children of workers are members."""


class ControlMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all control messages; the tag is the class's name."""


def agreed(oldest: int, newest: int) -> int:
    """Return the protocol that this process speaks with a peer, 0 if they have none in common.

    Args:
        oldest: the oldest protocol that the peer speaks.
        newest: the newest one; 0 from a peer that speaks *oldest* only.
    """
    common = min(max(oldest, newest), PROTOCOL)
    return common if common >= max(oldest, OLDEST) else 0


def spoken(oldest: int, newest: int) -> str:
    """Return the protocols of a peer, for people; arguments as of `agreed`."""
    return f"protocol {oldest}" if newest <= oldest else f"protocols {oldest} to {newest}"


def what_to_upgrade(oldest: int, peer: str, this: str) -> str:
    """Return what to do about a peer with which `agreed` is 0.

    Args:
        oldest: the oldest protocol that the peer speaks.
        peer: the peer, for people: "this driver".
        this: this process, for people: "the head".
    """
    return f"upgrade {this}" if oldest > PROTOCOL else f"upgrade {peer}"


MAX_CONTROL_BYTES = 16 << 20
"""Of a control message. A launch of 10,000 workers with 1 KiB of environment each is 10 MiB."""
MAX_ASKED_BYTES = MAX_CONTROL_BYTES // 8 * 7
"""Of one that the head passes on, or answers with what it was told: it adds to that (a token for each worker)."""
MAX_SIZE = 100_000
"""Ranks of a group: a head that is told of more would count them one by one."""

Number = Annotated[float, Meta(ge=-sys.float_info.max)]
"""Any number but NaN and minus infinity. No comparison holds for NaN: a timer that is due then never is, or always."""
Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""What pidfd_open takes; 0 for none."""
WorkerId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""A worker's socket, its cgroup and its record are files of that name: one that is a path would lead elsewhere."""
MAX_DEPTH = 8
"""Ranks of an address: a worker's, its child's, that one's child's, ..."""
ChildPath = Annotated[list[Annotated[int, Meta(ge=0, le=MAX_SIZE)]], Meta(min_length=1, max_length=MAX_DEPTH - 1)]
"""Ranks that lead from a worker to one of its children, or to a child of that."""
Count = Annotated[int, Meta(ge=1, le=2**53)]
"""How often something happened."""
Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
"""How many there are of something that is counted through."""

TEXT_CHARS = 1000
"""Most of a line of the event log, and of what a person gave as a reason: no message pushes other events out."""


def printable(text: str, limit: int = TEXT_CHARS) -> str:
    """Return a text of somebody else's for use within a line: it does nothing to a terminal and begins no new line."""
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def waiting(seconds: float | None, name: str = "the timeout") -> float | None:
    """How long a user is ready to wait: None, as infinity, for ever; less than nothing is nothing.

    Args:
        seconds: as it was given.
        name: what it is, for the error.

    Raises:
        ValueError: it is no number of seconds.
    """
    if seconds is None:
        return None
    value = number(seconds, name)
    return None if value == math.inf else max(value, 0.0)


def deadline(seconds: float, name: str = "the timeout") -> float | None:
    """How long something may take that is given up then; as `waiting`, but above 0."""
    value = number(seconds, name)
    if not value > 0:
        raise ValueError(f"{name} is {seconds}; it must be a number of seconds above 0")
    return None if value == math.inf else value


def number(seconds: object, name: str) -> float:
    """Any number of seconds; raises ValueError for what is none, NaN too."""
    try:
        value = math.nan if isinstance(seconds, (str, bytes)) else float(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{name} is {seconds!r}; it must be a number of seconds")
    return value


MALFORMED = (
    msgspec.DecodeError,
    UnicodeDecodeError,  # text that is not UTF-8
    RecursionError,  # msgspec bounds the nesting by Python's limit
    UsageError,  # a value that checks itself, like model.restart.RestartPolicy
)
"""Each decoder turns these into RemoteWireError, and nothing else is raised by one."""
