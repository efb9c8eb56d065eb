"""Reading the cluster's event log: from where, which, and how long."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import get_args

from rlinf_actors.errors import ClusterTimeoutError, RlinfActorsError, UsageError
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.wire.client_messages import Events, GetEvents
from rlinf_actors.wire.values import ClusterEvent, EventKind

KINDS: tuple[str, ...] = get_args(EventKind)
WAIT_S = 3.0
"""How long the head keeps a question that it has no answer to; one that was restarted meanwhile has lost it."""
LATE_S = 2.0
"""What the answer may take beyond that before it is asked again, which does no harm."""
ANSWER_S = 10.0
"""What an answer may take that has not to wait."""


class EventCursor:
    """A place in the log, and what is read from there on. Pure.

    Args:
        namespace: of the job whose events are wanted beside the cluster's own; None for every job's.
        since: number of the last event that is known, None for none of the past.
        kinds: only these, () for all.
        group: only events of groups of that name.

    Raises:
        UsageError: there is no such kind.
    """

    def __init__(
        self,
        namespace: str | None = None,
        since: int | None = 0,
        kinds: Collection[str] = (),
        group: str | None = None,
    ) -> None:
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown:
            raise UsageError(f"there are no events of kind {', '.join(unknown)}; the kinds are {', '.join(KINDS)}")
        self._namespace = namespace
        self._kinds = frozenset(kinds)
        self._group = group
        self._since = -1 if since is None else max(0, since)
        self._log = ""
        self.more = True

    def question(self, wait: bool) -> GetEvents:
        """What to ask the head; with *wait* it answers when something happens, WAIT_S later at the latest."""
        wait_s = WAIT_S if wait and self._since >= 0 else 0.0  # first find out where "now" is
        return GetEvents(self._since, self._log, self._namespace, wait_s=wait_s)

    def take(self, said: Events) -> list[ClusterEvent]:
        """Go on behind an answer; returns the events in it that are wanted.

        Those that the head does not keep any more are one `events_missing`.
        """
        found = list(said.events)
        if said.missing:
            oldest = said.events[0] if said.events else None
            text = f"{said.missing} older events are not kept any more"
            found.insert(0, ClusterEvent((oldest.seq if oldest else said.next) - 1, said.at, "events_missing", text))
        self._log, self._since, self.more = said.log, said.next, said.more
        return [event for event in found if self._wants(event)]

    def _wants(self, event: ClusterEvent) -> bool:
        if self._kinds and event.kind not in self._kinds:
            return False
        return self._group is None or event.group == self._group


def patience(asked: GetEvents) -> float:
    """How long to wait for an answer to this question, in seconds."""
    return asked.wait_s + LATE_S if asked.wait_s else ANSWER_S


class EventStream(AsyncIterator[ClusterEvent], Iterator[ClusterEvent]):
    """Events, one after the other: ``async for`` in an event loop, ``for`` in a plain script (it blocks).

    What is read is asked for when it is needed: a slow reader costs the head nothing and may find an
    ``events_missing`` in place of what the head has dropped meanwhile. Numbers start again with a head that was
    restarted; its first event is ``head_started``. Cancelling leaves the stream where it is.

    Args:
        runtime: of this process.
        closed: whether the Cluster was shut down, which ends the stream.
        cursor: what to read.
        follow: whether to wait for what is still to happen.

    Raises:
        RlinfActorsError: while it is read: the head is gone for good.
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
        """The next answer; None at the end of the stream."""
        if self._closed() or not (self._follow or self._cursor.more):
            return None
        return self._runtime.io.submit(self._fetch())

    async def _fetch(self) -> Events | None:
        """Runs on the loop of the I/O thread. None if the head is away: it may come back, or end the session."""
        asked = self._cursor.question(self._follow)
        try:
            return await self._runtime.ask(asked, Events, patience(asked))
        except ClusterTimeoutError:
            if self._follow:
                return None
            raise
        except RlinfActorsError:
            if self._closed():
                return None
            raise

    def _take(self, said: Events | None) -> None:
        if said is not None:
            self._ready.extend(self._cursor.take(said))
