"""The seam between the transports (ZeroMQ, memory) and everything above them.

A message is a header (bytes that the layer above encodes) and parts (buffers that it does not
look into). What goes out in one loop iteration to one peer leaves as one chunk. Order is kept per
(sender, receiver). Nothing here says that a peer is gone: the head does.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from rlinf_actors.errors import InternalError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.failure_detection import REACHABILITY_TIMEOUT_S
from rlinf_actors.security.members import Gate, Member

if TYPE_CHECKING:
    from rlinf_actors.net.shared_memory import Arena

OnTurnedAway = Callable[[str, bool], None]
"""(why, for good); on the network's loop: a handshake over TCP failed. For good: the link does not try again."""
OnReset = Callable[[], None]
"""Runs on the network's loop: the connection over TCP was lost, and is there again. What was under way may be lost."""
OnMessage = Callable[[bytes, bytes, "list[Buffer]"], None]
"""(peer, header, parts); runs on the network's loop. *peer* is b"" on a Link."""


OnFailed = Callable[[bytes, InternalError], object]
"""(peer, error); runs on the network's loop: OnMessage raised, and this process goes on. Fails what the message that
came last from the peer belonged to."""


def secret_identity(name: str) -> bytes:
    """What a listener shall know this process by: *name*, and a part that nobody can guess.

    A ROUTER lets whoever says an identity take over the connection of who has it, and with it what is sent there.
    """
    return f"{name}#{secrets.token_hex(8)}".encode()


def peer_name(identity: bytes) -> str:
    """Return the part of an identity that logs and errors may show: everything before its secret part."""
    return identity.partition(b"#")[0].decode(errors="replace")


class Reachability(enum.Enum):
    """What a look at an endpoint found."""

    LISTENS = "listens"
    REFUSED = "refused"
    SILENT = "silent"


class Diagnosis(enum.Enum):
    """Who listens at an endpoint, as far as its first bytes tell; the values are for people."""

    NOBODY = "nobody listens there: start the head, or correct the address"
    NAMELESS = "its name cannot be resolved: is it spelt right, and does this machine's name service know it?"
    SILENT = "its machine does not answer: is it on, is the address right, does a firewall drop packets?"
    MUTE = "something takes connections there and says nothing: a head that stands still, or another program"
    CLOSES = "something there closes each connection at once: a head that has too many, or another program"
    OTHER = "another program listens there, not a head"
    KEYED = "something that wants keys listens there and does not answer: a head that is busy or stands still"
    PLAIN = "something without keys listens there and does not answer: a head that is busy, or another program"


class Listener(Protocol):
    """A socket that others connect to.

    Attributes:
        on_unreachable: called on the loop with a peer that something was sent to and that is not connected, if set.
    """

    on_unreachable: Callable[[bytes], None] | None

    def bind(self, endpoint: str) -> str:
        """Listen; returns the endpoint with the actual port. Raises ConfigError or OSError."""

    def send(self, peer: bytes, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        """Send to a connected peer; to one that is gone it is dropped. Any thread.

        *now* hands the message to the socket on the calling thread if nothing is queued before it
        (saves a wake-up of the loop's thread; costs the batching).
        """

    def member_of(self, peer: bytes) -> Member | None:
        """Who sent what came from this peer, by the key of its connection; LOCAL where none was needed. None: its key
        is not admitted any more. Loop thread.
        """

    def close(self, linger_ms: int = 0) -> None:
        """Stop listening; what is not sent after *linger_ms* ms is dropped. Loop thread only; twice is fine."""


class Link(Protocol):
    """A connection to one listener; reconnects by itself."""

    def send(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False) -> None:
        """As Listener.send. Messages to a listener that is not there yet wait."""

    def close(self, linger_ms: int = 0) -> None:
        """Close; what is not sent after *linger_ms* milliseconds is dropped. Loop thread only; twice is fine."""


class Network(Protocol):
    """Makes listeners and links on one event loop.

    Attributes:
        forked: whether this process is a fork of the one that made it: nothing can be sent then.
        memory: what this process lends to others on its machine, None to send everything.
    """

    forked: bool
    memory: Arena | None

    def listener(
        self,
        on_message: OnMessage,
        *,
        max_bytes: int = -1,
        gate: Gate | None = None,
        on_failed: OnFailed | None = None,
    ) -> Listener:
        """A listener that is not bound yet; frames above *max_bytes* end the connection (-1: no limit).

        Where its TCP side is a CURVE server, *gate* decides whom it lets in. For *on_failed* see net.loop's
        `handling_failed`.
        """

    def link(
        self,
        endpoint: str,
        identity: bytes,
        on_message: OnMessage,
        *,
        token: str = "",
        on_turned_away: OnTurnedAway | None = None,
        on_reset: OnReset | None = None,
        on_failed: OnFailed | None = None,
    ) -> Link:
        """A link to *endpoint*; the listener knows it as *identity*, unique per process and purpose, and best unknown
        to others. To a worker it is the job's *token* that proves membership, to the head this process's own key.
        """

    async def check_reachability(self, endpoint: str, timeout_s: float = REACHABILITY_TIMEOUT_S) -> Reachability:
        """Whether anything listens at *endpoint*; see net.look. Loop thread."""

    async def diagnose(self, endpoint: str) -> Diagnosis:
        """Who listens at *endpoint*; see net.look. Loop thread."""

    def soon(self, function: Callable[[], object]) -> None:
        """Run *function* on the loop soon. Any thread, finalizers too; once the loop is closed it does nothing."""

    def close(self) -> None:
        """Close every socket made here. Loop thread only."""
