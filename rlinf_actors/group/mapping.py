"""``group.step.map(items)``: give each item to a free rank, and yield the results.

Theory of operation. The thread or task that iterates does all the work: it draws items, sends each item as a call to
one rank, and takes results. An answer only updates `Pool` and wakes the iteration. Each rank has at most
`max_in_flight` calls. The number of items that were drawn and whose results were not taken is at most the number of
calls that all ranks together may have. So a slow consumer stops the drawing, and so does a slow oldest item of an
ordered map. Between two steps of the iteration no code runs here. `close`, or dropping the iterator, cancels the
running calls.

If a worker dies, its items go to another rank if the method is idempotent; otherwise the error is raised.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlinf_actors.errors import SerializationError, UsageError
from rlinf_actors.group.class_facts import Method
from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.group.retries import WORKER_GONE
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.loop import call_threadsafe
from rlinf_actors.runtime.future import Promise

if TYPE_CHECKING:
    from rlinf_actors.runtime.peer import Peer
    from rlinf_actors.runtime.remote_group import RemoteGroup
    from rlinf_actors.runtime.runtime import Runtime

V = TypeVar("V")

TRIES = 3
"""Maximum number of times that an item of an idempotent method is sent, unless `with_retries` sets another number."""

_END = object()


class Loads:
    """The number of items that each rank is working on, at most *limit*. Not thread-safe."""

    def __init__(self, ranks: Sequence[int], limit: int) -> None:
        self._of = dict.fromkeys(ranks, 0)
        self._by_load: list[dict[int, None]] = [dict.fromkeys(ranks), *({} for _ in range(limit))]
        self.capacity = len(ranks) * limit

    def free(self) -> Iterator[int]:
        """Return the ranks with fewer items than the maximum: fewest items first, then the longest waiting rank."""
        return (rank for ranks in self._by_load[:-1] for rank in ranks)

    def full(self) -> Iterable[int]:
        """Return the ranks with the maximum number of items."""
        return self._by_load[-1]

    def change(self, rank: int, by: int) -> None:
        """Add *by* (+1 or -1) to the number of items of *rank*. Ignored for a dropped rank."""
        if rank in self._of:
            del self._by_load[self._of[rank]][rank]
            self._of[rank] += by
            self._by_load[self._of[rank]][rank] = None

    @property
    def empty(self) -> bool:
        """True if all ranks were dropped."""
        return not self._of

    def drop(self, rank: int) -> None:
        """Remove *rank*, so that the rank gets no more items."""
        del self._by_load[self._of.pop(rank)][rank]


@dataclass(eq=False)
class _Item:
    """An item that the map has drawn from the user's iterable.

    Attributes:
        number: index of the item, from 0.
        parts: the encoded call.
        tries: number of times that the item was sent.
        peer, call: Peer and call of the last try.
        lost: numbers of all items that the last worker had when it died.
    """

    number: int
    parts: Sequence[Buffer]
    tries: int = 0
    peer: Peer = field(init=False)
    call: WorkerGroupFuncResult[Any] = field(init=False)
    lost: Sequence[int] = ()


class Pool:
    """The state of one `map`: which items are running, finished, or to be sent again. Any thread.

    Args:
        runtime, group: runtime of this process and the group that is called.
        name, method: name and facts of the method that is called.
        ranks: ranks that may get items.
        limit: maximum number of items that a rank has at a time.
        timeout: deadline of each call, in seconds; None for no deadline.
        ordered: True to return results in the order of the items.
        tries: maximum number of times that an item is sent; 1 for a method that is not idempotent.
    """

    def __init__(
        self,
        runtime: Runtime,
        group: RemoteGroup,
        name: str,
        method: Method,
        ranks: Sequence[int],
        limit: int,
        timeout: float | None,
        ordered: bool,
        tries: int,
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._name = name
        self._method = method
        self._timeout = timeout
        self._ordered = ordered
        self._tries = tries
        self._loads = Loads(ranks, limit)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._next = 0  # number of the item whose result an ordered map gives next
        self._under_way: dict[int, _Item] = {}
        self._lost: dict[Peer, list[int]] = {}  # by dead worker the numbers of the items that it had
        self._again: collections.deque[_Item] = collections.deque()
        self._finished: dict[int, _Item] = {}
        self._change: Promise[None] | None = None  # ends at the next change
        self._gone: Exception | None = None  # why the last rank was dropped
        self._drawn_all = False
        self.closed = False
        self._unwatch = group.watch(self.wake)  # a rank that is up may take an item

    def room(self) -> bool:
        """Send the items that must be sent again. Then return True if another item may be drawn."""
        while True:
            with self._lock:
                free = not self.closed and self._free() is not None
                if not free or not self._again:
                    held = len(self._under_way) + len(self._finished) + len(self._again)
                    return free and held < self._loads.capacity and not self._drawn_all
                item = self._again.popleft()
            self._send(item)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send a new item, given as an encoded call, to a free rank."""
        self._send(_Item(next(self._numbers), parts))

    def end_of_items(self) -> None:
        """Record that all items were drawn."""
        self._drawn_all = True

    def take(self) -> _Item | bool:
        """Return an item whose call has ended; True if there is none yet, False at the end of the map.

        Raises:
            RlinfActorsError: no rank is left that could run an item.
        """
        with self._lock:
            number = self._next if self._ordered else next(iter(self._finished), -1)
            item = self._finished.pop(number, None)
            if item is not None:
                self._next += 1
                return item
            if self.closed:
                return False
            if self._under_way:
                return True
            if self._drawn_all and not self._again:
                return False
            if self._loads.empty:
                assert self._gone is not None, "a rank that has nothing under way was dropped for a reason"
                raise self._gone.with_traceback(None)
            return True

    def wait(self) -> None:
        """Block until a result can be taken or an item can be sent.

        Raises UsageError on a thread that must run one of the calls.
        """
        self._runtime.check_usable()
        change = self._next_change(drawn=True)
        if change is None:
            return
        if self._runtime.serving_thread == threading.get_ident():
            for item in list(self._under_way.values()):
                item.call._check_blocking()
        change.wait()

    async def wait_async(self) -> None:
        """Wait like `wait`, without blocking the event loop. Cancelling this changes nothing."""
        self._runtime.check_usable()
        change = self._next_change(drawn=False)
        if change is not None:
            await change

    def _next_change(self, drawn: bool) -> Promise[None] | None:
        """Return a promise that ends when a call ends or a worker changes; None if `take` or `send` can go on now.

        *drawn*: the caller has drawn items as far as there was room. The result is then None also if no call is
        running, because another thread has taken the last result.
        """
        with self._lock:
            ready = self._next in self._finished if self._ordered else bool(self._finished)
            over = self.closed or (drawn and not self._under_way)
            if ready or (self._again and self._free() is not None) or over:
                return None
            if self._change is None:
                self._change = Promise(f"the next result of {self._name}.map()")
            return self._change

    def wake(self) -> None:
        """Wake the thread or task that iterates over the map, because a call has ended or a worker has changed."""
        with self._lock:
            change, self._change = self._change, None
        if change is not None:
            change.resolve(None)

    def close(self) -> None:
        """Cancel the running calls and drop the results that were not taken. Calling twice is harmless."""
        with self._lock:
            self.closed = True
            under_way, finished = list(self._under_way.values()), list(self._finished.values())
            self._finished.clear()
            self._again.clear()
        for item in under_way:
            item.call.cancel()
        self._unwatch()
        for item in finished:
            item.call._mark_seen()  # a caller who leaves the loop early does not want later errors
        self.wake()

    def close_soon(self) -> None:
        """Call `close` later, on the loop thread, because the calling destructor's thread may hold any lock."""
        if not self.closed:
            self._group.peers[0].soon(self.close)

    def _send(self, item: _Item) -> None:
        self._runtime.check_usable()
        with self._lock:
            peer = None if self.closed else self._choose()
            if peer is None:
                self._again.append(item)
                return
            item.peer, item.tries, item.lost = peer, item.tries + 1, ()
            self._under_way[item.number] = item
            call = item.call = WorkerGroupFuncResult(self._runtime, self._name, [peer], self._timeout)
        call._beside = self._method.concurrent > 0
        call._once = self._tries == 1  # else the arguments may be sent again as they are
        call._on_done(lambda: self._ended(item, peer, call))
        call._start(item.parts)
        if self._tries == 1:
            item.parts = ()
        if self.closed:  # since the check above, when there was no call to cancel yet
            call.cancel()

    def _choose(self) -> Peer | None:
        """Return the Peer of the worker that gets the next item, None if no rank is free. The caller holds the lock."""
        while (rank := self._free()) is not None:
            peer = self._group.peers[rank]
            if peer.error is None:
                self._loads.change(rank, 1)
                return peer
            self._gone = peer.error
            self._loads.drop(rank)  # a worker that is started again has its peer in that place already
        return None

    def _free(self) -> int | None:
        """Return the rank that gets the next item, None if no rank is free. The caller holds the lock.

        A rank whose worker is starting gets items only if no worker is up, because the items would wait for the start.
        """
        for rank in self._loads.free():
            if self._group.serves(rank):
                return rank
        if any(self._group.serves(rank) for rank in self._loads.full()):
            return None
        return next(self._loads.free(), None)

    def _ended(self, item: _Item, peer: Peer, call: WorkerGroupFuncResult[Any]) -> None:
        """Record that the call of *item* has ended. Loop thread, or the thread that finds the Peer failed."""
        died = isinstance(call.cause, WORKER_GONE)
        again = died and item.tries < self._tries
        with self._lock:
            if died:  # the first of the worker's items that fails still finds all of them under way
                with_it = [number for number, other in self._under_way.items() if other.peer is peer]
                item.lost = self._lost.setdefault(peer, with_it)
            del self._under_way[item.number]
            self._loads.change(peer.rank, -1)
            if again and not self.closed:
                self._again.append(item)
            elif not self.closed:
                self._finished[item.number] = item
            dropped = again or self.closed
        if dropped:
            call._mark_seen()
        self.wake()


class MapResult(Generic[V]):
    """The results of `map`: iterate once, by ``async for value in ...`` or ``for value in ...``.

    Each step of the iteration draws items, as far as ranks are free, and then waits for a result. Items are therefore
    drawn on the thread that iterates; an iterable that blocks delays the results too, an async iterable does not.

    If a call or the iterable fails, or an item cannot be pickled, the map ends: the error is raised and the running
    calls are cancelled. `close` cancels them too, and so does dropping the last reference, as at the end of a loop that
    was left early. A cancelled step, as in ``asyncio.wait_for(anext(results), 1)``, changes nothing.
    """

    def __init__(self, pool: Pool, items: Any, encode: Callable[[Any], Sequence[Buffer]]) -> None:
        self._pool = pool
        self._encode = encode
        self._drawing = threading.Lock()
        self._asked: asyncio.Future[Any] | None = None
        self._error: BaseException | None = None
        self._later: AsyncIterator[Any] | None = None
        self._items: Iterator[Any] | None = None
        self._given = items  # which may be iterable both ways, as a channel or a stream is
        if not hasattr(items, "__aiter__"):
            self._items = iter(items)

    def __iter__(self) -> Iterator[V]:
        return self

    def __aiter__(self) -> AsyncIterator[V]:
        return self

    def __next__(self) -> V:
        if self._later is not None or (self._items is None and not hasattr(self._given, "__iter__")):
            raise UsageError("the items come from an async iterable: write async for, or give map() a plain iterable")
        self._fill()
        while (item := self._take()) is True:
            self._pool.wait()
            self._fill()
        if isinstance(item, bool):
            self.close()
            raise StopIteration
        value = self._value(item)
        self._fill()
        return value

    async def __anext__(self) -> V:
        if self._items is None and self._later is None:
            self._later = aiter(self._given)
        self._fill_async()
        while (item := self._take()) is True:
            if self._asked is None or not self._asked.done():
                await self._pool.wait_async()
            self._fill_async()
        if isinstance(item, bool):
            self.close()
            raise StopAsyncIteration
        value = self._value(item)
        self._fill_async()
        return value

    def __reduce__(self) -> Any:
        raise SerializationError(
            "it is the result of map(), which its caller alone can iterate: send the values, as in list(results)"
        )

    def close(self) -> None:
        """Cancel the running calls and end the iteration. Any thread; never blocks; calling twice is harmless."""
        self._pool.close()
        self._stop_asking()

    async def aclose(self) -> None:
        """Cancel the running calls and end the iteration, like `close`."""
        self.close()

    def __del__(self) -> None:
        if "_given" in self.__dict__:
            self._pool.close_soon()
            self._stop_asking()

    def _fill(self) -> None:
        with self._drawing:
            if self._items is None:
                self._items = iter(self._given)
            while self._error is None and self._pool.room():
                self._send(partial(next, self._items, _END))

    def _fill_async(self) -> None:
        pool = self._pool  # what a callback holds: this object is dropped, and closed, while the next item is awaited
        if self._later is None:
            self._fill()
            return
        while self._error is None and self._pool.room():
            if self._asked is None:
                self._asked = asyncio.ensure_future(_next_of(self._later))
                self._asked.add_done_callback(lambda _: pool.wake())
            if not self._asked.done():
                return
            asked, self._asked = self._asked, None
            self._send(asked.result)

    def _send(self, draw: Callable[[], Any]) -> None:
        """Send the item that *draw* returns, or record that *draw* returned _END or raised."""
        try:
            item = draw()
            self._pool.end_of_items() if item is _END else self._pool.send(self._encode(item))
        except Exception as error:  # noqa: BLE001 - the next step raises it; this one may have a result
            self._error = error

    def _take(self) -> _Item | bool:
        try:
            if self._error is not None and not self._pool.closed:
                raise self._error
            return self._pool.take()
        except BaseException:
            self.close()
            raise

    def _value(self, item: _Item) -> V:
        try:
            value: V = item.call.wait()[0]
        except BaseException as error:
            self.close()
            if not item.lost:
                raise
            raise _may_have_run(error, item) from None
        return value

    def _stop_asking(self) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            return
        if asked.done():
            asked.cancelled() or asked.exception()  # marks it as retrieved: the item is not wanted any more
            return
        call_threadsafe(asked.get_loop(), asked.cancel)


async def _next_of(items: AsyncIterator[Any]) -> Any:
    return await anext(items, _END)


def _may_have_run(error: BaseException, item: _Item) -> BaseException:
    """Return the error of a dead worker with a message that names the items that the worker had."""
    numbers = ", ".join(map(str, sorted(item.lost)))
    advice = "mark the method @Worker.idempotent to have such items given to other workers"
    if item.tries > 1:
        advice = f"item {item.number} was sent {item.tries} times"
    error = copy.copy(error)
    error.args = (
        f"{error.args[0]}\n{item.call._method}() may have run for items {numbers} of map() (counted from 0); {advice}",
    )
    return error
