"""EventCursor and EventStream: read the cluster's event log from a position on, with filters."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import get_args

from rlinf_actors.errors import ClusterTimeoutError, RlinfActorsError, UsageError
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.wire.client_messages import Events, GetEvents
from rlinf_actors.wire.event_values import ClusterEvent, EventKind

KINDS: tuple[str, ...] = get_args(EventKind)
WAIT_S = 3.0
"""Seconds that the head holds a request when there are no new events."""
LATE_S = 2.0
"""Seconds beyond WAIT_S until the request is repeated. Repeating a request does no harm."""
ANSWER_S = 10.0
"""Seconds that the head may take to answer a request that does not wait for new events."""


class EventCursor:
    """Reads the head's event log from a position on: makes the requests, and picks events from the answers. No I/O.

    Args:
        namespace: the job whose events are read, besides events about nodes and the head; None for all jobs.
        since: number of the event after which to begin; 0 for all events that the head has kept, None for none of them.
        kinds: kinds of events to return; () for all.
        group: name of the groups whose events to return; None for all events.
        node: host name or id of the node whose events to return; None for all events.

    Raises:
        UsageError: a kind is unknown.
    """

    def __init__(
        self,
        namespace: str | None = None,
        since: int | None = 0,
        kinds: Collection[str] = (),
        group: str | None = None,
        node: str | None = None,
    ) -> None:
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown:
            raise UsageError(f"there are no events of kind {', '.join(unknown)}; the kinds are {', '.join(KINDS)}")
        self._namespace = namespace
        self._kinds = frozenset(kinds)
        self._group = group
        self._node = node
        self._since = -1 if since is None else max(0, since)
        self._log = ""
        self.more = True

    def request(self, wait: bool) -> GetEvents:
        """Return the request for the events after the position.

        If *wait* and there are no such events, the head answers when the next event comes, or after WAIT_S.
        """
        wait_s = WAIT_S if wait and self._since >= 0 else 0.0  # the first request finds the end of the log
        return GetEvents(self._since, self._log, self._namespace, wait_s=wait_s)

    def take(self, answer: Events) -> list[ClusterEvent]:
        """Return the wanted events of *answer*, and move the position behind the last event of *answer*.

        If the head has dropped events after the position, one event of kind `events_missing` stands for them.
        """
        found = list(answer.events)
        if answer.missing:
            oldest = answer.events[0] if answer.events else None
            text = f"{counted(answer.missing, 'older event', 'is|are')} not kept any more"
            found.insert(
                0, ClusterEvent((oldest.seq if oldest else answer.next) - 1, answer.at, "events_missing", text)
            )
        self._log, self._since, self.more = answer.log, answer.next, answer.more
        if self._kinds:
            found = [event for event in found if event.kind in self._kinds]
        if self._node is not None:
            found = [one for one in found if self._node in (one.node, one.node_id) or one.kind == "events_missing"]
        return [event for event in found if self._group in (None, event.group)]


def patience(request: GetEvents) -> float:
    """Return how many seconds to wait for the head's answer to *request*."""
    return request.wait_s + LATE_S if request.wait_s else ANSWER_S


class EventStream(AsyncIterator[ClusterEvent], Iterator[ClusterEvent]):
    """Events of the head's event log in order, for ``async for`` in an event loop or a blocking ``for``.

    Events are requested from the head when the reader needs them, so a slow reader costs the head nothing. If the head
    has dropped events before they were read, the reader gets one event ``events_missing`` in their place. A restarted
    head goes on with the log of the head before, if that has a state directory; its first event is ``head_started``. If
    a step of the iteration is cancelled, the next step continues at the same event.

    Args:
        runtime: runtime of this process.
        closed: returns True if the Cluster was shut down, which ends the stream.
        cursor: the position in the event log, and the choice of events.
        follow: True to wait for new events; False to end after the past events.

    Raises:
        RlinfActorsError: the head is gone for good. Raised while the stream is read.
    """

    def __init__(self, runtime: Runtime, closed: Callable[[], bool], cursor: EventCursor, follow: bool) -> None:
        self._runtime = runtime
        self._closed = closed
        self._cursor = cursor
        self._follow = follow
        self._ready: deque[ClusterEvent] = deque()

    def __iter__(self) -> Iterator[ClusterEvent]:
        return self

    def __aiter__(self) -> AsyncIterator[ClusterEvent]:
        return self

    def __next__(self) -> ClusterEvent:
        while not self._ready:
            asking = self._ask()
            if asking is None:
                raise StopIteration
            try:
                self._take(asking.result())
            except BaseException:
                asking.cancel()
                raise
        return self._ready.popleft()

    async def __anext__(self) -> ClusterEvent:
        while not self._ready:
            asking = self._ask()
            if asking is None:
                raise StopAsyncIteration
            self._take(await asyncio.wrap_future(asking))
        return self._ready.popleft()

    def _ask(self) -> concurrent.futures.Future[Events | None] | None:
        """Start a request for more events, and return the future of the answer; None if the stream has ended."""
        if self._closed() or not (self._follow or self._cursor.more):
            return None
        return self._runtime.io.submit(self._fetch())

    async def _fetch(self) -> Events | None:
        """Request events from the head and return the answer. Loop thread.

        Return None if there is no answer, because the head does not answer now or the Cluster was shut down.
        """
        request = self._cursor.request(self._follow)
        try:
            return await self._runtime.ask(request, Events, patience(request))
        except ClusterTimeoutError:
            if self._follow:
                return None
            raise
        except RlinfActorsError:
            if self._closed():
                return None
            raise

    def _take(self, answer: Events | None) -> None:
        if answer is not None:
            self._ready.extend(self._cursor.take(answer))
