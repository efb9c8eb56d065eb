"""ChildPeers: connections from this process to child processes of workers (``Worker(parent_address=...)``).

Only the parent worker knows where its child listens. ChildPeers sends the parent one WhereIs. The parent answers when
the child registers, and reports the child's end. A child never outlives its parent. Operations on a child whose
endpoint is not known yet wait in order, without a thread. After a child has ended, the next operation asks the parent
again, because another process may have taken the child's address.

`find` and `follow` run on any thread; everything else runs on the loop thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Union

from rlinf_actors.errors import ConnectionLostError, PeerDiedError, ProtocolMismatchError, RlinfActorsError
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup, death
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import CHILD_MEMBERS
from rlinf_actors.wire.values import Endpoint

Found = Callable[[Union[Peer, Exception]], None]

REMEMBERED = 1024
"""Number of ended children whose peers are kept. For an older child the parent is asked again."""


class ChildPeers:
    """All child processes that this process exchanges messages with."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._children: dict[WorkerAddress, _Child] = {}

    def find(self, group: RemoteGroup, address: WorkerAddress, found: Found) -> None:
        """Call *found* with the peer of the child at *address*, or with the error of the look-up. Any thread.

        If the peer is known, *found* is called at once; otherwise later, on the loop thread. If the child has ended,
        the peer's `error` is set. *found* must not raise.
        """
        with self._lock:
            child = self._children.get(address)
            if child is None:
                child = self._children[address] = _Child(self._runtime, address)
                self._forget_some()
            peer, first = child.enter(found)  # under the lock: a child that is asked for is not forgotten
        if peer is not None:
            found(peer)
        elif first:
            self._runtime.io.call(child.ask, group)

    def _forget_some(self) -> None:
        if len(self._children) > REMEMBERED:
            ended = [address for address, child in self._children.items() if child.over]
            for address in ended[: max(0, len(ended) - REMEMBERED + 1)]:
                del self._children[address]

    def all(self) -> list[Peer]:
        with self._lock:
            return [child.peer for child in self._children.values() if child.peer is not None]

    def follow(self, found: Callable[[], Found]) -> None:
        """For each child that is being looked up, call *found* to make a callback and append it to the waiting ones.

        Any thread.
        """
        with self._lock:
            children = list(self._children.values())
        for child in children:
            child.follow(found)


class _Child:
    """One child address and the peer of the process that has this address now."""

    def __init__(self, runtime: Runtime, address: WorkerAddress) -> None:
        self.peer: Peer | None = None
        self._runtime = runtime
        self._address = address
        self._name = address.get_name()
        self._lock = threading.Lock()
        self._asking = False
        self._waiting: list[Found] = []
        self._worker: Peer | None = None
        self._endpoint: Endpoint | None = None

    @property
    def over(self) -> bool:
        """True if the child has ended and no look-up of its address is under way."""
        peer = self.peer
        return not self._asking and peer is not None and peer.error is not None

    def enter(self, found: Found) -> tuple[Peer | None, bool]:
        """Return (peer, False) if the peer is known. Otherwise keep *found* for the answer.

        The second item of the result is True if the caller has to start the look-up by `ask`.
        """
        with self._lock:
            if not self._asking and self.peer is not None and self.peer.error is None:
                return self.peer, False
            first, self._asking = not self._asking, True
            self._waiting.append(found)
            return None, first

    def follow(self, found: Callable[[], Found]) -> None:
        with self._lock:
            if self._asking:
                self._waiting.append(found())

    def _answer(self, outcome: Peer | Exception) -> None:
        """Call all waiting callbacks with *outcome*, also those that are added meanwhile."""
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, []
                if not waiting:
                    self._asking = False
                    return
            for found in waiting:
                found(outcome)

    # --- asking the worker; loop thread ---

    def ask(self, group: RemoteGroup) -> None:
        """Ask the parent worker for its protocol version, and then for the child's endpoint."""
        worker = group.peers[self._address.rank_path[0]]
        if worker.error is not None:
            self._worker_gone(group, worker, worker.error)
            return
        if self._worker is not worker:
            self._worker = worker
            worker.on_gone(lambda error: self._runtime.io.call(self._worker_gone, group, worker, error))
        call = worker.open(_ProtocolRequest(partial(self._speaks, group, worker)))
        worker.send(frames.WhatRuns(call))

    def _speaks(self, group: RemoteGroup, worker: Peer, protocol: int) -> None:
        if protocol < CHILD_MEMBERS:
            self._answer(
                ProtocolMismatchError(
                    f"{self._name} is a child of {worker.name} on {worker.node}, which runs an older rlinf-actors "
                    f"(protocol {protocol}): its children are no members yet. Upgrade that node"
                )
            )
            return
        number = worker.listen(partial(self._reported, group, worker))
        worker.send(frames.WhereIs(number, list(self._address.rank_path[1:])))

    def _reported(self, group: RemoteGroup, worker: Peer, frame: frames.AnyFrame) -> None:
        if isinstance(frame, frames.ChildIs):
            peer = self.peer
            if peer is None or peer.error is not None or peer.worker_id != frame.worker_id:
                self._endpoint = frame.endpoint
                peer = self._adopt(group, worker, frame.worker_id)
            self._answer(peer)
        elif isinstance(frame, frames.ChildEnded):
            worker.ignore(frame.id)
            peer = self.peer
            if peer is None or peer.worker_id != frame.worker_id:
                peer = self._adopt(group, worker, frame.worker_id)
            self._end(peer, death(frame.exit, self._name, self._address.rank, worker.node))

    def _worker_gone(self, group: RemoteGroup, worker: Peer, error: Exception) -> None:
        if group.peers[worker.rank] is not worker and isinstance(error, ConnectionLostError):
            self.ask(group)  # the worker runs, and another link leads there
            return
        peer = self.peer or self._adopt(group, worker, "")
        if peer.error is None or self._waiting:
            died = PeerDiedError(f"{self._name} has ended with its worker: {error}", peer=self._name)
            self._end(peer, died)

    def _end(self, peer: Peer, error: RlinfActorsError) -> None:
        peer.fail(error)
        peer.close()
        self._answer(peer)

    # --- the link to it; loop thread ---

    def _adopt(self, group: RemoteGroup, worker: Peer, id: str) -> Peer:
        """Make and return the peer of the process that has the address now. *id* is its worker id, "" if unknown."""
        needed = lambda: self._runtime.io.call(self._connect, group)  # noqa: E731
        lost = lambda old: self._lost(group, worker, old)  # noqa: E731
        runtime, rank = self._runtime, self._address.rank
        peer = Peer(
            runtime.network, runtime.identity, self._name, rank, worker.node, needed, lost, me=runtime.worker_id
        )
        peer.worker_id = id
        self.peer = peer
        return peer

    def _connect(self, group: RemoteGroup) -> None:
        peer, endpoint = self.peer, self._endpoint
        if peer is None or peer.connected or peer.error is not None or endpoint is None:
            return
        try:
            peer.connect(endpoint, self._runtime.host, group.token, lambda: None)
        except (OSError, RlinfActorsError) as error:  # no descriptor left, or an address that may not be used
            peer.fail(RlinfActorsError(f"cannot connect to {self._name} on {peer.node}: {error}"))

    def _lost(self, group: RemoteGroup, worker: Peer, old: Peer) -> None:
        """Replace *old*, whose connection was lost and re-established: messages may be missing."""
        if self.peer is not old or old.error is not None:
            return
        peer = self._adopt(group, worker, old.worker_id)
        peer.wanted = True
        peer.succeeds = [*([] if old.received else old.succeeds), old.link_identity]
        old.fail(
            ConnectionLostError(
                f"the connection to {old.name} on {old.node} was lost, and is there again: a message may be missing. "
                "It runs, but no more messages can be exchanged with it"
            )
        )
        old.close()
        self._connect(group)  # at once: the Join tells the child of the loss


class _ProtocolRequest:
    """A pending request for a worker's protocol version (peer.Pending)."""

    def __init__(self, callback: Callable[[int], None]) -> None:
        self._callback = callback

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        if isinstance(frame, frames.Runs):
            self._callback(frame.protocol)
        return True

    def fail(self, error: Exception) -> None:
        """Do nothing: the `on_gone` callback reports the worker's end."""
