"""Version of the protocol, base class of all control messages, and limits of the values in messages. Pure.

House rules. There is one protocol, and every process of a cluster speaks it: a head and a worker refuse a peer that
speaks another one, before they act on anything else that it says. A change of a message or frame raises `PROTOCOL`. The
first message of a peer keeps its fields `protocol` and `version`.

Receivers reject values beyond the limits while they decode. Senders must therefore not make such values, and values
from users are checked where they enter (`waiting`, `deadline`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from rlinf_actors.errors import ProtocolError, RemoteWireError, UsageError
from rlinf_actors.shown import TEXT_CHARS as TEXT_CHARS
from rlinf_actors.shown import printable as printable

T = TypeVar("T")

PROTOCOL = 1
"""The protocol of this version.

It is raised with each release that changes the control messages (`wire.control_codec`), values.py or frames.py.
"""


class ControlMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Base of all control messages. The class's name is the tag by which the receiver recognises the message."""


def what_to_upgrade(protocol: int, peer: str, this: str) -> str:
    """Return the advice "upgrade *peer*" or "upgrade *this*", names for people, if *peer* speaks another *protocol*."""
    return f"upgrade {this if protocol > PROTOCOL else peer}"


MAX_CONTROL_BYTES = 16 << 20
"""Largest size of a control message in bytes. A launch of 10,000 workers with 1 KiB of environment each has 10 MiB."""
MAX_ASKED_BYTES = MAX_CONTROL_BYTES // 2
"""Largest size in bytes of a control message to the head.

It is smaller than MAX_CONTROL_BYTES because the head forwards the content and adds a token for each worker. Handles of
30,000 workers have 8 MiB.
"""
MAX_SIZE = 100_000
"""Largest number of ranks of a group: the head iterates over them."""

Number = Annotated[float, Meta(ge=-sys.float_info.max)]
"""Any number except NaN and minus infinity: every comparison with NaN is False, which breaks timers."""
MAX_LEASE_S = 3600.0
"""Longest lease in seconds."""
MAX_ROBOT_LEASE_S = 60.0
"""Longest lease of a robot worker in seconds: so long may an arm move that no process watches."""
Lease = Annotated[float, Meta(ge=0, le=MAX_LEASE_S, title="lease", description="A lease must expire.")]
RobotLease = Annotated[float, Meta(ge=0, le=MAX_ROBOT_LEASE_S, title="lease", description="Robots must stop.")]
Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A process id that pidfd_open accepts; 0 for none."""
Port = Annotated[int, Meta(ge=0, le=65535)]
"""A TCP port; 0 for none."""
WorkerId = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z",
        max_length=64,
        title="worker id",
        description="It is also the name of a unix socket, whose path may have 107 characters.",
    ),
]
"""Id of a worker. It is also the name of files (socket, cgroup, record), so it must not contain a path."""
MAX_DEPTH = 8
"""Largest number of ranks in an address: the worker's, its child's, that child's child's, ..."""
ChildPath = Annotated[
    list[Annotated[int, Meta(ge=0, le=MAX_SIZE)]],
    Meta(min_length=1, max_length=MAX_DEPTH - 1, title="path of a child", description="Children nest no deeper."),
]
"""Ranks that lead from a worker to one of its children or to a descendant of a child."""
Count = Annotated[int, Meta(ge=1, le=2**53)]
"""Number of times that an event happened."""
Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
"""A number of ranks or siblings; it is limited because receivers iterate over them."""


def waiting(seconds: float | None, name: str = "the timeout") -> float | None:
    """Return a user's timeout in seconds, at least 0; None for no limit, if *seconds* is None or infinite.

    Args:
        seconds: the value that the user gave.
        name: name of the parameter, for the error.

    Raises:
        ValueError: *seconds* is not a number of seconds.
    """
    if seconds is None:
        return None
    value = number(seconds, name)
    return None if value == math.inf else max(value, 0.0)


def deadline(seconds: float, name: str = "the timeout") -> float | None:
    """Return a user's time limit in seconds, None if it is infinite. Raises ValueError if it is not above 0."""
    value = number(seconds, name)
    if not value > 0:
        raise ValueError(f"{name} is {seconds}; it must be a number of seconds above 0")
    return None if value == math.inf else value


def number(seconds: object, name: str) -> float:
    """Return *seconds* as a float. Raises ValueError, which mentions *name*, if it is NaN or not a number."""
    try:
        value = math.nan if isinstance(seconds, (str, bytes)) else float(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{name} is {seconds!r}; it must be a number of seconds")
    return value


def expected(answer: object, kind: type[T]) -> T:
    """Return *answer*, which the head has sent. Raise ProtocolError if it is not a *kind*."""
    if not isinstance(answer, kind):
        raise ProtocolError(f"the head answered with {type(answer).__name__}; a {kind.__name__} was expected")
    return answer


MALFORMED = (
    msgspec.DecodeError,
    UnicodeDecodeError,  # text that is not UTF-8
    RecursionError,  # msgspec bounds the nesting by Python's limit
    UsageError,  # a value that checks itself, like model.restart.RestartPolicy
)
"""Errors of decoding malformed bytes. Each decoder turns these into RemoteWireError and raises nothing else."""


_makers: list[Callable[[], object]] = []


def checked(kind: Any, what: str) -> Callable[[bytes | memoryview], Any]:
    """Return a function that decodes bytes as a *kind*, a type. On malformed bytes it raises RemoteWireError.

    The error text says that the bytes are not *what*, such as "an answer to a child". The decoder is made by the first
    call or by `make_decoders`, and not at import: it takes up to 7 ms to read the types of many messages.
    """
    decode: Callable[[bytes | memoryview], Any] | None = None

    def make() -> Callable[[bytes | memoryview], Any]:
        nonlocal decode
        decode = decode or msgspec.msgpack.Decoder(kind).decode
        return decode

    def checked_decode(data: bytes | memoryview) -> Any:
        try:
            return (decode or make())(data)
        except MALFORMED as error:
            raise RemoteWireError(f"not {what}: {error}") from None

    _makers.append(make)
    return checked_decode


def make_decoders() -> None:
    """Make the decoders of all imported modules, in a process that waits anyway, or before it forks. Any thread."""
    for make in _makers:
        make()
