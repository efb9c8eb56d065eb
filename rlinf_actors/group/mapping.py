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

from rlinf_actors.errors import PlacementError, SerializationError, UsageError
from rlinf_actors.group.class_facts import Method
from rlinf_actors.group.rank_loads import Loads
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


@dataclass(eq=False)
class _Item:
    """An item that the map has drawn from the user's iterable.

    Attributes:
        number: index of the item, from 0.
        parts: the pickled arguments of the call, which has this item as its only argument.
        tries: number of times that the item was sent to a worker.
        peer, call: Peer and result of the last of these calls.
        lost: numbers of all items that the worker of the last call had when it died; empty if it did not die.
    """

    number: int
    parts: Sequence[Buffer]
    tries: int = 0
    peer: Peer = field(init=False)
    call: WorkerGroupFuncResult[Any] = field(init=False)
    lost: Sequence[int] = ()


class Pool:
    """The calls of one `map`: sends items to ranks, and keeps items that run, have ended, or must be sent again.

    MapResult, which the user iterates over, draws the items and takes the results. Any thread.

    Args:
        runtime, group: runtime of this process and the group that is called.
        name, method: name and properties of the method that is called.
        ranks: ranks that may get items.
        limit: maximum number of items that a rank has at a time.
        timeout: seconds that each call may take; None for no limit.
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
        """Send items of dead workers again while ranks are free. Then return True if a new item may be drawn."""
        while True:
            with self._lock:
                free = not self.closed and self._free() is not None
                if not free or not self._again:
                    held = len(self._under_way) + len(self._finished) + len(self._again)
                    return free and held < self._loads.capacity and not self._drawn_all
                item = self._again.popleft()
            self._send(item)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send a new item to a free rank. *parts* are the pickled arguments of its call."""
        self._send(_Item(next(self._numbers), parts))

    def end_of_items(self) -> None:
        """Record that the user's iterable has no more items."""
        self._drawn_all = True

    def take(self) -> _Item | bool:
        """Take the next item whose call has ended.

        Returns:
            The item; True if no call has ended yet, False if no more items will come.

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

        Raises UsageError if this thread itself must run one of the calls, because the wait would never end.
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
        """Wait until a result can be taken or an item can be sent, without blocking the event loop.

        If the waiting task is cancelled, the map goes on.
        """
        self._runtime.check_usable()
        change = self._next_change(drawn=False)
        if change is not None:
            await change

    def _next_change(self, drawn: bool) -> Promise[None] | None:
        """Return what to wait for: a promise that ends when a call ends or a worker changes.

        Return None if a result can be taken or an item can be sent now.

        Args:
            drawn: True if the caller has drawn all items that it may. If no call is running then, no call will end:
                another thread has taken the last result. So the result is None.
        """
        with self._lock:
            ready = self._next in self._finished if self._ordered else bool(self._finished)
            over = self.closed or (drawn and not self._under_way)
            if ready or (self._again and self._free() is not None) or over:
                return None
            if self._change is None:
                self._change = Promise(f"the next result of {self._name}.map()")
            return self._change

    def wake(self, changed: Iterable[int] = ()) -> None:
        """Wake the thread or task that iterates over the map. *changed*: ranks whose workers have changed."""
        with self._lock:
            for rank in changed:
                self._loads.rouse(rank)
            change, self._change = self._change, None
        if change is not None:
            change.resolve(None)

    def close(self) -> None:
        """End the map: cancel the running calls and drop the results that were not taken. May be called twice."""
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
        """Call `close` on the loop thread, soon. For a destructor, whose thread may hold a lock that `close` needs."""
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
        """Return the Peer of a free rank and count one more item for the rank. Drop ranks whose workers are gone.

        Return None if no rank is free. The caller holds the lock.
        """
        while (rank := self._free()) is not None:
            peers = self._group.peers
            error = peers[rank].error if rank < len(peers) else PlacementError(f"rank {rank} was removed")
            if error is None:
                self._loads.change(rank, 1)
                return peers[rank]
            self._gone = error
            self._loads.drop(rank)  # a worker that is started again has its peer in that place already
        return None

    def _free(self) -> int | None:
        """Return the rank that should get the next item, None if no rank is free. The caller holds the lock.

        A rank whose worker is still starting is returned only if no worker runs, because the item would have to wait.
        """
        loads, serves = self._loads, self._group.serves
        for ranks, found in ((loads.free, True), (loads.full, False)):
            while (rank := next(iter(ranks()), None)) is not None:
                if serves(rank):
                    return rank if found else None
                loads.rest(rank)
        return next(loads.resting(), None)

    def _ended(self, item: _Item, peer: Peer, call: WorkerGroupFuncResult[Any]) -> None:
        """Handle the end of a call: its item has a result, or is sent again if its worker died and tries are left.

        Called on the loop thread, or on the thread that finds that *peer* has failed.
        """
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
    """The results of `RemoteMethod.map`, to be iterated once: ``for value in ...`` or ``async for value in ...``.

    Each step of the iteration draws as many items as ranks are free for, sends them, and waits for a result. Because
    items are drawn on the thread that iterates, an iterable that blocks delays the results. An async iterable does not.

    If a call or the iterable fails, or an item cannot be pickled, the iteration raises the error, and the running calls
    are cancelled. They are cancelled too by `close`, and when this object is dropped, such as after a ``break`` out of
    the loop. If a step is cancelled, as by ``asyncio.wait_for(anext(results), 1)``, the next step continues the map.
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
        """Cancel the running calls and end the iteration; the async form of `close`."""
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
        """Draw an item by *draw* and send it to a rank.

        If *draw* returns _END, record that there are no more items. If it raises, the next step raises the error.
        """
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
    """Return a copy of *error*, raised because a worker died, that names the items which the worker may have run."""
    numbers = ", ".join(map(str, sorted(item.lost)))
    advice = "mark the method @Worker.idempotent to have such items given to other workers"
    if item.tries > 1:
        advice = f"item {item.number} was sent {item.tries} times"
    error = copy.copy(error)
    error.args = (
        f"{error.args[0]}\n{item.call._method}() may have run for items {numbers} of map() (counted from 0); {advice}",
    )
    return error
