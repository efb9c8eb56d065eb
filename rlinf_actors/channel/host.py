"""The shell round a ChannelQueue in the host's process. I/O thread only; it never opens an item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from rlinf_actors.channel.queue import Accepted, ChannelQueue, Command, Deliver, Item, Ticket
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.wire import frames

SHOWN_ITEMS = 20
"""How many waiting items of a key a description shows; the others are counted."""
SHOWN_BYTES = 4096
"""Larger items are shown by their size."""
ITEM_BYTES = 400
"""What an item of one small part costs besides its parts' bytes (measured), so that many small ones count too."""

_pack = msgspec.msgpack.Encoder().encode

WHY = {
    "full": "the channel is full",
    "empty": "the channel is empty",
    "closed": "the channel was closed",
    "cancelled": "the request was cancelled",
}

Send = Callable[[bytes, frames.AnyFrame, Sequence[Buffer]], None]


class ChannelHost:
    """Answers the frames of a channel, or of one replica of it.

    Args:
        queue: the decisions.
        send: answers a peer; to one that is gone it is dropped.
        watch: calls a function once the client of an incarnation has ended.
        keep: makes of a part that arrived one that lasts when its sender has ended.
        on_drained: called when the channel is closed and nobody needs it any more.
    """

    def __init__(
        self,
        queue: ChannelQueue,
        send: Send,
        watch: Callable[[str, Callable[[], None]], None],
        keep: Callable[[Buffer], Buffer] = lambda part: part,
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._send = send
        self._watch = watch
        self._keep = keep
        self._on_drained = on_drained
        self._owners: dict[bytes, str] = {}
        self._watched: set[str] = set()
        self._homes: dict[bytes, int] = {}

    def handle(self, peer: bytes, frame: frames.AnyFrame, parts: list[Buffer]) -> None:
        """A frame of a member arrived."""
        owner = self._owners.get(peer)
        if owner is None or owner not in self._watched:
            owner = self._met(peer)
        if isinstance(frame, frames.ChannelPut):
            self._run(self._queue.put(Ticket(owner, peer, frame.id), frame.key, self._item(frame, parts), frame.nowait))
        elif isinstance(frame, frames.ChannelGet):
            self._run(self._queue.get(Ticket(owner, peer, frame.id), frame.key, frame.nowait))
        elif isinstance(frame, frames.ChannelAck):
            self._run(self._queue.ack(Ticket(owner, peer, frame.id)))
        elif isinstance(frame, frames.ChannelBatch):
            self._run(self._queue.batch(Ticket(owner, peer, frame.id), frame.key, frame.target))
        elif isinstance(frame, frames.ChannelCancel):
            self._run(self._queue.cancel(Ticket(owner, peer, frame.id), frame.back))
        elif isinstance(frame, frames.ChannelLook):
            self._answer(peer, frame.id, [self._queue.size(frame.key), self._queue.full(frame.key)])
        elif isinstance(frame, frames.ChannelShow):
            self._show(peer, frame.id)
        elif isinstance(frame, frames.ChannelClose):
            self._run(self._queue.close())
            self._answer(peer, frame.id, self._queue.drained)
        elif isinstance(frame, frames.ChannelWhere):
            self._answer(peer, frame.id, self._homes.setdefault(frame.key, frame.rank))
        if self._queue.drained:
            self._on_drained()

    def _item(self, frame: frames.ChannelPut, parts: list[Buffer]) -> Item:
        """What the producer sent, in memory of ours: it is accepted only then, so it survives the producer."""
        nbytes = ITEM_BYTES
        for index, part in enumerate(parts):
            if type(part) is not bytes:
                part = parts[index] = self._keep(part)
            nbytes += len(part) if type(part) is bytes else memoryview(part).nbytes
        return Item(parts, nbytes, frame.weight)

    def _met(self, peer: bytes) -> str:
        """A link's identity is ``role:incarnation#number``; the head knows the incarnation's end."""
        owner = self._owners[peer] = peer.rpartition(b"#")[0].decode(errors="replace")
        if owner not in self._watched:
            self._watched.add(owner)
            self._watch(owner.partition(":")[2], partial(self._gone, owner))
        return owner

    def _gone(self, owner: str) -> None:
        self._watched.discard(owner)
        self._owners = {peer: name for peer, name in self._owners.items() if name != owner}
        self._run(self._queue.owner_gone(owner))
        if self._queue.drained:
            self._on_drained()

    def _run(self, commands: Sequence[Command]) -> None:
        for command in commands:
            ticket = command.ticket
            if isinstance(command, Accepted):
                self._send(ticket.peer, frames.Ok(ticket.id), ())
            elif isinstance(command, Deliver):
                about = [(len(item.value), item.weight, item.again) for item in command.items]
                parts = [part for item in command.items for part in item.value]
                self._send(ticket.peer, frames.Ok(ticket.id), [_pack(about), *parts])
            else:
                raised = frames.Raised(ticket.id, command.why, "", WHY[command.why])
                self._send(ticket.peer, raised, ())

    def _answer(self, peer: bytes, id: int, value: Any) -> None:
        self._send(peer, frames.Ok(id), [_pack(value)])

    def _show(self, peer: bytes, id: int) -> None:
        rows = []
        parts: list[Buffer] = []
        for key in self._queue.in_use():
            waiting = self._queue.waiting(key)
            about = []
            for item in waiting[:SHOWN_ITEMS]:
                whole = item.nbytes <= SHOWN_BYTES
                about.append((len(item.value) if whole else -1, item.nbytes - ITEM_BYTES, item.weight, item.again))
                parts += item.value if whole else ()
            rows.append((key, len(waiting), about))
        self._send(peer, frames.Ok(id), [_pack((self._queue.closed, rows)), *parts])
