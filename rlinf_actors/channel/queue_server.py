"""QueueServer: answers the requests of the job's processes to one ChannelQueue, in the channel's host process.

It runs on the I/O thread only, and never unpickles an item. It accepts an item only when the host owns all bytes of the
item, by a copy or in a block that the producer has handed over, so that the item survives the death of its producer.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rlinf_actors.channel.queue import ChannelQueue
from rlinf_actors.channel.queue_commands import (
    ERROR_CHARS,
    AcceptPut,
    AcceptPuts,
    AnyCommand,
    DeliverEach,
    DeliverItems,
    QueuedItem,
    Ticket,
    tickets_of,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.tracing import flows, recorder
from rlinf_actors.wire import frames
from rlinf_actors.wire.protocol import printable

log = logging.getLogger(__name__)

SHOWN_ITEMS = 20
"""Number of waiting items of each key that a description shows. It only counts the others."""
SHOWN_BYTES = 4096
"""Size in bytes above which a description shows only an item's size."""
ITEM_BYTES = 400
"""Bytes counted for each item besides its parts (measured), so that many small items reach the limit too."""
NAME_CHARS = 200
"""Most characters that are kept of a consumer's name."""
ENDED = "its process ended, or left the cluster, before it released the item"
LINK_LOST = "its connection to the channel was lost before it released the item"

if TYPE_CHECKING:
    from rlinf_actors.net.network_emulation import EmulatedNetwork

_pack = msgspec.msgpack.Encoder().encode


class QueueServer:
    """Answers the frames that processes send to a channel, or to one replica of a channel.

    Args:
        queue: decides which request gets which item.
        send: sends an answer to a peer, as WorkerServer.send; drops the answer if the peer is gone.
        watch: called with a worker's incarnation and a function to call when that process has ended.
        keep: returns an arrived part in memory that stays valid after its sender ends.
        on_drained: called when the channel is closed and empty, so that the host can end.
        emulated: the network, if the job emulates one: items take the path from their producer to their consumer.
        soon: calls a function when the frames that have arrived together are handled, so that they share answers.
    """

    def __init__(
        self,
        queue: ChannelQueue,
        send: Callable[..., None],
        watch: Callable[[str, Callable[[], None]], object],
        keep: Callable[[Buffer], Buffer] = lambda part: part,
        on_drained: Callable[[], None] = lambda: None,
        emulated: EmulatedNetwork | None = None,
        soon: Callable[[Callable[[], None]], object] = lambda function: function(),
    ) -> None:
        self._emulated = emulated
        self._soon = soon
        self._queue = queue
        self._send = send
        self._watch = watch
        self._keep = keep
        self._on_drained = on_drained
        self._owners: dict[bytes, str] = {}
        self._watched: set[str] = set()
        self._homes: dict[bytes, int] = {}
        self._steps: dict[type[frames.Frame], Callable[[str, bytes, Any, list[Buffer]], None]] = {
            frames.ChannelPut: self._put,
            frames.ChannelGet: self._get,
            frames.ChannelAck: self._ack,
            frames.ChannelBatch: self._batch,
            frames.ChannelCancel: self._cancel,
            frames.ChannelLook: self._look,
            frames.ChannelShow: self._show,
            frames.ChannelClose: self._close,
            frames.ChannelWhere: self._where,
            frames.ChannelRelease: self._release,
            frames.ChannelPuts: self._puts,
            frames.ChannelGets: self._gets,
        }
        self._accepted: dict[bytes, list[int]] = {}  # answers to puts, until `_answer_together`
        self._delivering: dict[bytes, tuple[list[int], list[Buffer]]] = {}
        self._due = False

    def handle(self, peer: bytes, frame: frames.AnyFrame, parts: list[Buffer]) -> None:
        """Handle a request, acknowledgement or cancellation from the process at the other end of the link *peer*."""
        owner = self._owners.get(peer)
        if owner is None:
            owner = self._owner_of(peer)
        self._steps[type(frame)](owner, peer, frame, parts)
        if self._queue.closed and self._queue.drained:
            self._on_drained()

    def link_lost(self, peer: bytes, _worker: str) -> None:
        """Return the unacknowledged items of the process at the other end of *peer* to their queues.

        Called after the connection was lost, since the items may not have arrived. The process itself fails the
        requests that it had sent on that connection.
        """
        owner = self._owners.pop(peer, None)
        if owner is not None:
            self._run(self._queue.owner_gone(owner, LINK_LOST))

    def _put(self, owner: str, peer: bytes, frame: frames.ChannelPut, parts: list[Buffer]) -> None:
        if (active := recorder.active) is not None:
            flows.note(active, "item arrived", flows.CHANNEL, came=flows.of_request(peer, frame.id))
        item = self._item(peer, frame.weight, parts)
        self._run(self._queue.put(Ticket(owner, peer, frame.id), frame.key, item, frame.nowait))

    def _puts(self, owner: str, peer: bytes, frame: frames.ChannelPuts, parts: list[Buffer]) -> None:
        ids, weights = frame.ids, frame.weights
        if not len(ids) == len(parts) == (len(weights) or len(ids)):
            log.warning("dropped %d puts of %s, which came with %d parts", len(ids), owner, len(parts))
            return
        if (active := recorder.active) is not None:
            for id in ids:
                flows.note(active, "item arrived", flows.CHANNEL, came=flows.of_request(peer, id))
        if not all(type(part) is bytes for part in parts):
            parts = [part if type(part) is bytes else self._keep(part) for part in parts]
        sizes = [ITEM_BYTES + _size(part) for part in parts]
        all_weights = weights or itertools.repeat(0)
        items = list(map(QueuedItem, zip(parts, strict=True), sizes, all_weights, itertools.repeat(peer)))
        self._run(self._queue.put_all(owner, peer, ids, frame.key, items))

    def _get(self, owner: str, peer: bytes, frame: frames.ChannelGet, _parts: list[Buffer]) -> None:
        ticket = Ticket(owner, peer, frame.id)
        if frame.taker:
            self._run(self._queue.take(ticket, frame.key, printable(frame.taker, NAME_CHARS)))
        else:
            self._run(self._queue.get(ticket, frame.key, frame.nowait))

    def _gets(self, owner: str, peer: bytes, frame: frames.ChannelGets, _parts: list[Buffer]) -> None:
        self._run(self._queue.get_all(owner, peer, frame.ids, frame.key))

    def _batch(self, owner: str, peer: bytes, frame: frames.ChannelBatch, _parts: list[Buffer]) -> None:
        self._run(self._queue.batch(Ticket(owner, peer, frame.id), frame.key, frame.target))

    def _ack(self, owner: str, peer: bytes, frame: frames.ChannelAck, _parts: list[Buffer]) -> None:
        commands = self._queue.ack(*tickets_of(owner, peer, frame.ids))
        if commands:
            self._run(commands)

    def _release(self, owner: str, peer: bytes, frame: frames.ChannelRelease, _parts: list[Buffer]) -> None:
        ticket = Ticket(owner, peer, frame.take)
        out = self._queue.is_out(ticket)
        if frame.error is None:
            commands = self._queue.ack(ticket)
        else:
            commands = self._queue.fail(ticket, printable(frame.error, ERROR_CHARS))
        if frame.id and out:
            self._send(peer, frames.Ok(frame.id), ())
        elif frame.id:
            self._send(peer, frames.Raised(frame.id, "gone", "", "the item is not out any more"), ())
        self._run(commands)

    def _cancel(self, owner: str, peer: bytes, frame: frames.ChannelCancel, _parts: list[Buffer]) -> None:
        self._run(self._queue.cancel(Ticket(owner, peer, frame.id), frame.back))

    def _look(self, _owner: str, peer: bytes, frame: frames.ChannelLook, _parts: list[Buffer]) -> None:
        self._answer(peer, frame.id, [self._queue.size(frame.key), self._queue.full(frame.key)])

    def _close(self, _owner: str, peer: bytes, frame: frames.ChannelClose, _parts: list[Buffer]) -> None:
        self._run(self._queue.close())
        self._answer(peer, frame.id, self._queue.drained)

    def _where(self, _owner: str, peer: bytes, frame: frames.ChannelWhere, _parts: list[Buffer]) -> None:
        self._answer(peer, frame.id, self._homes.setdefault(frame.key, frame.rank))

    def _item(self, peer: bytes, weight: float, parts: list[Buffer]) -> QueuedItem:
        nbytes = ITEM_BYTES
        for index, part in enumerate(parts):
            if type(part) is not bytes:
                part = parts[index] = self._keep(part)
            nbytes += _size(part)
        return QueuedItem(parts, nbytes, weight, peer)

    def _owner_of(self, peer: bytes) -> str:
        """Return the process at the other end of the link *peer*, as ``role:incarnation``, and watch it for its end."""
        owner = self._owners[peer] = peer.partition(b"#")[0].decode(errors="replace")
        if owner not in self._watched:
            self._watched.add(owner)
            self._watch(owner.partition(":")[2], partial(self._gone, owner))
        return owner

    def _gone(self, owner: str) -> None:
        self._watched.discard(owner)
        self._owners = {peer: name for peer, name in self._owners.items() if name != owner}
        self._run(self._queue.owner_gone(owner, ENDED))
        if self._queue.drained:
            self._on_drained()

    def _run(self, commands: Sequence[AnyCommand]) -> None:
        """Carry out the commands of one request. Answers that share a frame wait for others."""
        accepted = self._accepted
        for command in commands:
            if isinstance(command, AcceptPut):
                _, peer, id = command.ticket
                accepted.setdefault(peer, []).append(id)
            elif isinstance(command, AcceptPuts):
                accepted.setdefault(command.peer, []).extend(command.ids)
            elif isinstance(command, DeliverEach):
                self._deliver_each(command)
            elif isinstance(command, DeliverItems):
                self._deliver(command)
            else:
                ticket, item = command.ticket, command.item
                raised = frames.Raised(ticket.id, command.why, "", f"the request was refused: {command.why}")
                self._send(ticket.peer, raised, () if item is None else [_pack((item.failed, *item.last_failure))])
        if (accepted or self._delivering) and not self._due:
            self._due = True
            self._soon(self._answer_together)

    def _answer_together(self) -> None:
        """Send each link all answers of one kind in one frame, at once: other processes wait for them."""
        self._due = False
        for peer, ids in self._accepted.items():
            self._send(peer, frames.ChannelAccepted(ids), (), now=True)
        self._accepted.clear()
        for peer, (ids, parts) in self._delivering.items():
            self._send(peer, frames.ChannelItems(ids), parts, now=True, alone=False)
        self._delivering.clear()

    def _deliver_each(self, command: DeliverEach) -> None:
        plain = self._emulated is None and recorder.active is None
        link = b""
        ids: list[int] = []  # the numbers and parts that go to *link* in one frame
        parts: list[Buffer] = []
        for ticket, item in zip(*command, strict=True):
            _, peer, id = ticket
            if not plain or item.again or len(item.value) != 1:
                self._deliver(DeliverItems(ticket, (item,)))
                continue
            if peer != link:
                link, (ids, parts) = peer, self._delivering.setdefault(peer, ([], []))
            ids.append(id)
            parts.append(item.value[0])

    def _deliver(self, command: DeliverItems) -> None:
        ticket, items, kind = command
        if (active := recorder.active) is not None:
            goes = flows.of_answer(ticket.peer, ticket.id)
            flows.note(active, "item delivered", flows.CHANNEL, goes=goes)
        if self._emulated is not None:
            self._emulated.carried_for(ticket.peer, [(item.origin, item.nbytes) for item in items])
        elif not kind and len(items[0].value) == 1 and not items[0].again:
            ids, values = self._delivering.setdefault(ticket.peer, ([], []))
            ids.append(ticket.id)
            values.append(items[0].value[0])
            return
        parts = [part for item in items for part in item.value]
        # not `alone`: a consumer may change lent memory and die, and the next one must get it unchanged
        self._send(ticket.peer, frames.Ok(ticket.id), [_pack(_described(command)), *parts], alone=False)

    def _answer(self, peer: bytes, id: int, value: Any) -> None:
        self._send(peer, frames.Ok(id), [_pack(value)])

    def _show(self, owner: str, peer: bytes, frame: frames.ChannelShow, _parts: list[Buffer]) -> None:
        if frame.what == "drain" and self._queue.undeliverable(frame.key):
            self._run(self._queue.drain(Ticket(owner, peer, frame.id), frame.key))
            return
        if frame.what in ("list", "drain"):
            items = self._queue.undeliverable(frame.key)
            values = [part for item in items for part in item.value]
            self._send(peer, frames.Ok(frame.id), [_pack(_undeliverable(items)), *values], alone=False)
            return
        rows = []
        parts: list[Buffer] = []
        for key in self._queue.in_use():
            waiting = self._queue.waiting(key)
            about = []
            for item in waiting[: 0 if frame.what == "sizes" else SHOWN_ITEMS]:
                whole = item.nbytes <= SHOWN_BYTES
                about.append((len(item.value) if whole else -1, item.nbytes - ITEM_BYTES, item.weight, item.again))
                parts += item.value if whole else ()
            rows.append((key, len(waiting), about))
        dead = [(key, len(self._queue.undeliverable(key))) for key in self._queue.in_use()]
        answer = self._queue.closed, rows, [(key, count) for key, count in dead if count]
        self._send(peer, frames.Ok(frame.id), [_pack(answer), *parts])


def _size(part: Buffer) -> int:
    return len(part) if type(part) is bytes else memoryview(part).nbytes


def _described(command: DeliverItems) -> Any:
    """Return the first part of the message that delivers items: for each item its number of parts and its state."""
    if command.kind == "drain":
        return _undeliverable(command.items)
    if command.kind == "take":
        return [(len(item.value), item.weight, item.again, item.failed + 1) for item in command.items]
    return [(len(item.value), item.weight, item.again) for item in command.items]


def _undeliverable(items: Sequence[QueuedItem]) -> list[tuple[int, int, str, str]]:
    return [(len(item.value), item.failed, *item.last_failure) for item in items]
