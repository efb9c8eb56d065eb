"""Large arguments of a group call, sent once to each other node instead of once to each rank there.

One rank of the node, the first, gets the large parts and passes them on to the others in shared memory
(`worker.shared_calls`). If it ends, or a rank asks for its parts, this process sends them directly. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames

SHARE_FROM = 1 << 20
"""Bytes of arguments from which they are sent once to a node."""


class SharedArguments:
    """The large arguments of one call, and the ranks that wait for them.

    Args:
        call: number of the call.
        parts: the pickled arguments.
        nodes: Peers of ranks on one other node each, at least two.
    """

    def __init__(self, call: int, parts: Sequence[Buffer], nodes: Sequence[Sequence[Peer]]) -> None:
        self.small = parts[:1]
        self._call = call
        self._large = parts[1:]
        self._by_first = {peers[0]: peers[1:] for peers in nodes}
        self._ranks = {peer for peers in nodes for peer in peers}

    @classmethod
    def of(cls, call: int, parts: Sequence[Buffer], peers: Sequence[Peer]) -> SharedArguments | None:
        """Return the arguments to share among *peers*; None if they are small, or no two ranks share a node."""
        if sum(memoryview(part).nbytes for part in parts[1:]) < SHARE_FROM:
            return None
        nodes: dict[str, list[Peer]] = {}
        for peer in peers:
            if peer.sibling is not None and peer.error is None:
                nodes.setdefault(peer.sibling.endpoint.host, []).append(peer)
        shared = [there for there in nodes.values() if len(there) > 1]
        return cls(call, parts, shared) if shared else None

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._ranks

    def share(self, peer: Peer) -> None:
        """If *peer* is the first rank of its node, send it the large arguments. Call this before its SharedCall."""
        others = self._by_first.get(peer)
        if others is not None:
            to = [other.sibling for other in others if other.sibling is not None]
            peer.send(frames.ShareParts(self._call, to), self._large, alone=False)

    def gone(self, peer: Peer) -> None:
        """Send the arguments directly to the ranks that would get them from *peer*, because it cannot answer."""
        for other in self._by_first.get(peer, ()):
            if self._call in other.pending:
                self.send(other)

    def send(self, peer: Peer) -> None:
        """Send the large arguments directly to a rank that has asked for them, or whose other source is gone."""
        peer.send(frames.SharedParts("", self._call), self._large, alone=False)
