"""Channel: a named queue between any processes of a job."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from typing import Any, Literal, overload

from rlinf_actors import forks
from rlinf_actors.channel.backend import Backend, T
from rlinf_actors.channel.client import Joint
from rlinf_actors.channel.connecting import Connecting, Plan, find, make, member
from rlinf_actors.channel.inspection import ChannelViews
from rlinf_actors.channel.key_encoding import DEFAULT_KEY
from rlinf_actors.channel.local import LocalChannel
from rlinf_actors.channel.queue import MAX_DELIVERIES
from rlinf_actors.channel.take import Take
from rlinf_actors.cluster.connect import worker_job
from rlinf_actors.errors import (
    ChannelClosedError,
    ConnectionLostError,
    SerializationError,
    UsageError,
)
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.wire.protocol import waiting


class Channel(ChannelViews[T]):
    """A queue that every process of the job may put into and get from. Make one by `create` or `connect`.

    Semantics are those of asyncio.Queue, one FIFO per key. Items arrive at least once: a get acknowledges
    its item when it returns to your code, a `take` when you have processed it, and what a consumer had not acknowledged
    when it died is the head of its queue again. Any picklable object is an item; arrays and tensors travel as raw
    buffers, and must not be changed before the put is done. A Channel can be an argument of a call. Any thread may use
    it.

    Operations block, unless they are given ``async_op=True``: then they return at once an AsyncWork to await, or to
    wait for. A handle that came as an argument looks for its channel when it is first used; what is asked meanwhile is
    kept in order. Only the blocking forms wait for that.

    Raises (every operation):
        ChannelClosedError: `close` was called, in whichever process; a get raises it when its key is empty.
        ChannelBrokenError: (a PeerDiedError) it ended in any other way, and its items with it: the process that holds
            them died, or the one that created the channel ended. What a get returned before stays yours.
        ConnectionLostError: the connection to the process that holds the items was lost and made anew; the channel
            goes on.
    """

    DEFAULT_KEY = DEFAULT_KEY

    def __init__(self, name: str, namespace: str, backend: Backend | None, maxsize: int | None = None) -> None:
        """Use `create` or `connect`."""
        self._name = name
        self._namespace = namespace
        self._made = backend
        self._maxsize = maxsize
        self._lock = threading.Lock()
        self._made_in = forks.generation()

    @overload
    @classmethod
    def create(
        cls,
        name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        disable_distributed_log: bool = True,
        *,
        detached: bool = False,
        max_deliveries: int = MAX_DELIVERIES,
        async_op: Literal[False] = False,
    ) -> Channel[Any]: ...
    @overload
    @classmethod
    def create(
        cls,
        name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        disable_distributed_log: bool = True,
        *,
        detached: bool = False,
        max_deliveries: int = MAX_DELIVERIES,
        async_op: Literal[True],
    ) -> AsyncWork[Channel[Any]]: ...
    @classmethod
    def create(
        cls,
        name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        disable_distributed_log: bool = True,
        *,
        detached: bool = False,
        max_deliveries: int = MAX_DELIVERIES,
        async_op: bool = False,
    ) -> Channel[Any] | AsyncWork[Channel[Any]]:
        """Make a channel; if there is one of that name, connect to it and warn. Takes a round trip to the head.

        It ends with the process that made it, or when it is closed and everything was taken.

        Args:
            name: unique in the job.
            maxsize: how many items may wait under each key, 0 for any number.
            distributed: one replica on every node; a key lives on the node that first used it.
            node_rank: where its items are, if it is not distributed.
            local: only for threads and tasks of this process; needs no Cluster.
            disable_distributed_log: keep what its host process writes out of the terminal.
            detached: it ends with the job's driver instead of the worker that made it. Waits until the host is up.
            max_deliveries: how often a `take` is given an item that no consumer releases, 0 for any number.
            async_op: return at once an AsyncWork that gives the channel. Cancelling who awaits it leaves it under way.

        Raises:
            UsageError: *maxsize* is no int, or there is no Cluster.
            PlacementError: there is no node of that rank.
        """
        show_logs = not disable_distributed_log
        work = create_channel(name, maxsize, distributed, node_rank, local, show_logs, detached, max_deliveries)
        return work if async_op else work.wait()

    @overload
    @classmethod
    def connect(cls, name: str, async_op: Literal[False] = False) -> Channel[Any]: ...
    @overload
    @classmethod
    def connect(cls, name: str, async_op: Literal[True]) -> AsyncWork[Channel[Any]]: ...
    @classmethod
    def connect(cls, name: str, async_op: bool = False) -> Channel[Any] | AsyncWork[Channel[Any]]:
        """Return a handle of a channel that another process of the job made. Takes a round trip to the head.

        Args:
            name: of the channel.
            async_op: return at once an AsyncWork that gives the handle.

        Raises:
            GroupNotFoundError: (a ValueError) there is none of that name.
        """
        here = member()

        async def connected() -> Channel[Any]:
            return Channel(name, here.runtime.namespace, *await find(here, name))

        work = AsyncWork.of(here.runtime.io, connected(), f"Channel.connect({name!r})")
        return work if async_op else work.wait()

    # --- what it is ---

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def maxsize(self) -> int:
        """How many items may wait under each key, 0 for any number.

        A handle that a process of protocol 6 sent has to find its channel first: this waits for that.
        """
        if self._maxsize is None:
            backend = self._backend  # takes over what is known
            if isinstance(backend, Connecting):
                self._maxsize = backend.ended.wait()
        assert self._maxsize is not None
        return self._maxsize

    # --- putting ---

    @overload
    def put(
        self,
        item: T,
        weight: float = 0,
        key: Hashable = DEFAULT_KEY,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> None: ...
    @overload
    def put(
        self,
        item: T,
        weight: float = 0,
        key: Hashable = DEFAULT_KEY,
        *,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> AsyncWork[None]: ...
    @overload
    def put(
        self, item: T, weight: float = 0, key: Hashable = DEFAULT_KEY, *, async_op: bool, timeout: float | None = None
    ) -> AsyncWork[None] | None: ...
    def put(
        self,
        item: T,
        weight: float = 0,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> AsyncWork[None] | None:
        """Append an item; waits while its key is full.

        Args:
            item: any picklable object.
            weight: what it counts for in `get_batch`, 0 or more.
            key: of the FIFO: a str, int, float, bool, bytes or None, or a tuple of them.
            async_op: return at once an AsyncWork that ends when the item is in. Cancelling who awaits it leaves
                the put alone.
            timeout: seconds, None for no limit.

        Raises:
            CallTimeoutError: (a TimeoutError) the time was up; the item was not put.
            SerializationError: the item cannot be pickled.
        """
        work = self._backend.put(key, item, _weight(weight), False, waiting(timeout))
        return work if async_op else work.wait()

    @overload
    def put_nowait(
        self, item: T, weight: float = 0, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False
    ) -> None: ...
    @overload
    def put_nowait(
        self, item: T, weight: float = 0, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True]
    ) -> AsyncWork[None]: ...
    def put_nowait(
        self, item: T, weight: float = 0, key: Hashable = DEFAULT_KEY, async_op: bool = False
    ) -> AsyncWork[None] | None:
        """As `put`, but a full key raises asyncio.QueueFull. One round trip."""
        work = self._backend.put(key, item, _weight(weight), True, None)
        return work if async_op else work.wait()

    # --- getting ---

    @overload
    def get(self, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False, timeout: float | None = None) -> T: ...
    @overload
    def get(
        self, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True], timeout: float | None = None
    ) -> AsyncWork[T]: ...
    @overload
    def get(self, key: Hashable = DEFAULT_KEY, *, async_op: bool, timeout: float | None = None) -> T | AsyncWork[T]: ...
    def get(
        self, key: Hashable = DEFAULT_KEY, async_op: bool = False, timeout: float | None = None
    ) -> T | AsyncWork[T]:
        """Take the item at the head; waits while there is none.

        It is given whatever is the head, also an item whose takes have failed `max_deliveries` times.

        Args:
            key: of the FIFO.
            async_op: return at once an AsyncWork that gives the item. Cancelling a task that awaits it, or dropping
                it, cancels the get; an item that was on its way goes back to the head.
            timeout: seconds, None for no limit.

        Raises:
            CallTimeoutError: (a TimeoutError) the time was up; nothing was taken.
        """
        work = self._backend.get(key, False, waiting(timeout))
        return work if async_op else work.wait()

    @overload
    def get_nowait(self, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False) -> T: ...
    @overload
    def get_nowait(self, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True]) -> AsyncWork[T]: ...
    def get_nowait(self, key: Hashable = DEFAULT_KEY, async_op: bool = False) -> T | AsyncWork[T]:
        """As `get`, but a key without items raises asyncio.QueueEmpty. One round trip."""
        work = self._backend.get(key, True, None)
        return work if async_op else work.wait()

    @overload
    def get_batch(
        self,
        target_weight: float = 0,
        key: Hashable = DEFAULT_KEY,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> list[T]: ...
    @overload
    def get_batch(
        self,
        target_weight: float = 0,
        key: Hashable = DEFAULT_KEY,
        *,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> AsyncWork[list[T]]: ...
    @overload
    def get_batch(
        self,
        target_weight: float = 0,
        key: Hashable = DEFAULT_KEY,
        *,
        async_op: bool,
        timeout: float | None = None,
    ) -> list[T] | AsyncWork[list[T]]: ...
    def get_batch(
        self,
        target_weight: float = 0,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> list[T] | AsyncWork[list[T]]:
        """Take items from the head until the next would make more than *target_weight*; waits while there is less.

        Returns:
            The items, in order; ``[]`` if the head alone is heavier. *async_op*, *timeout* and errors as `get`.
        """
        if math.isnan(target_weight):
            raise UsageError("the target weight is NaN; it must be a number")
        work = self._backend.batch(key, target_weight, waiting(timeout))
        return work if async_op else work.wait()

    def take(self, key: Hashable = DEFAULT_KEY, timeout: float | None = None) -> Take[T]:
        """Take the item at the head until it is processed: ``async with channel.take() as item``, or ``with``.

        When the block ends, the item is released: that is confirmed before the next statement runs. An exception in the
        block, whatever it is, makes the item the head of its queue again, and so does the death of this process. A
        process that only stands still keeps its item. An item that was given to `max_deliveries` consumers in vain (the
        deaths of processes with an unacknowledged `get` count too) is not given to a take once more: it is put on the
        list of `undeliverable`, and that take raises ItemNotProcessedError.

        On a closed channel a take of an empty key waits while items of that key are out, since these may come back: do
        not take within the block of another take.

        Args:
            key: of the FIFO.
            timeout: seconds to wait for an item, None for no limit.

        Raises (where the block begins):
            CallTimeoutError: (a TimeoutError) the time was up; nothing was taken.
            ItemNotProcessedError: the head was given up. The next take goes on with the next item.
            ProtocolMismatchError: the channel's host is of protocol 6.

        Raises (where the block ends):
            ConnectionLostError: the release was not confirmed: the item may be processed again.
        """
        seconds = waiting(timeout)
        return Take(lambda: self._backend.take(key, seconds), self._name)

    async def __aiter__(self) -> AsyncIterator[T]:
        """Yield items of the default key as they come, until the channel is closed and empty.

        Raises:
            ChannelBrokenError: the channel ended otherwise than by `close`.
        """
        while True:
            try:
                item = await self._backend.get(DEFAULT_KEY, False, None)
            except ChannelClosedError:
                return
            except ConnectionLostError:
                continue  # the host gives again what this process had not taken
            yield item

    def __iter__(self) -> Iterator[T]:
        """As ``async for``, with gets that block."""
        while True:
            try:
                item = self.get()
            except ChannelClosedError:
                return
            except ConnectionLostError:
                continue
            yield item

    def __repr__(self) -> str:
        return f"<Channel {self._name!r}{'' if self._namespace else ', local'}>"

    # --- the end ---

    @overload
    def close(self, async_op: Literal[False] = False) -> None: ...
    @overload
    def close(self, async_op: Literal[True]) -> AsyncWork[None]: ...
    def close(self, async_op: bool = False) -> AsyncWork[None] | None:
        """For all processes: puts end at once with ChannelClosedError, gets when their key is empty. Twice is fine.

        Takes a round trip. The host ends, and the name is free, once every item was taken and released, and no
        undeliverable item is left: before this is done, if that is so.

        Args:
            async_op: return at once an AsyncWork.

        Raises:
            ChannelBrokenError: it has ended otherwise, perhaps with items that nobody took.
        """

        def closed(works: list[AsyncWork[None]]) -> None:
            with contextlib.suppress(ChannelClosedError):  # it had ended
                works[0]._outcome()

        work = Joint(f"close() of channel {self._name!r}", [self._backend.close()], closed)
        return work if async_op else work.wait()

    # --- travelling ---

    def __reduce__(self) -> Any:
        if not self._namespace:
            raise SerializationError(f"channel {self._name!r} was made with local=True and cannot leave its process")
        state = {"_maxsize": self._maxsize}  # apart: _arrived() of protocol 6 does not take it
        return _arrived, (self._name, self._namespace), state

    # --- inside ---

    @property
    def _backend(self) -> Backend:
        """What is behind it; a handle that came as an argument begins to look for its channel when it is first used."""
        if self._made_in != forks.generation():
            self._follow()
        made = self._made
        if made is not None and type(made) is not Connecting:
            return made
        with self._lock:
            made = self._made
            if isinstance(made, Connecting) and made.found is not None:
                self._maxsize = made.maxsize
                made = self._made = made.found
            elif made is None or (isinstance(made, Connecting) and made.ended.done()):  # a search that failed
                made = self._made = Connecting(self._name, self._namespace)
            return made

    def _follow(self) -> None:
        """Make a handle that was inherited by a fork one of this process, which is a child member. Others raise."""
        job = worker_job()
        if job is None or not self._namespace:
            forks.check(self._made_in)
            return
        job.runtime.check_usable()
        self._inherited = self._made  # its parts are the parent's: nothing of them runs here, destructors neither
        self._made, self._lock, self._made_in = None, threading.Lock(), forks.generation()


def create_channel(
    name: str,
    maxsize: int,
    distributed: bool,
    node_rank: int,
    local: bool,
    show_logs: bool,
    detached: bool,
    max_deliveries: int,
    beside: Callable[[], Awaitable[int]] | None = None,
) -> AsyncWork[Channel[Any]]:
    """Make a channel: see Channel.create, which calls this directly, as `Worker.create_channel` does.

    Args:
        name, maxsize, distributed, node_rank, local, detached, max_deliveries: as there.
        show_logs: show what its host process writes.
        beside: gives the rank of its node, instead of *node_rank*. I/O thread.
    """
    for what, value in (("maxsize", maxsize), ("max_deliveries", max_deliveries)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(
                f"{what} of channel {name!r} is {value!r}; it must be an int. The older order of arguments was "
                f"(name, group_affinity, group_rank_affinity, maxsize): pass these by keyword"
            )
    if not name or not isinstance(name, str) or any(char in name for char in "/\0\n"):
        raise UsageError(f"{name!r} cannot be a channel's name: a str, not empty, without slash or line break")
    what = f"Channel.create({name!r})"
    if local:
        work: AsyncWork[Channel[Any]] = AsyncWork(what)
        work.resolve(Channel(name, "", LocalChannel(name, maxsize, max_deliveries), maxsize))
        return work
    here, caller = member(), sys._getframe(2)
    line = (caller.f_code.co_filename, caller.f_lineno)
    plan = Plan(name, maxsize, distributed, node_rank, show_logs, detached, max_deliveries, line, beside)

    async def created() -> Channel[Any]:
        return Channel(name, here.runtime.namespace, *await make(here, plan))

    return AsyncWork.of(here.runtime.io, created(), what)


def _arrived(name: str, namespace: str) -> Channel[Any]:
    return Channel(name, namespace, None)


def _weight(weight: float) -> float:
    if not weight >= 0:  # NaN too
        raise UsageError(f"the weight of an item is {weight}; it must be 0 or more")
    return weight
