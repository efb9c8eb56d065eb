"""UnreadStreams: wait until all that a dead worker has sent to this one was handled. I/O thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rlinf_actors.net.link import Listener

REST_S = 1.0
"""Most seconds until the stream of a dead worker has ended: a fork of it may hold the stream open."""


class UnreadStreams:
    """The news of a worker's death may come before its last messages. Its stream ends behind them.

    Args:
        listener: reports the ends of streams. ZeroMQ reports none: then nothing is waited for.
        workers: ids of the workers that have joined, by their links.
    """

    def __init__(self, listener: Listener, workers: Mapping[bytes, str]) -> None:
        self._listener = listener
        self._workers = workers
        self._waiting: list[tuple[set[bytes], Callable[[], object]]] = []
        listener.on_ended = self._ended

    def when_read(self, worker: str, callback: Callable[[], object]) -> None:
        """Call *callback* once the streams of the dead worker with the id *worker* have ended; at once if none is open.

        After REST_S seconds it is called in any case.
        """
        links = {link for link, known in self._workers.items() if known == worker and link in self._listener}
        if not links:
            callback()
            return
        self._waiting.append((links, callback))
        asyncio.get_running_loop().call_later(REST_S, self._over, links)

    def _ended(self, link: bytes) -> None:
        for links, _ in list(self._waiting):
            links.discard(link)
            if not links:
                self._over(links)

    def _over(self, links: set[bytes]) -> None:
        for waiting in list(self._waiting):
            if waiting[0] is links:
                self._waiting.remove(waiting)
                waiting[1]()
