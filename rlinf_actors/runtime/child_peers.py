"""ChildPeers: this process's connections to child members, the processes that call ``Worker(parent_address=...)``.

Only the parent worker knows the endpoint of its child. ChildPeers sends the parent a WhereIs. The parent answers with
ChildIs when the child has registered, and with ChildEnded when the child has ended. A child never outlives its parent.
Until the endpoint is known, messages to the child wait in order; no thread waits. After a child has ended, the next
operation asks the parent again, because another process may have registered under the same address. So the end of a
child is the answer only to those that waited when the parent was asked.

`find` and `follow` may be called on any thread. Everything else runs on the loop thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Union

from rlinf_actors.errors import (
    ConnectionLostError,
    GroupClosedError,
    PeerDiedError,
    RlinfActorsError,
)
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.runtime.worker_ends import death
from rlinf_actors.wire import frames
from rlinf_actors.wire.values import Endpoint

Found = Callable[[Union[Peer, Exception]], None]

REMEMBERED = 1024
"""Maximum number of ended children whose Peers are kept. A message to an older child asks its parent again."""


class ChildPeers:
    """Finds and keeps the connections (Peers) of this process to the child members that it exchanges messages with."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._children: dict[WorkerAddress, _Child] = {}

    def find(self, group: RemoteGroup, address: WorkerAddress, found: Found) -> None:
        """Find the child member at *address*, and call *found* with its Peer. Any thread.

        If this process has a connection to a living child at this address, *found* is called before this returns.
        Otherwise the parent worker is asked, and the loop thread calls *found* later. If the child has ended, the
        Peer's `error` says how. If the parent worker cannot be asked, *found* gets an exception instead of a Peer.

        Args:
            group: group of the parent worker.
            address: address of the child member.
            found: the callback; it must not raise.
        """
        with self._lock:
            child = self._children.get(address)
            if child is None:
                child = self._children[address] = _Child(self._runtime, address)
                self._forget_some()
            peer, first = child.enter(group, found)  # under the lock: a child that is asked for is not forgotten
        if peer is not None:
            found(peer)
        elif first:
            self._runtime.io.call(child.ask)

    def _forget_some(self) -> None:
        if len(self._children) > REMEMBERED:
            ended = [address for address, child in self._children.items() if child.over]
            for address in ended[: max(0, len(ended) - REMEMBERED + 1)]:
                del self._children[address]

    def all(self) -> list[Peer]:
        with self._lock:
            return [child.peer for child in self._children.values() if child.peer is not None]

    def follow(self, found: Callable[[], Found]) -> None:
        """Add a callback to each look-up that is under way. Any thread.

        Args:
            found: called once for each look-up; returns the callback to add, which gets a Peer or an exception.
        """
        with self._lock:
            children = list(self._children.values())
        for child in children:
            child.follow(found)


class _Child:
    """One address of a child member: its Peer if the child is known, and the callbacks that wait for its look-up."""

    def __init__(self, runtime: Runtime, address: WorkerAddress) -> None:
        self.peer: Peer | None = None
        self._runtime = runtime
        self._address = address
        self._name = address.get_name()
        self._lock = threading.Lock()
        self._group: RemoteGroup  # of the newest operation
        self._asking = False
        self._numbers = itertools.count(1)
        self._look_up = 0  # number of the look-up that has no answer yet
        self._waiting: list[Found] = []
        self._asked = 0  # so many of these waited when the parent was asked for the child
        self._worker: Peer | None = None
        self._endpoint: Endpoint | None = None

    @property
    def over(self) -> bool:
        """True if the child has ended and no look-up of its address is under way."""
        peer = self.peer
        return not self._asking and peer is not None and peer.error is not None

    def enter(self, group: RemoteGroup, found: Found) -> tuple[Peer | None, bool]:
        """Return the Peer of the living child, or keep *found* until the look-up of the child has ended.

        Returns:
            The Peer, or None if *found* is called later; and True if no look-up is under way yet, so that the caller
            must start one by `ask`.
        """
        with self._lock:
            if not self._asking and self.peer is not None and self.peer.error is None:
                return self.peer, False
            self._group = group
            first, self._asking = not self._asking, True
            self._waiting.append(found)
            return None, first

    def follow(self, found: Callable[[], Found]) -> None:
        with self._lock:
            if self._asking:
                self._waiting.append(found())

    def _answer(self, outcome: Peer | Exception, most: int | None = None) -> None:
        """End the look-up: call the waiting callbacks, only the first *most* if that is given, with *outcome*.

        Callbacks that are added meanwhile get it too if it is a living child; otherwise there is a look-up for them and
        for those that were not called.
        """
        self._look_up = 0
        while True:
            with self._lock:
                count = len(self._waiting) if most is None else most
                waiting, self._waiting = self._waiting[:count], self._waiting[count:]
            for found in waiting:
                found(outcome)
            over = not waiting or isinstance(outcome, Exception) or outcome.error is not None
            with self._lock:
                if over or not self._waiting:
                    again = self._asking = bool(self._waiting)
                    break
        if again:
            self._runtime.io.call(self.ask)

    # --- asking the worker; loop thread ---

    def ask(self) -> None:
        """Start the look-up: ask the parent worker for the endpoint of the child."""
        group, self._look_up = self._group, next(self._numbers)
        worker = group.peer_of(self._address.rank_path[0])
        if worker is None:  # removed, and forgotten since
            self._answer(GroupClosedError(f"{self._name} has ended: its worker was removed from its group"))
            return
        known, self._worker = self._worker is worker, worker
        if worker.error is not None:
            self._worker_gone(group, worker, worker.error)
            return
        if not known:
            worker.on_gone(lambda error: self._runtime.io.call(self._worker_gone, group, worker, error))
        # the `on_gone` callback reports the worker's end
        number = worker.listen(partial(self._reported, self._look_up, group, worker))
        with self._lock:
            self._asked = len(self._waiting)
        worker.send(frames.WhereIs(number, list(self._address.rank_path[1:])))

    def _reported(self, look_up: int, group: RemoteGroup, worker: Peer, frame: frames.AnyFrame) -> None:
        """Note where the child listens, or how it ended. This answers *look_up*, or it comes later."""
        most: int | None = None
        if isinstance(frame, frames.ChildIs):
            peer = self.peer
            if peer is None or peer.error is not None or peer.worker_id != frame.worker_id:
                self._endpoint = frame.endpoint
                peer = self._adopt(group, worker, frame.worker_id)
        elif isinstance(frame, frames.ChildEnded):
            worker.ignore(frame.id)
            peer = self.peer
            if peer is None or peer.worker_id != frame.worker_id:
                peer = self._adopt(group, worker, frame.worker_id)
            self._end(peer, death(frame.exit, self._name, self._address.rank, worker.node))
            most = self._asked
        else:
            return
        if look_up == self._look_up:
            self._answer(peer, most)

    def _worker_gone(self, group: RemoteGroup, worker: Peer, error: Exception) -> None:
        if self._worker is not worker:
            return  # another one took its place, and has been asked since
        if group.peer_of(worker.rank) is not worker and isinstance(error, ConnectionLostError):
            self.ask()  # the worker runs, and another link leads there
            return
        peer = self.peer or self._adopt(group, worker, "")
        if peer.error is None or self._waiting:
            died = PeerDiedError(f"{self._name} has ended with its worker: {error}", peer=self._name)
            self._end(peer, died)
            self._answer(peer)

    @staticmethod
    def _end(peer: Peer, error: RlinfActorsError) -> None:
        peer.fail(error)
        peer.close()

    # --- the link to it; loop thread ---

    def _adopt(self, group: RemoteGroup, worker: Peer, id: str) -> Peer:
        """Make the Peer of the child process that has the address now, and keep it as the Peer of the address.

        Args:
            group: group of the parent worker.
            worker: Peer of the parent worker.
            id: worker id of the child, "" if unknown.
        """
        needed = lambda _peer: self._runtime.io.call(self._connect, group)  # noqa: E731
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
        if peer is not None and endpoint is not None and not peer.connected and peer.error is None:
            peer.connect(endpoint, self._runtime.host, group.token, lambda: None)

    def _lost(self, group: RemoteGroup, worker: Peer, old: Peer) -> None:
        """Give the child a new Peer, because the connection of its Peer *old* was interrupted and messages may be lost.

        Operations that wait on *old* fail with ConnectionLostError. *worker* is the Peer of the parent worker.
        """
        if self.peer is not old or old.error is not None:
            return
        self._adopt(group, worker, old.worker_id).succeed(old)
        old.fail(
            ConnectionLostError(
                f"the connection to {old.name} on {old.node} was lost, and is there again: a message may be missing. "
                "It runs, but no more messages can be exchanged with it"
            )
        )
        old.close()
        self._connect(group)  # at once: the Join tells the child of the loss
