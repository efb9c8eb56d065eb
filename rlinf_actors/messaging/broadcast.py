"""Broadcast one object from a source worker to all members of a `BroadcastTree`.

A tree is set up at the first broadcast among the same members from the same source, and is then kept. Each member
receives the bytes from its parent and forwards them to its children, in the order of the broadcasts. A member connects
to its children only, but watches every member.

Failures. If any member dies, every unfinished broadcast of the tree fails with PeerDiedError at every member. If two
members lose their connection, the tree cannot go on either, and only these two know: they report it to all members
(BroadcastFailed), where current and later broadcasts of the tree fail at once.

If a member cannot send one object, for example because the object cannot be pickled, it sends the error instead. So
every member takes part in every broadcast, and all members stay in step.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from rlinf_actors import exhaustion
from rlinf_actors.errors import EndedError, GroupClosedError
from rlinf_actors.messaging import addressing, contents
from rlinf_actors.messaging.broadcast_group import BroadcastGroup, GroupSend
from rlinf_actors.messaging.broadcast_reports import FailureReports, reported
from rlinf_actors.messaging.directory import peer_gone_error, prefixed
from rlinf_actors.messaging.mailbox import ArrivedMessage
from rlinf_actors.messaging.messenger import Messenger
from rlinf_actors.messaging.outbox import OutgoingMessage
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions
from rlinf_actors.messaging.receive import PendingReceive, PostedReceive
from rlinf_actors.messaging.tensor_receiver import IncomingTensors
from rlinf_actors.messaging.tensor_transfer import DetachedTensors
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import frames

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")


class BroadcastTree:
    """One member's view of a broadcast tree. Any thread may use it.

    Args:
        order: all members, the source first.
        me: this worker.
        ended: called once when the tree fails, because a member died, was not found or cannot be reached.
        reports: the failures that members have reported.
    """

    def __init__(
        self,
        messenger: Messenger,
        me: WorkerAddress,
        order: tuple[WorkerAddress, ...],
        ended: Callable[[BroadcastTree], None],
        reports: FailureReports,
    ) -> None:
        self.order = order
        self.stream = ""
        self.source_node = ""
        self._messenger = messenger
        self._index = order.index(me)
        self._ended = ended
        self._reports = reports
        self._lock = threading.RLock()  # completing one broadcast may start the next one on this thread
        self._groups: dict[str, RemoteGroup] = {}
        self._child_peers: dict[WorkerAddress, Peer] = {}  # of the child members
        self._early: list[SourceBroadcast | RelayBroadcast] | None = []  # started before the members were found
        self._under_way: set[SourceBroadcast | RelayBroadcast] = set()
        self._error: Callable[[str], Exception] | None = None
        self._others: set[Peer] = set()
        self._parent: Peer | None = None
        self.children: list[Peer] = []
        self._steps: queue.SimpleQueue[Callable[[], object] | None] | None = None
        self._members: list[Peer] = []
        self.one_at_a_time = threading.RLock()
        self.group = BroadcastGroup(messenger.endpoint, self._index, len(order), self._tell)

    def start(self, broadcast: SourceBroadcast | RelayBroadcast) -> None:
        """Start a broadcast of this tree, after all broadcasts that were started before.

        While members of the tree are still being looked up, the broadcast waits. If the tree has failed, the broadcast
        fails.
        """
        with self._lock:
            if self._error is None and self._early is not None:
                self._early.append(broadcast)
                return
            if self._error is None:
                self._under_way.add(broadcast)
        self._begin(broadcast)

    def _begin(self, broadcast: SourceBroadcast | RelayBroadcast) -> None:
        if self._error is not None:
            broadcast.reject(self._error(broadcast._what))
            return

        def over() -> None:
            with self._lock:
                self._under_way.discard(broadcast)

        broadcast._on_done(over)
        broadcast.begin(self)

    # --- members ---

    def find(self) -> None:
        """Begin to look up all members. When all are found, start the broadcasts that wait for this. Does not block."""
        groups = dict.fromkeys(member.root_group_name for member in self.order)
        children = [member for member in self.order if len(member.rank_path) > 1]
        self._missing = len(groups) + len(children)
        for name in groups:
            self._messenger.directory.group(name, partial(self._found, self._groups, name))
        for child in children:
            self._messenger.directory.peer(child, partial(self._found, self._child_peers, child))

    def _found(self, known: dict[K, V], key: K, outcome: V | Exception) -> None:
        if isinstance(outcome, Exception):
            self._fail_with(outcome)
            return
        with self._lock:
            known[key] = outcome
            self._missing -= 1
            last = not self._missing
        if last:
            self._all_found()

    def _all_found(self) -> None:
        try:
            self._place_members()
        except Exception as error:  # noqa: BLE001 - it reaches the waiters
            self._fail_with(error)
            return
        for peer in self._others:
            self._messenger.watch(peer)
        for peer in self._others:
            self.gone(peer)  # in case the member died before the watch began
        for report in self._reports.of(self.stream):
            self.told(report)
        while True:
            with self._lock:
                early = self._early or []
                if not early:
                    self._early = None
                    return
                self._early = []
                self._under_way.update(early)
            for broadcast in early:
                self._begin(broadcast)

    def _place_members(self) -> None:
        peers, nodes = [], []
        for member in self.order:
            group = self._groups[member.root_group_name]
            addressing.check_rank(member, len(group.peers))
            rank = member.rank_path[0]
            peers.append(self._child_peers.get(member) or group.peers[rank])
            nodes.append(group.states[rank].node_rank)
        parents = addressing.tree(nodes)
        self._parent = None if self._index == 0 else peers[parents[self._index]]
        self.children = [peers[child] for child in addressing.children(parents, nodes, self._index)]
        self.stream = addressing.stream_name(self.order, [peer.worker_id for peer in peers])
        self._members = peers
        self._others = {peer for index, peer in enumerate(peers) if index != self._index}
        self.source_node = peers[0].node

    def gone(self, peer: Peer) -> None:
        """If *peer* is a member of this tree, and messages can no longer be exchanged with it, fail the tree."""
        error = self._messenger.error_of(peer)
        if error is not None and peer in self._others:
            self._fail(lambda what: peer_gone_error(peer, error, what))
            if not isinstance(error, (EndedError, GroupClosedError)):  # of these all members hear from the head
                self._tell(0, str(error), peer.name)

    def told(self, report: frames.BroadcastFailed) -> None:
        """Fail the tree, or its process group, as a member has reported."""
        if report.group:
            self.group.told(report)
        else:
            self._fail(lambda what: reported(report, what))

    def _tell(self, group: int, text: str, lost: str = "") -> None:
        """Report to all members that process group *group*, or the tree if it is 0, has failed at this member."""
        report = frames.BroadcastFailed(self.stream, group, self._messenger.endpoint.name, text, lost)
        if self.stream and self._reports.add(report):
            for peer in self._others:
                peer.send(report)

    def _fail_with(self, error: Exception) -> None:
        self._fail(lambda what: prefixed(error, what))

    def _fail(self, error: Callable[[str], Exception]) -> None:
        """Fail every broadcast of the tree, current and future.

        *error* makes the exception of one broadcast from the text that names the broadcast.
        """
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            lost = [*self._under_way, *(self._early or [])]
            self._early = None
            self._under_way.clear()
            if self._steps is not None:
                self._steps.put(None)
        self._ended(self)
        self.group.end(lambda: error("broadcast()"))
        for broadcast in lost:
            broadcast.reject(error(broadcast._what))
            if isinstance(broadcast, RelayBroadcast):
                self._messenger.withdraw(broadcast.posted)
        if self._parent is not None:
            self._messenger.forget((self._parent.name, self.stream))

    # --- what broadcasts need ---

    def in_order(self, step: Callable[[], object], blocks: bool) -> None:
        """Call *step* after all steps given before.

        Steps run on the calling thread until the first step with *blocks* True. That step and all later ones run on a
        thread of the tree, so that the loop thread is never blocked.
        """
        with self._lock:
            if self._steps is None and blocks:
                self._steps = queue.SimpleQueue()
                exhaustion.OwnThread(
                    target=_call_steps, args=(self._steps, self._broke), name="rlinf-actors-broadcast", daemon=True
                ).start()
            steps = self._steps
            if steps is not None:
                steps.put(step)
                if self._error is not None:
                    steps.put(None)
        if steps is None:
            step()

    def _broke(self, error: Exception) -> None:
        log.error("the broadcasts of %s cannot go on", self.order[0], exc_info=error)
        self._fail_with(error)
        self._tell(0, f"{type(error).__name__}: {error}")

    def forward(
        self,
        parts: Sequence[Buffer],
        borrowed: bool,
        done: Callable[[Exception | None], object],
        tensors: DetachedTensors | None = None,
        options: CollectiveGroupOptions | None = None,
        span: int = 0,
        transfer: frames.TensorTransfer | None = None,
    ) -> None:
        """Send a message to every child of this member in the tree. If a child is gone, the whole tree fails.

        *done* is called once when every child has the message, or at once if there are no children. If the tensors
        cannot be sent to a child, it is called with the error; the child has the error, too.

        *parts* is the message; *borrowed* is True if some parts are the sender's own memory. *tensors* travel beside
        the message, by process groups with *options*. *transfer* is the header of tensors that travel by one process
        group of all members instead. *span* is the number of the span in which the arrows to the
        children begin, 0 if this process is not traced.
        """
        for child in self.children:
            if borrowed:  # one copy in shared memory serves all children that can be lent it
                parts, stored = child.lending.store(parts)
                borrowed = not stored
        left = len(self.children)
        failed: Exception | None = None
        guard = threading.Lock()

        def one_done(child: Peer, work: AsyncWork[None]) -> None:
            nonlocal left, failed
            error = work.error
            if error is not None and self._messenger.error_of(child) is not None:
                self.gone(child)
                return
            with guard:
                left -= 1
                failed = failed or (error if isinstance(error, Exception) else None)
                last = left == 0
            if last:
                done(failed)

        if not self.children:
            done(None)
        for child in self.children:
            work: AsyncWork[None] = AsyncWork(f"broadcast from {self.order[0]} to {child.name}")
            work._seen = True  # its error is the tree's
            work._on_done(partial(one_done, child, work))
            beside = tensors or DetachedTensors()
            message = OutgoingMessage(self.stream, parts, borrowed, work, beside, options, span=span, transfer=transfer)
            self._messenger.post(child, message)

    def group_header(
        self, tensors: DetachedTensors, options: CollectiveGroupOptions | None
    ) -> frames.TensorTransfer | None:
        """Return the header of the source's tensors by one process group; None if they travel down the tree."""
        if not tensors.tensors:
            return None
        senders = [self._messenger.tensor_sender(peer) for peer in self._members[1:]]  # the first call asks
        if self._messenger.endpoint.io.inside():
            return None
        return self.group.header(tensors, options or CollectiveGroupOptions(), [sender.facts for sender in senders])

    def receive(self, posted: PostedReceive) -> None:
        """Let *posted* receive the next message that this member's parent in the tree sends."""
        assert self._parent is not None
        posted.key = (self._parent.name, self.stream)
        self._messenger.post_receive(posted, self._parent)


def _call_steps(steps: queue.SimpleQueue[Callable[[], object] | None], broke: Callable[[Exception], object]) -> None:
    while True:
        step = steps.get()
        if step is None:
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - it reaches all members
            broke(error)
        del step  # it keeps a message alive, which now belongs to the receiver


class SourceBroadcast(AsyncWork[Any]):
    """A broadcast at its source. Its result is the object itself.

    It is done when all children in the tree have the object.
    """

    span = 0
    """Number of the broadcast's span in the trace; 0 if this process is not traced."""

    def __init__(
        self,
        value: Any,
        parts: Sequence[Buffer],
        borrowed: bool,
        tensors: DetachedTensors,
        options: CollectiveGroupOptions | None,
    ) -> None:
        super().__init__("broadcast()")
        self._message: Any = (value, parts, borrowed, tensors, options)

    def begin(self, tree: BroadcastTree) -> None:
        (value, parts, borrowed, tensors, options), self._message = self._message, None
        transfer = tree.group_header(tensors, options)
        ends = itertools.count(1)
        operations = 1 if transfer is None else 2  # the message, and the tensors

        def ended(error: Exception | None) -> None:
            if error is not None:
                self.reject(prefixed(error, self._what))
            elif next(ends) == operations:
                self.resolve(value)

        if transfer is None:
            tree.forward(parts, borrowed, ended, tensors, options, self.span)
            return

        with tree.one_at_a_time:  # the group carries the tensors in the order of the messages
            tree.forward(parts, borrowed, ended, None, options, self.span, transfer)
            tree.group.post(transfer, GroupSend(tensors, ended))


class RelayBroadcast(PendingReceive):
    """A broadcast at a member that is not the source: receive from the parent, then forward to the children.

    This AsyncWork is done when all children have the message; until then the tree keeps a reference to it. Cancelling a
    waiter does not stop the broadcast, since other members depend on the broadcast.
    """

    waits_for_tensors = False  # `_forward` waits for them, in the order of the broadcasts

    def __init__(self, messenger: Messenger, source: WorkerAddress, options: CollectiveGroupOptions | None) -> None:
        super().__init__(f"broadcast() from {source}", messenger, source)
        self._options = options
        self._source = source
        self._source_node = ""
        self._tree: BroadcastTree | None = None

    def begin(self, tree: BroadcastTree) -> None:
        self._tree = tree
        tree.receive(self.posted)

    def take(self, message: ArrivedMessage) -> bool:
        """Accept *message* from the parent, and forward it to the children before it becomes the result here.

        Always return True.

        The result waits for the children because it uses the memory from which the children receive the message.
        """
        tree = self._tree
        assert tree is not None
        if self.span and message.flow and (active := recorder.active) is not None:
            active.flow_in(self.span, message.flow)
        tree.in_order(lambda: self._forward(tree, message), message.tensors is not None)
        return True

    def _forward(self, tree: BroadcastTree, message: ArrivedMessage) -> None:
        """Forward the message. Blocks if tensors travel beside the message: then do not call it on the loop thread."""
        incoming: IncomingTensors | None = message.tensors
        tensors, raw = None, message.parts
        if incoming is not None and incoming.by_group:
            arriving = incoming
            tree.group.post(incoming.transfer, incoming)
            parts, borrowed = contents.copy_small(incoming.parts)

            def forwarded(error: Exception | None) -> None:
                arriving._on_done(lambda: self._forwarded(tree, message, error))

            tree.forward(parts, borrowed, forwarded, None, self._options, self.span, incoming.transfer)
            return
        if incoming is not None:
            raw = incoming.parts
            try:
                incoming.wait()
                if tree.children:
                    tensors = incoming.forward()
            except Exception as error:  # noqa: BLE001 - it reaches this member's waiter, and the children's
                failed = error
                parts, borrowed = contents.encode_failure(error)
                tree.forward(parts, borrowed, lambda _error: self.reject(failed), span=self.span)
                return
        parts, borrowed = contents.copy_small(raw)
        forwarded = partial(self._forwarded, tree, message)
        tree.forward(parts, borrowed, forwarded, tensors, self._options, self.span)

    def _forwarded(self, tree: BroadcastTree, message: ArrivedMessage, error: Exception | None) -> None:
        self._tree = None
        if error is not None:
            self.reject(prefixed(error, self._what))
            return
        self._message = message
        self._source_node = tree.source_node
        self.resolve(None)

    def _decode(self, message: ArrivedMessage) -> Any:
        error = contents.failure_in(message.parts, self._source, self._source_node)
        if error is not None:
            raise prefixed(error, self._what)
        return super()._decode(message)

    def _fall_asleep(self) -> None:
        """Do nothing when the last waiter is cancelled. A PendingReceive would withdraw here.

        This broadcast stays in the mailbox, because other members depend on it.
        """

    def __del__(self) -> None:
        self._message = None  # forwarded, and not wanted here: nothing to give back
        super().__del__()
