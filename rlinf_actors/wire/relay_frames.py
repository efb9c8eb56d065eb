"""Relayed: the one frame between a process and the relay of another node, in both directions.

A relay passes messages between a process and the workers of the relay's node. It reads only this header: the headers
and parts of the messages that it passes on are parts of this frame, which it does not decode.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rlinf_actors.wire.bounds import Address, Handle, Ids, Name, OfGroup
from rlinf_actors.wire.frame import Frame

Number = Annotated[int, Meta(ge=0, le=2**53)]


class RelayedLink(msgspec.Struct, frozen=True, array_like=True):
    """A link that the relay opens for the caller.

    Attributes:
        route: names the link on this path.
        endpoint: the unix socket of the worker.
        identity: identity of the caller's link.
        to: name of the worker, for log lines.
    """

    route: Handle
    endpoint: Address
    identity: Handle
    to: Name


class Relayed(Frame, frozen=True, tag=80):
    """Messages to or from workers of one node, in order.

    Attributes:
        id: number of the path, which the caller has chosen.
        rows: for each message its number of parts, and the routes of its receivers (from the relay: of its sender).
            The parts of this frame are the header and the parts of each message.
        opened: links to open first. Only to the relay.
        closed: routes whose links are closed, after the messages. From the relay: links that were interrupted.
        credit: bytes that the receiver of earlier messages has passed on or handled, by route; b"" for all routes.
    """

    id: int
    rows: Ids[tuple[Number, OfGroup[Handle]]] = []
    opened: OfGroup[RelayedLink] = []
    closed: OfGroup[Handle] = []
    credit: OfGroup[tuple[Handle, Number]] = []
