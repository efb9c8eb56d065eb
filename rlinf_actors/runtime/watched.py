"""Ends of other clients of the job, for who keeps something for them. Loop thread."""

from __future__ import annotations

from collections.abc import Callable

from rlinf_actors.runtime.work import call_all
from rlinf_actors.wire.clients import WatchClients
from rlinf_actors.wire.messages import Body


class WatchedClients:
    """Which clients this process watches.

    Args:
        tell: sends a notice to the head.
    """

    def __init__(self, tell: Callable[[Body], None]) -> None:
        self._tell = tell
        self._watched: dict[str, list[Callable[[], None]]] = {}

    def watch(self, incarnation: str, on_gone: Callable[[], None]) -> Callable[[], None]:
        """Call *on_gone* once that client has ended; soon if it has already.

        Returns:
            A function that ends the watch.
        """
        known = self._watched.setdefault(incarnation, [])
        known.append(on_gone)
        if len(known) == 1:
            self._tell(WatchClients([incarnation]))

        def unwatch() -> None:
            if on_gone in known:
                known.remove(on_gone)
            if not known and self._watched.get(incarnation) is known:
                del self._watched[incarnation]

        return unwatch

    def again(self) -> None:
        """The head was restarted: it has forgotten whom we watch."""
        if self._watched:
            self._tell(WatchClients(list(self._watched)))

    def gone(self, incarnation: str) -> None:
        """The head says that a client has ended."""
        call_all(self._watched.pop(incarnation, ()))
