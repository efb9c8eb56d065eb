"""NodeRelays: the relays by which this process reaches the workers of its large groups. Loop thread."""

from __future__ import annotations

from collections.abc import Callable

from rlinf_actors.net.relay_path import RelayPath
from rlinf_actors.runtime.peer import Peer, new_call


class NodeRelays:
    """The paths of this process, at most one to each node.

    A node is *starting* from `begin` to `ready` or `give_up`. Links to its workers wait meanwhile. A path that has
    ended is not replaced: links to the workers of its node are direct from then on.
    """

    def __init__(self) -> None:
        self._paths: dict[int, RelayPath | None] = {}
        self._waiting: dict[int, list[Callable[[], object]]] = {}

    def knows(self, node: int) -> bool:
        """Return True if a relay of *node* was begun, even if it has ended."""
        return node in self._paths

    def path(self, node: int) -> RelayPath | None:
        """Return the path to *node*, None if links to its workers must be direct."""
        path = self._paths.get(node)
        return None if path is None or path.ended else path

    def waits(self, node: int, callback: Callable[[], object]) -> bool:
        """Return True if the relay of *node* is starting. *callback* is then called when that has ended."""
        waiting = self._waiting.get(node)
        if waiting is not None:
            waiting.append(callback)
        return waiting is not None

    def begin(self, node: int) -> None:
        self._paths[node], self._waiting[node] = None, []

    def ready(self, node: int, peer: Peer) -> None:
        """Use the relay at the other end of *peer* for *node* from now on."""
        number = new_call()
        path = self._paths[node] = RelayPath(peer, number)
        peer.carry(number, path)
        self.give_up(node)

    def give_up(self, node: int) -> None:
        """End the wait for the relay of *node*, because there is one, or because it does not come."""
        for callback in self._waiting.pop(node, ()):
            callback()
