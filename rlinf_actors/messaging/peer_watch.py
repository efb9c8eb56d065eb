"""PeerWatch: withdraw the shards of routed batches from their channels when the workers that they need are gone."""

from __future__ import annotations

import threading
import weakref

from rlinf_actors.messaging.directory import WorkerDirectory, peer_gone_error
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.net.loop import IoThread
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.route_work import AsyncRouteWork


class PeerWatch:
    """Knows which routed batches of this worker need which peer. A channel does not know who puts and who gets.

    Any thread may use it. The shards are withdrawn on the loop thread.
    """

    def __init__(self, directory: WorkerDirectory, io: IoThread) -> None:
        self._directory = directory
        self._io = io
        self._lock = threading.Lock()
        self._needed: dict[Peer, weakref.WeakKeyDictionary[AsyncRouteWork, int]] = {}

    def add(self, member: WorkerAddress, work: AsyncRouteWork, index: int) -> None:
        """Withdraw the shard *index* of *work* as soon as *member* is gone. Returns at once."""
        mine = weakref.ref(work)

        def found(peer: Peer | Exception) -> None:
            known = mine()
            if known is None or isinstance(peer, Exception):
                return
            with self._lock:
                first = peer not in self._needed
                self._needed.setdefault(peer, weakref.WeakKeyDictionary())[known] = index
            if first:
                peer.on_gone(lambda error: self._gone(peer, error))

        self._directory.peer(member, found)

    def _gone(self, peer: Peer, error: Exception) -> None:
        with self._lock:
            needed = list(self._needed.pop(peer, {}).items())
        for work, index in needed:
            self._io.call(work.withdraw, index, peer_gone_error(peer, error, work._what))
