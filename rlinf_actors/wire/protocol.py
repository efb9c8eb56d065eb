"""The protocol: its version, the base of all control messages, and the limits of what a message may hold. Pure.

House rules. A head serves peers of `OLDEST` to `PROTOCOL`, and a worker takes links from them, so that a cluster can be
upgraded node by node, the head first. So a message or frame only ever gains fields with a default, which stands for
what the older version does. A new message goes only to a peer whose session speaks the protocol that has it, or to one
that may drop it while no process waits for an answer. A renamed class keeps its tag.

Receivers refuse values beyond the limits while they decode. So senders must not make such values, and what users give
is checked where it comes in (`waiting`, `deadline`).
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
    """Return the protocols of a peer, for people; for the arguments see `agreed`."""
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
"""Bytes of a control message. A launch of 10,000 workers with 1 KiB of environment each is 10 MiB."""
MAX_ASKED_BYTES = MAX_CONTROL_BYTES // 8 * 7
"""Bytes of a control message to the head, which passes it on or answers with it, and adds a token for each worker."""
MAX_SIZE = 100_000
"""Ranks of a group: the head counts them one by one."""

Number = Annotated[float, Meta(ge=-sys.float_info.max)]
"""Any number but NaN and minus infinity. No comparison holds for NaN: a timer that is due then never is, or always."""
Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""What pidfd_open takes; 0 for none."""
WorkerId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""A worker's socket, its cgroup and its record are files of that name: a path would lead elsewhere."""
MAX_DEPTH = 8
"""Ranks of an address: a worker's, its child's, that one's child's, ..."""
ChildPath = Annotated[list[Annotated[int, Meta(ge=0, le=MAX_SIZE)]], Meta(min_length=1, max_length=MAX_DEPTH - 1)]
"""Ranks that lead from a worker to one of its children, or to a child's child."""
Count = Annotated[int, Meta(ge=1, le=2**53)]
"""How often something happened."""
Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
"""How many there are of something that is counted through."""

TEXT_CHARS = 1000
"""Characters of a line of the event log, and of a person's reason: no message may push other events out."""


def printable(text: str, limit: int = TEXT_CHARS) -> str:
    """Return another process's text for use within a line: without control characters and line breaks."""
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def waiting(seconds: float | None, name: str = "the timeout") -> float | None:
    """Return a user's timeout in seconds, at least 0; None, for ever, if it is None or infinite.

    Args:
        seconds: as the user gave it.
        name: the parameter, for the error.

    Raises:
        ValueError: *seconds* is no number of seconds.
    """
    if seconds is None:
        return None
    value = number(seconds, name)
    return None if value == math.inf else max(value, 0.0)


def deadline(seconds: float, name: str = "the timeout") -> float | None:
    """Return a user's limit in seconds, as `waiting` does; it must be above 0."""
    value = number(seconds, name)
    if not value > 0:
        raise ValueError(f"{name} is {seconds}; it must be a number of seconds above 0")
    return None if value == math.inf else value


def number(seconds: object, name: str) -> float:
    """Return any number of seconds as a float; raise ValueError for anything else, NaN too."""
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
"""Errors of decoding malformed bytes. Each decoder turns these into RemoteWireError and raises nothing else."""
