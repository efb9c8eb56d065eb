"""Headers of the messages between a channel's host and its users; part of `wire.frames`."""

from __future__ import annotations

from typing import Union

from rlinf_actors.wire.bounds import Ids, Name, QueueKey, Report
from rlinf_actors.wire.frame import Frame
from rlinf_actors.wire.protocol import Number


class ChannelPut(Frame, frozen=True, tag=40):
    """Append the item that follows this header to the queue of `key`.

    Answered by ChannelAccepted once the channel has the item, or by Raised(kind: full, closed, cancelled). `weight` is
    the item's weight, by which ChannelBatch counts. `nowait`: True to answer with "full" instead of waiting for room.
    """

    id: int
    key: QueueKey
    weight: Union[int, Number]
    nowait: bool


class ChannelGet(Frame, frozen=True, tag=41):
    """Remove the first item of a key. Answered by ChannelItems or Ok, or by Raised(kind: empty, closed, cancelled).

    Ok is followed by a list with one entry, then by the item's parts. The entry is (number of parts, weight of the
    item, True if a consumer may have received the item before). `nowait`: True to answer with "empty" instead of
    waiting for an item.

    If `taker` (the consumer's name, for people) is set, the request is a take: the host keeps the item as "in
    processing" until a ChannelRelease names this request. The entry then also contains the number of this delivery. A
    take may also be answered by Raised(kind: undeliverable), followed by the number of deliveries, the last consumer,
    and the reason for which its delivery failed.
    """

    id: int
    key: QueueKey
    nowait: bool
    taker: Name = ""


class ChannelBatch(Frame, frozen=True, tag=42):
    """Remove the first items of a key until their weights add up to `target`.

    Answered like ChannelGet, with one entry for each item in the list that follows Ok.
    """

    id: int
    key: QueueKey
    target: Union[int, Number]


class ChannelAck(Frame, frozen=True, tag=43):
    """Acknowledgement: the items that answered the ChannelGets and ChannelBatches `ids` have reached the user's code.

    The host then forgets these items.
    """

    ids: Ids[int]


class ChannelCancel(Frame, frozen=True, tag=44):
    """Cancel the put, get or batch with the number `id`.

    If `back` is True, items that are already on their way to the sender return to the queue.
    """

    id: int
    back: bool


class ChannelLook(Frame, frozen=True, tag=45):
    """Ask for the size of a key's queue. Answered by Ok with [number of items, True if the queue is full]."""

    id: int
    key: QueueKey


class ChannelShow(Frame, frozen=True, tag=46):
    """Ask for the items of a channel, to show them. `what` is "counts", "sizes", "list" or "drain".

    "counts" is answered by Ok with [closed, a row for each key, the number of undeliverable items of each key that has
    some]; small items that wait follow. "sizes" leaves out the items. "list" and "drain" return the undeliverable items
    of `key`, after descriptions of the items; "drain" also removes the items, and is acknowledged like a get.
    """

    id: int
    what: Name
    key: QueueKey = b""


class ChannelClose(Frame, frozen=True, tag=47):
    """Close the channel: it accepts no more puts. Answered by Ok."""

    id: int


class ChannelWhere(Frame, frozen=True, tag=48):
    """Ask replica 0 of a distributed channel which replica has a key. Answered by Ok with that replica's rank.

    If no replica has the key yet, replica `rank` gets the key. It is the replica on the sender's node, if there is one.
    """

    id: int
    key: QueueKey
    rank: int


class ChannelRelease(Frame, frozen=True, tag=49):
    """End the take `take` (the id of its ChannelGet).

    `error` says why the item was not processed, None if it was. Answered by Ok, or by Raised(kind: gone) if the host no
    longer waits for this release; not answered if `id` is 0.
    """

    id: int
    take: int
    error: Union[Report, None] = None


class ChannelPuts(Frame, frozen=True, tag=50):
    """Several ChannelPuts of one key, of items of one part each.

    Part n is the item of put `ids[n]`, whose weight is `weights[n]`, or 0 if `weights` is empty.
    """

    ids: Ids[int]
    key: QueueKey
    weights: Ids[Union[int, Number]] = []


class ChannelGets(Frame, frozen=True, tag=51):
    """Several ChannelGets of one key."""

    ids: Ids[int]
    key: QueueKey


class ChannelAccepted(Frame, frozen=True, tag=52):
    """Reply to the puts `ids`: the channel has their items."""

    ids: Ids[int]


class ChannelItems(Frame, frozen=True, tag=53):
    """Reply to the gets `ids`: part n is the item for get `ids[n]`.

    No consumer has received these items before, and each has one part. All other items are sent by Ok.
    """

    ids: Ids[int]


ChannelFrame = Union[
    ChannelPut, ChannelGet, ChannelBatch, ChannelAck, ChannelCancel, ChannelLook, ChannelShow, ChannelClose,
    ChannelWhere, ChannelRelease, ChannelPuts, ChannelGets,
]  # fmt: skip
"""Headers that a channel's host receives."""
