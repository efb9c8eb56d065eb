"""Broadcaster: takes part in all broadcasts of one worker, and keeps their trees (`messaging.broadcast`)."""

from __future__ import annotations

import threading
from typing import Any

from rlinf_actors.messaging import addressing, contents
from rlinf_actors.messaging.broadcast import BroadcastTree, RelayBroadcast, SourceBroadcast
from rlinf_actors.messaging.broadcast_reports import FailureReports
from rlinf_actors.messaging.messenger import Messenger
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions
from rlinf_actors.messaging.receive import traced
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts


class Broadcaster:
    """Takes part in all broadcasts of the worker *me*, and keeps their trees. Any thread may use it."""

    def __init__(self, messenger: Messenger, me: WorkerAddress) -> None:
        self._messenger = messenger
        self._me = me
        self._lock = threading.Lock()
        self._trees: dict[tuple[WorkerAddress, ...], BroadcastTree] = {}
        self._reports = FailureReports()
        messenger.peer_gone = self._gone

    def broadcast(
        self,
        value: Any,
        groups: Any,
        src: Any,
        problem: Exception | None = None,
        options: CollectiveGroupOptions | None = None,
    ) -> AsyncWork[Any]:
        """Take part in a broadcast and return its AsyncWork; see Worker.broadcast.

        Args:
            value, groups, src, options: as for Worker.broadcast.
            problem: an error of this member's arguments. It is raised after this member has done its part: the source
                broadcasts the error instead of an object, every other member still forwards.

        Raises:
            ValueError, TypeError, UsageError: *groups* or *src* is wrong. The other members do not learn of it.
            Exception: *problem*, or why the source's object cannot be sent. Every member raises a source's error.
        """
        members = addressing.addresses(groups)
        order = tuple(addressing.in_order(members, addressing.source(src, members)))
        if self._me not in order:
            raise ValueError(f"{self._me} is not a member of the broadcast: {', '.join(map(str, order))}")
        error: BaseException | None = problem
        broadcast: SourceBroadcast | RelayBroadcast
        if order[0] != self._me:
            broadcast = RelayBroadcast(self._messenger, order[0], options)
        else:
            tensors = self._messenger.detached_tensors()
            try:
                if problem is not None:
                    raise problem
                contents.check_contiguous(value)
                parts, borrowed = contents.encode(value, None, tensors)
                tensors.record_ready()
            except BaseException as failed:  # noqa: BLE001 - raised below; the other members must not wait for ever
                error = failed
                tensors.clear()
                parts, borrowed = contents.encode_failure(failed)
            broadcast = SourceBroadcast(value, parts, borrowed, tensors, options)
        broadcast._seen = error is not None  # the caller does not get the work
        if (active := recorder.active) is not None:
            broadcast.span = traced(active, broadcast, broadcast._what.replace("()", ""))
        self._tree(order).start(broadcast)
        if error is not None:
            raise error
        return broadcast

    def _tree(self, order: tuple[WorkerAddress, ...]) -> BroadcastTree:
        with self._lock:
            tree = self._trees.get(order)
            if tree is not None:
                return tree
            tree = self._trees[order] = BroadcastTree(self._messenger, self._me, order, self._ended, self._reports)
        tree.find()
        return tree

    def _gone(self, peer: Peer) -> None:
        for tree in self._all():
            tree.gone(peer)

    def told(self, _link: bytes, report: frames.BroadcastFailed, _parts: AuthenticatedParts) -> None:
        """Handle a member's report that broadcasts cannot go on. Loop thread only."""
        if self._reports.add(report):
            for tree in self._all():
                if tree.stream == report.stream:
                    tree.told(report)

    def _all(self) -> list[BroadcastTree]:
        with self._lock:
            return list(self._trees.values())

    def _ended(self, tree: BroadcastTree) -> None:
        with self._lock:
            if self._trees.get(tree.order) is tree:
                del self._trees[tree.order]
