"""Channel: a named queue between any processes of a job."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, Literal, overload

from rlinf_actors import forks
from rlinf_actors.channel.assembled import AssembledChannel
from rlinf_actors.channel.client import JoinedWork
from rlinf_actors.channel.connecting import ConnectingChannel, check_name, find, make, member
from rlinf_actors.channel.inspection import Backend, ChannelViews
from rlinf_actors.channel.iteration import ChannelItems
from rlinf_actors.channel.key_encoding import DEFAULT_KEY
from rlinf_actors.channel.local import LocalChannel, local_channel
from rlinf_actors.channel.queue_commands import MAX_DELIVERIES
from rlinf_actors.channel.results import T, Take
from rlinf_actors.cluster.connect import worker_job
from rlinf_actors.errors import ChannelClosedError, UsageError
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.wire.protocol import waiting

if TYPE_CHECKING:
    from rlinf_actors.worker.worker import Worker


class Channel(ChannelViews[T], ChannelItems[T], AssembledChannel):
    """A named queue that every process of the job may put into and get from. Make one by `create` or `connect`.

    A channel has one FIFO for each key, with the semantics of asyncio.Queue. An item is any picklable object. Arrays
    and tensors travel as raw buffers. Do not change them before the put is done.

    Each item is delivered at least once. A get acknowledges its item when it returns to your code; a `take`
    acknowledges its item when its block ends. If a consumer dies before it acknowledged an item, the item returns to
    the head of its queue.

    Operations block, unless you pass ``async_op=True``. They then return at once an AsyncWork, which you can await or
    wait for. Any thread may use a Channel, and a Channel may be an argument of a call. A handle that came as an
    argument finds its channel when it is first used; requests made meanwhile are kept in order.

    Every operation may raise:
        ChannelClosedError: a process called `close`. A get raises it when its key is empty.
        ChannelBrokenError: (a PeerDiedError) the channel ended in any other way, and its items are lost: the process
            that holds the items died, or the process that created the channel ended. Items that a get has returned
            stay yours.
        ConnectionLostError: the connection to the process that holds the items was lost and made again. The channel
            goes on.
    """

    DEFAULT_KEY = DEFAULT_KEY

    def __init__(self, name: str = "", namespace: str = "", backend: Backend | None = None, maxsize: int = 0) -> None:
        self._name = name
        self._namespace = namespace  # "" for a local channel
        self._made = backend
        self._maxsize = maxsize
        self._lock = threading.Lock()
        self._made_in = forks.generation

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
        """Make a channel; if the name is in use, warn and connect to that channel. Takes a round trip to the head.

        The channel ends with the process that made it, or when it is closed and every item was taken.

        Args:
            name: name of the channel, unique in the job.
            maxsize: most items that wait under each key; 0 for no limit.
            distributed: True for one replica on every node; a key lives on the node that first used it.
            node_rank: rank of the node that holds the items, unless *distributed*.
            local: True for a channel of the threads and tasks of this process only; needs no Cluster. In another
                process to which it is sent, it is a channel of that process: empty at first, and one for all calls.
            disable_distributed_log: True to keep the output of the host process out of the terminal.
            detached: True if the channel ends with the job's driver instead of the worker that made it. The call then
                waits until the host is up.
            max_deliveries: number of deliveries by `take` after which an item that no consumer releases becomes
                undeliverable; 0 for no limit.
            async_op: return at once an AsyncWork whose result is the channel. Cancelling a task that awaits the work
                does not stop the creation.

        Raises:
            UsageError: *maxsize* or *max_deliveries* is not an int, the name is not valid, or there is no Cluster.
            PlacementError: no node has the rank *node_rank*.
        """
        show_logs = not disable_distributed_log
        work = create_channel(name, maxsize, distributed, node_rank, local, show_logs, detached, max_deliveries)
        return work if async_op else work.wait()

    @overload
    @classmethod
    def connect(cls, name: str, current_worker: Literal[True]) -> AsyncWork[Channel[Any]]: ...
    @overload
    @classmethod
    def connect(
        cls, name: str, current_worker: Worker | None = None, *, async_op: Literal[True]
    ) -> AsyncWork[Channel[Any]]: ...
    @overload
    @classmethod
    def connect(
        cls, name: str, current_worker: Worker | None = None, async_op: Literal[False] = False
    ) -> Channel[Any]: ...
    @classmethod
    def connect(
        cls, name: str, current_worker: Worker | bool | None = None, async_op: bool = False
    ) -> Channel[Any] | AsyncWork[Channel[Any]]:
        """Return a handle to a channel that another process of the job made. Takes a round trip to the head.

        Args:
            name: name of the channel.
            current_worker: ignored; accepted for older scripts. True in this place means *async_op*.
            async_op: return at once an AsyncWork whose result is the handle.

        Raises:
            GroupNotFoundError: (a ValueError) no channel of the job has that name.
        """
        here = member()

        async def connected() -> Channel[Any]:
            return Channel(name, here.runtime.namespace, *await find(here, name))

        work = AsyncWork.of(here.runtime.io, connected(), f"Channel.connect({name!r})")
        return work if async_op or current_worker is True else work.wait()

    # --- properties ---

    @property
    def name(self) -> str:
        """The name of the channel."""
        return self._name

    @property
    def maxsize(self) -> int:
        """Most items that wait under each key; 0 for no limit."""
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
        """Append an item; wait while its key is full.

        Args:
            item: any picklable object.
            weight: weight of the item in `get_batch`, 0 or more.
            key: names the FIFO: a str, int, float, bool, bytes or None, or a tuple of them.
            async_op: return at once an AsyncWork that is done when the channel has the item. Cancelling a task that
                awaits the work does not cancel the put.
            timeout: seconds to wait; None for no limit.

        Raises:
            CallTimeoutError: (a TimeoutError) the time is up, and the item was not put.
            SerializationError: the item cannot be pickled.
            UsageError: *key* or *weight* is not valid.
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
        """Append an item as `put` does, or raise asyncio.QueueFull if its key is full. Takes a round trip."""
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
        """Remove and return the item at the head of a key; wait while there is none.

        A get also returns an item whose takes have failed `max_deliveries` times.

        Args:
            key: names the FIFO.
            async_op: return at once an AsyncWork whose result is the item. Cancelling a task that awaits the work, or
                dropping the work, cancels the get; an item that was on its way returns to the head.
            timeout: seconds to wait; None for no limit.

        Raises:
            CallTimeoutError: (a TimeoutError) the time is up, and no item was removed.
        """
        work = self._backend.get(key, False, waiting(timeout))
        return work if async_op else work.wait()

    @overload
    def get_nowait(self, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False) -> T: ...
    @overload
    def get_nowait(self, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True]) -> AsyncWork[T]: ...
    def get_nowait(self, key: Hashable = DEFAULT_KEY, async_op: bool = False) -> T | AsyncWork[T]:
        """Return an item as `get` does, or raise asyncio.QueueEmpty if there is none. Takes a round trip."""
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
        """Remove and return items from the head of a key, up to a total weight; wait until enough items are there.

        Args:
            target_weight: most total weight. The batch is complete when it has this weight, or when the next item would
                exceed it.
            key, async_op, timeout: as for `get`.

        Returns:
            The items, in order; ``[]`` if the item at the head alone is heavier than *target_weight*.

        Raises:
            CallTimeoutError: (a TimeoutError) the time is up, and no item was removed.
            UsageError: *target_weight* is NaN.
        """
        if math.isnan(target_weight):
            raise UsageError("the target weight is NaN; it must be a number")
        work = self._backend.batch(key, target_weight, waiting(timeout))
        return work if async_op else work.wait()

    def take(self, key: Hashable = DEFAULT_KEY, timeout: float | None = None) -> Take[T]:
        """Return a Take, which gives the item at the head to a ``with`` or ``async with`` block.

        When the block ends, the item is released, and the host has confirmed that before the next statement runs. If
        the block raises any exception, or this process dies in it, the item returns to the head of its queue. A process
        that is only stopped (SIGSTOP) keeps its item.

        An item that `max_deliveries` consumers took and none released becomes undeliverable: the next take does not get
        it and raises ItemNotProcessedError. The death of a process with an unacknowledged `get` counts too.

        On a closed channel a take of an empty key waits while other takes or gets have unacknowledged items of the key,
        since these items may come back. So do not take within the block of another take.

        Args:
            key: names the FIFO.
            timeout: seconds to wait for an item; None for no limit.

        The beginning of the block raises:
            CallTimeoutError: (a TimeoutError) the time is up, and no item was taken.
            ItemNotProcessedError: the item at the head became undeliverable. The next take gets the next item.

        The end of the block raises:
            ConnectionLostError: the release was not confirmed, so the item may be processed again.
        """
        seconds = waiting(timeout)
        return Take(lambda: self._backend.take(key, seconds), self._name)

    def __repr__(self) -> str:
        return f"<Channel {self._name!r}{'' if self._namespace else ', local'}>"

    # --- the end ---

    @overload
    def close(self, async_op: Literal[False] = False) -> None: ...
    @overload
    def close(self, async_op: Literal[True]) -> AsyncWork[None]: ...
    def close(self, async_op: bool = False) -> AsyncWork[None] | None:
        """Close the channel for all processes. May be called again. Takes a round trip to the host.

        From now on puts raise ChannelClosedError at once, and gets raise it when their key is empty. The host ends, and
        the name is free, when every item was taken and released and no undeliverable item is left. If that is so
        already, the close is done only after the host has ended.

        Args:
            async_op: return at once an AsyncWork that is done when the close is.

        Raises:
            ChannelBrokenError: the channel has ended in another way, and items may be lost.
        """

        def closed(works: list[AsyncWork[None]]) -> None:
            with contextlib.suppress(ChannelClosedError):  # closed before, and ended
                works[0]._outcome()

        work = JoinedWork(f"close() of channel {self._name!r}", [self._backend.close()], closed)
        return work if async_op else work.wait()

    # --- pickling ---

    def __reduce__(self) -> Any:
        if isinstance(self._made, LocalChannel):
            return _arrived_local, self._made.identity
        return _arrived, (self._name, self._namespace, self._maxsize)

    @property
    def _backend(self) -> Backend:
        """Return the object that makes the requests. A handle that came as an argument first begins its search."""
        if self._made_in != forks.generation:
            self._adopt_in_child()
        made = self._made
        if made is None and not self._namespace:
            raise UsageError("this Channel has no items yet: make one by Channel.create() or Channel.connect()")
        if made is not None and type(made) is not ConnectingChannel:
            return made
        with self._lock:
            made = self._made
            if isinstance(made, ConnectingChannel) and made.found is not None:
                made = self._made = made.found
            elif made is None or (isinstance(made, ConnectingChannel) and made.search.done()):  # a search that failed
                made = self._made = ConnectingChannel(self._name, self._namespace)
            return made

    def _adopt_in_child(self) -> None:
        """Make a handle that a child member inherited by fork usable. In any other forked process raise UsageError."""
        job = worker_job()
        if job is None or not self._namespace:
            forks.check(self._made_in)
            return
        job.runtime.check_usable()
        self._inherited = self._made  # kept: its parts are the parent's, and their destructors must not run here
        self._made, self._lock, self._made_in = None, threading.Lock(), forks.generation


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
    """Make a channel, for `Channel.create` and `Worker.create_channel`. No other code calls this function.

    The warning for a name in use names the line of code two calls up, so both methods must call this function directly.
    If *beside* is given, it is awaited on the I/O thread to get the rank of the channel's node instead of *node_rank*.
    *show_logs* is the opposite of *disable_distributed_log*; the other arguments are those of `Channel.create`.
    """
    for what, value in (("maxsize", maxsize), ("max_deliveries", max_deliveries)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(
                f"{what} of channel {name!r} is {value!r}; it must be an int. The older order of arguments was "
                f"(name, group_affinity, group_rank_affinity, maxsize): pass these by keyword"
            )
    check_name(name)
    what = f"Channel.create({name!r})"
    if local:
        work: AsyncWork[Channel[Any]] = AsyncWork(what)
        work.resolve(Channel(name, "", LocalChannel(name, maxsize, max_deliveries), maxsize))
        return work
    here, caller = member(), sys._getframe(2)
    line = (caller.f_code.co_filename, caller.f_lineno)

    async def created() -> Channel[Any]:
        rank = node_rank if beside is None else await beside()
        made = await make(here, name, maxsize, None if distributed else rank, show_logs, detached, max_deliveries, line)
        return Channel(name, here.runtime.namespace, *made)

    return AsyncWork.of(here.runtime.io, created(), what)


def _arrived(name: str, namespace: str, maxsize: int) -> Channel[Any]:  # its name is in pickles
    return Channel(name, namespace, None, maxsize)


def _arrived_local(name: str, maxsize: int, max_deliveries: int, id: str) -> Channel[Any]:
    return Channel(name, "", local_channel(name, maxsize, max_deliveries, id), maxsize)


def _weight(weight: float) -> float:
    if not weight >= 0:  # NaN too
        raise UsageError(f"the weight of an item is {weight}; it must be 0 or more")
    return weight
