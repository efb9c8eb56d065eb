"""Channel: a named queue between any processes of a job."""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections.abc import AsyncIterator, Hashable, Iterator
from typing import Any

from rlinf_actors import forks
from rlinf_actors.channel.backend import Backend, Shown
from rlinf_actors.channel.client import RemoteChannel, end_of_channel, remote_channel
from rlinf_actors.channel.keys import DEFAULT_KEY
from rlinf_actors.channel.local import LocalChannel
from rlinf_actors.cluster.attach import worker_job
from rlinf_actors.cluster.cluster import Cluster
from rlinf_actors.cluster.service import launch_service
from rlinf_actors.errors import (
    ChannelBrokenError,
    ChannelClosedError,
    ConnectionLostError,
    GroupNotFoundError,
    NameInUseError,
    SerializationError,
    UsageError,
)
from rlinf_actors.runtime.asyncwork import AsyncWork
from rlinf_actors.runtime.process import Runtime
from rlinf_actors.runtime.remote import RemoteGroup
from rlinf_actors.settings import Settings
from rlinf_actors.wire.bounds import waiting
from rlinf_actors.wire.endings import CHANNEL_GROUPS

HOST = "rlinf_actors.worker.channelhost:ChannelHost"


class Channel:
    """A queue that every process of the job may put into and get from. Make one by `create` or `connect`.

    Semantics are those of asyncio.Queue, one FIFO per key. Items arrive at least once: a get acknowledges
    its item when it returns to your code, and what a consumer had not acknowledged when it died is the head of
    its queue again. Any picklable object is an item; arrays and tensors travel as raw buffers, and must not
    be changed before the put is done. A Channel can be an argument of a call. Any thread may use it.

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
    ) -> Channel:
        """Make a channel; if there is one of that name, connect to it and warn. Blocks for a round trip to the head.

        It ends with the process that made it, or when it is closed and everything was taken.

        Args:
            name: unique in the job.
            maxsize: how many items may wait under each key, 0 for any number.
            distributed: one replica on every node; a key lives on the node that first used it.
            node_rank: where its items are, if it is not distributed.
            local: only for threads and tasks of this process; needs no Cluster.
            disable_distributed_log: keep what its host process writes out of the terminal.
            detached: it ends with the job's driver instead of the worker that made it. Waits until the host is up.

        Raises:
            UsageError: *maxsize* is no int, or there is no Cluster.
            PlacementError: there is no node of that rank.
        """
        if not isinstance(maxsize, int) or isinstance(maxsize, bool):
            raise UsageError(
                f"maxsize of channel {name!r} is {maxsize!r}; it must be an int. The older order of arguments was "
                f"(name, group_affinity, group_rank_affinity, maxsize): pass these by keyword"
            )
        if not name or not isinstance(name, str) or any(char in name for char in "/\0\n"):
            raise UsageError(f"{name!r} cannot be a channel's name: a str, not empty, without slash or line break")
        if local:
            return cls(name, "", LocalChannel(name, maxsize), maxsize)
        cluster = Cluster.current()
        nodes = list(range(cluster.num_nodes)) if distributed else [node_rank]
        detail = json.dumps({"maxsize": maxsize, "distributed": distributed})
        args = (maxsize, Settings.load().channel_bytes)
        try:
            group = launch_service(
                cluster, CHANNEL_GROUPS + name, HOST, args, nodes, detail, not disable_distributed_log, detached
            )
        except NameInUseError:
            channel = cls.connect(name)
            warnings.warn(
                f"channel {name!r} exists (maxsize {channel.maxsize}): connected to that one; what was asked for here "
                f"(maxsize {maxsize}) has no effect",
                RuntimeWarning,
                stacklevel=2,
            )
            return channel
        return cls(name, cluster.namespace, _remote(cluster.runtime, group, name), maxsize)

    @classmethod
    def connect(cls, name: str) -> Channel:
        """A handle of a channel that another process of the job made. Blocks for a round trip to the head.

        Raises:
            GroupNotFoundError: (a ValueError) there is none of that name.
        """
        namespace = _runtime().namespace
        return cls(name, namespace, *_connected(name, namespace))

    # --- what it is ---

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def maxsize(self) -> int:
        """How many items may wait under each key, 0 for any number."""
        if self._maxsize is None:
            _ = self._backend
        assert self._maxsize is not None
        return self._maxsize

    # --- putting ---

    def put(
        self,
        item: Any,
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
        if not weight >= 0:  # NaN too
            raise UsageError(f"the weight of an item is {weight}; it must be 0 or more")
        work = self._backend.put(key, item, weight, False, waiting(timeout))
        return work if async_op else work.wait()

    def put_nowait(self, item: Any, weight: float = 0, key: Hashable = DEFAULT_KEY) -> None:
        """As `put`, but a full key raises asyncio.QueueFull. One round trip."""
        if not weight >= 0:  # NaN too
            raise UsageError(f"the weight of an item is {weight}; it must be 0 or more")
        self._backend.put(key, item, weight, True, None).wait()

    # --- getting ---

    def get(self, key: Hashable = DEFAULT_KEY, async_op: bool = False, timeout: float | None = None) -> Any:
        """Take the item at the head; waits while there is none.

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

    def get_nowait(self, key: Hashable = DEFAULT_KEY) -> Any:
        """As `get`, but a key without items raises asyncio.QueueEmpty. One round trip."""
        return self._backend.get(key, True, None).wait()

    def get_batch(
        self,
        target_weight: float = 0,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Take items from the head until the next would make more than *target_weight*; waits while there is less.

        Returns:
            The items, in order; ``[]`` if the head alone is heavier. *async_op*, *timeout* and errors as `get`.
        """
        if math.isnan(target_weight):
            raise UsageError("the target weight is NaN; it must be a number")
        work = self._backend.batch(key, target_weight, waiting(timeout))
        return work if async_op else work.wait()

    async def __aiter__(self) -> AsyncIterator[Any]:
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

    def __iter__(self) -> Iterator[Any]:
        """As ``async for``, with gets that block."""
        while True:
            try:
                item = self.get()
            except ChannelClosedError:
                return
            except ConnectionLostError:
                continue
            yield item

    # --- looking ---

    def qsize(self, key: Hashable = DEFAULT_KEY) -> int:
        """How many items wait. One round trip."""
        return self._backend.look(key)[0]

    def empty(self, key: Hashable = DEFAULT_KEY) -> bool:
        """Whether no item waits. One round trip."""
        return self._backend.look(key)[0] == 0

    def full(self, key: Hashable = DEFAULT_KEY) -> bool:
        """Whether a put would wait. One round trip."""
        return self._backend.look(key)[1]

    def __str__(self) -> str:
        """The waiting items: of each key the first 20, large ones by their size. One round trip."""
        try:
            closed, rows = self._backend.show()
        except ChannelClosedError:
            return f"Channel {self._name!r} (ended)"
        except ChannelBrokenError as error:
            return f"Channel {self._name!r} (broken: {error})"
        lines = [f"Channel {self._name!r}{' (closed)' if closed else ''}: {sum(row[1] for row in rows)} items"]
        for key, count, items in rows:
            more = f", … {count - len(items)} more" if count > len(items) else ""
            lines.append(f"  {key!r}: [{', '.join(map(_shown, items))}{more}]")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Channel {self._name!r}{'' if self._namespace else ', local'}>"

    # --- the end ---

    def close(self) -> None:
        """For all processes: puts end at once with ChannelClosedError, gets when their key is empty. Twice is fine.

        Blocks for a round trip. The host ends, and the name is free, once every item was taken: before this returns,
        if none waits.

        Raises:
            ChannelBrokenError: it has ended otherwise, perhaps with items that nobody took.
        """
        try:
            self._backend.close()
        except ChannelClosedError:
            return  # it had ended

    # --- travelling ---

    def __reduce__(self) -> Any:
        if not self._namespace:
            raise SerializationError(f"channel {self._name!r} was made with local=True and cannot leave its process")
        return _arrived, (self._name, self._namespace)

    @property
    def _backend(self) -> Backend:
        """What is behind it; a handle that came as an argument connects when it is first used."""
        forks.check(self._made_in)
        with self._lock:
            if self._made is None:
                try:
                    self._made, self._maxsize = _connected(self._name, self._namespace)
                except GroupNotFoundError as error:
                    raise _ended_before(self._name, self._namespace) from error
            return self._made


def _arrived(name: str, namespace: str) -> Channel:
    return Channel(name, namespace, None)


def _runtime() -> Runtime:
    job = worker_job()
    return job.connect() if job is not None else Cluster.current().runtime


def _connected(name: str, namespace: str) -> tuple[Backend, int]:
    runtime = _runtime()
    if runtime.namespace != namespace:
        raise UsageError(
            f"channel {name!r} belongs to namespace {namespace!r}, and this process to {runtime.namespace!r}"
        )
    try:
        group = runtime.io.submit(runtime.groups.find(namespace, CHANNEL_GROUPS + name)).result()
    except GroupNotFoundError:
        raise GroupNotFoundError(
            f"there is no channel {name!r} in namespace {namespace!r}: create it first, by Channel.create({name!r})"
        ) from None
    return _remote(runtime, group, name), int(json.loads(group.detail)["maxsize"])


def _ended_before(name: str, namespace: str) -> Exception:
    """Return the error for a channel that ended before this process first used it."""
    runtime = _runtime()
    early = f"channel {name!r} ended before this process first used it"
    try:
        group = runtime.io.submit(runtime.groups.find(namespace, CHANNEL_GROUPS + name, ended=True)).result()
    except GroupNotFoundError:  # the head was restarted since, or it is too long ago
        return ChannelBrokenError(f"{early}, and the head does not know how: whether items were lost is unknown")
    ends = [end_of_channel(name, peer.error) for peer in group.peers if peer.error is not None]
    lost = [end for end in ends if not isinstance(end, ChannelClosedError)]
    if lost:
        return type(lost[0])(f"{early}: {lost[0]}")
    return ChannelClosedError(f"{early}: it was closed, and every item was taken")


def _remote(runtime: Runtime, group: RemoteGroup, name: str) -> RemoteChannel:
    job = worker_job()
    return remote_channel(runtime, group, name, job.node_rank if job is not None else Cluster.current().here())


def _shown(item: Shown) -> str:
    text = repr(item.value) if item.whole else f"<{item.nbytes} bytes>"
    if len(text) > 80:
        text = text[:77] + "..."
    weight = f" (weight {item.weight:g})" if item.weight else ""
    return f"{text}{weight}{' (again)' if item.again else ''}"
