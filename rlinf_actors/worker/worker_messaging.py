"""The part of Worker that talks to other workers.

A worker's channels: `Worker.create_channel` and `connect_channel`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from rlinf_actors.cluster.connect import worker_job
from rlinf_actors.errors import UsageError
from rlinf_actors.messaging import addressing, contents
from rlinf_actors.messaging.options import CollectiveGroupOptions
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.settings import CHILDREN
from rlinf_actors.wire.protocol import waiting

if TYPE_CHECKING:
    from rlinf_actors.channel.channel import Channel
    from rlinf_actors.messaging.messenger import Messenger
    from rlinf_actors.model.address import WorkerAddress
    from rlinf_actors.runtime.future import AsyncWork
    from rlinf_actors.worker.context import WorkerContext

T = TypeVar("T")

Options: TypeAlias = "CollectiveGroupOptions | None"
Rank: TypeAlias = "int | Sequence[int]"


class Messaging:
    """Messages between workers; mixed into Worker.

    Every method may be called from any thread and from a coroutine. With ``async_op=True`` it returns an
    AsyncWork at once, to be awaited or waited for; without, it blocks the calling thread: in a class with
    ``async def`` that stops the other coroutines, though not the messages.
    """

    _context: WorkerContext | None
    _worker_name: str
    _worker_address: WorkerAddress
    _group_name: str
    _world_size: int

    @overload
    def send(
        self,
        object: Any,
        dst_group_name: str,
        dst_rank: Rank,
        async_op: Literal[False] = False,
        options: Options = None,
        piggyback_payload: Any = None,
    ) -> None: ...
    @overload
    def send(
        self,
        object: Any,
        dst_group_name: str,
        dst_rank: Rank,
        async_op: Literal[True],
        options: Options = None,
        piggyback_payload: Any = None,
    ) -> AsyncWork[None]: ...
    @overload
    def send(
        self,
        object: Any,
        dst_group_name: str,
        dst_rank: Rank,
        async_op: bool,
        options: Options = None,
        piggyback_payload: Any = None,
    ) -> AsyncWork[None] | None: ...
    def send(
        self,
        object: Any,
        dst_group_name: str,
        dst_rank: Rank,
        async_op: bool = False,
        options: Options = None,
        piggyback_payload: Any = None,
    ) -> AsyncWork[None] | None:
        """Send an object to a worker of this job; what one worker sends another arrives in order.

        It returns when the receiver's runtime holds the object, or earlier if all of it was copied; the
        object may then be changed. While more bytes are on their way to that worker than the window
        (RLINF_ACTORS_SEND_WINDOW, 64 MiB by default) holds, it waits for the receiver to receive. With
        ``async_op=True`` tensors and arrays must not change before the work has ended.

        Args:
            object: anything that pickles; tensors, arrays and buffers in it travel as raw memory.
            dst_group_name: group of the receiver.
            dst_rank: its rank; the path of ranks to a child of a worker, ``(0, 1)`` for group:0:1.
            async_op: return an AsyncWork.
            options: for tensors on an accelerator that go by a collective library.
            piggyback_payload: if not None, the receiver gets ``(object, piggyback_payload)``.

        Raises:
            ValueError: a tensor at top level, in a list, dict or dataclass is not contiguous; nothing was sent.
            SerializationError: something in it cannot be pickled; nothing was sent.
            PeerDiedError: the receiver is gone.
            GroupNotFoundError: no such group is running.
            PlacementError: it has no such rank.
            ProtocolMismatchError: to a child of a worker that runs an older version.
        """
        messenger = self._messenger("send()", options)
        to = addressing.address(dst_group_name, dst_rank)
        work = messenger.send(to, object, piggyback_payload, now=not async_op, options=options)
        return _given(work, async_op, options)

    @overload
    def recv(
        self,
        src_group_name: str,
        src_rank: Rank,
        async_op: Literal[True],
        options: Options = None,
        timeout: float | None = None,
    ) -> AsyncWork[Any]: ...
    @overload
    def recv(
        self,
        src_group_name: str,
        src_rank: Rank,
        async_op: bool = False,
        options: Options = None,
        timeout: float | None = None,
    ) -> Any: ...
    def recv(
        self,
        src_group_name: str,
        src_rank: Rank,
        async_op: bool = False,
        options: Options = None,
        timeout: float | None = None,
    ) -> Any:
        """Receive the next object that a worker sent to this one.

        An AsyncWork of it that is dropped before anybody looked at what it got gives that back: a
        cancelled recv loses nothing.

        Args:
            src_group_name: group of the sender.
            src_rank: its rank, or the path of ranks to a child of a worker.
            async_op: return an AsyncWork.
            options: as in `send`.
            timeout: seconds after which it ends with CallTimeoutError, and takes no later message; None: never.

        Returns:
            The object, ``(object, payload)`` if it was sent with a piggyback, or the AsyncWork of that.
            Tensors and arrays are the receiver's own and writable.

        Raises:
            PeerDiedError: the sender is gone, and all that it sent was received.
            GroupNotFoundError: no such group is running.
            CallTimeoutError: (a TimeoutError) nothing came in time.
        """
        return self._receive("recv()", src_group_name, src_rank, async_op, options, timeout, None)

    @overload
    def send_tensor(
        self,
        tensor: Any,
        dst_group_name: str,
        dst_rank: Rank,
        async_op: Literal[False] = False,
        options: Options = None,
    ) -> None: ...
    @overload
    def send_tensor(
        self, tensor: Any, dst_group_name: str, dst_rank: Rank, async_op: Literal[True], options: Options = None
    ) -> AsyncWork[None]: ...
    @overload
    def send_tensor(
        self, tensor: Any, dst_group_name: str, dst_rank: Rank, async_op: bool, options: Options = None
    ) -> AsyncWork[None] | None: ...
    def send_tensor(
        self, tensor: Any, dst_group_name: str, dst_rank: Rank, async_op: bool = False, options: Options = None
    ) -> AsyncWork[None] | None:
        """Send one tensor; the other side calls `recv_tensor`, or `recv`. As `send`, and TypeError for others."""
        messenger = self._messenger("send_tensor()", options)
        contents.check_tensor(tensor, "send_tensor()")
        to = addressing.address(dst_group_name, dst_rank)
        return _given(messenger.send(to, tensor, None, now=not async_op, options=options), async_op, options)

    @overload
    def recv_tensor(
        self,
        tensor: Any,
        src_group_name: str,
        src_rank: Rank,
        async_op: Literal[False] = False,
        options: Options = None,
        timeout: float | None = None,
    ) -> None: ...
    @overload
    def recv_tensor(
        self,
        tensor: Any,
        src_group_name: str,
        src_rank: Rank,
        async_op: Literal[True],
        options: Options = None,
        timeout: float | None = None,
    ) -> AsyncWork[None]: ...
    @overload
    def recv_tensor(
        self,
        tensor: Any,
        src_group_name: str,
        src_rank: Rank,
        async_op: bool,
        options: Options = None,
        timeout: float | None = None,
    ) -> AsyncWork[None] | None: ...
    def recv_tensor(
        self,
        tensor: Any,
        src_group_name: str,
        src_rank: Rank,
        async_op: bool = False,
        options: Options = None,
        timeout: float | None = None,
    ) -> AsyncWork[None] | None:
        """Receive into *tensor*, which has the shape and dtype of what was sent (any strides, any device).

        With ``async_op=True`` the tensor has its new values when the work was waited for or awaited.

        Raises:
            TypeError: what came is no tensor.
            ValueError: shape or dtype differ; both are named, and *tensor* is unchanged.
            PeerDiedError, GroupNotFoundError, CallTimeoutError: as `recv`.
        """
        contents.check_tensor(tensor, "recv_tensor()")
        work: AsyncWork[None] | None = self._receive(
            "recv_tensor()", src_group_name, src_rank, async_op, options, timeout, tensor
        )
        return work

    @overload
    def broadcast(
        self,
        object: Any = None,
        groups: Sequence[tuple[str, Any]] | None = None,
        src: Any = None,
        *,
        async_op: Literal[True],
        options: Options = None,
    ) -> AsyncWork[Any]: ...
    @overload
    def broadcast(
        self,
        object: Any = None,
        groups: Sequence[tuple[str, Any]] | None = None,
        src: Any = None,
        async_op: bool = False,
        options: Options = None,
    ) -> Any: ...
    def broadcast(
        self,
        object: Any = None,
        groups: Sequence[tuple[str, Any]] | None = None,
        src: Any = None,
        async_op: bool = False,
        options: Options = None,
    ) -> Any:
        """Give an object of one worker to many. Every member calls it, with the same groups and source.

        The object goes once to each node that has members, and from there to the others on it. Broadcasts of the
        same members from the same source keep their order, and are apart from those of others and from `send`.

        Args:
            object: at the source: what to give, as in `send`; at the others it is not looked at.
            groups: the members: ``[(name, ranks), ...]``, with a rank or a list of ranks; by default this group. A
                tuple of ranks is the path to a child: ``("g", (0, 1))`` is g:0:1, ``("g", [(0, 0), (0, 1)])`` are two
                children, and ``("g", [0, 1])`` are two workers. In a child the default are its siblings.
            src: ``(name, rank)`` of the source; by default the first member given.
            async_op: return an AsyncWork.
            options: as in `send`.

        Returns:
            The object; at the source the very one that was given.

        Raises:
            PeerDiedError: a member is gone.
            WorkerError: (also of the original's type) the source could not send its object.
            ValueError: as `send`; or this worker, or the source, is not a member.
            SerializationError, GroupNotFoundError, PlacementError: as `send`.
        """
        self._messenger("broadcast()", None)
        assert self._context is not None
        if groups is None:
            above = self._worker_address.rank_path[:-1]
            groups = [(self._group_name, [(*above, rank) for rank in range(self._world_size)])]
        work = self._context.broadcaster.broadcast(object, groups, src, _wrong(options), options)
        return _given(work, async_op, options)

    def _receive(
        self, what: str, group: str, rank: Rank, async_op: bool, options: Options, timeout: float | None, into: Any
    ) -> Any:
        timeout = waiting(timeout)
        messenger = self._messenger(what, options)
        sender = addressing.address(group, rank)
        if into is None:
            work = messenger.receive(sender)
        else:
            name = sender.get_name()
            work = messenger.receive(sender, lambda got: contents.copy_into(into, got, name))
        work.options = options
        if not async_op:
            return messenger.wait(work, timeout)
        if timeout is not None:
            messenger.limit(work, timeout)
        return work

    def _messenger(self, what: str, options: Any) -> Messenger:
        wrong = _wrong(options)
        if wrong is not None:
            raise wrong
        context = self._context
        if context is None or not context.is_here or self._worker_address != context.address:
            raise UsageError(
                f"{what} of {self._worker_name} was called in process {os.getpid()}, which is not its own. A process "
                "that a worker has started becomes a member when it constructs "
                "Worker(parent_address=worker.worker_address, world_size=..., rank=...) and has the worker's "
                f"{CHILDREN} in its environment"
            )
        return context.messenger


def _wrong(options: Any) -> TypeError | None:
    if options is None or isinstance(options, CollectiveGroupOptions):
        return None
    return TypeError(f"options is a {type(options).__name__}; it must be a CollectiveGroupOptions")


def _given(work: AsyncWork[T], async_op: bool, options: Options) -> AsyncWork[T] | T:
    work.options = options
    return work if async_op else work.wait()


class Channels:
    """What a Worker has of channels. Any thread but the I/O thread."""

    @overload
    def create_channel(
        self,
        channel_name: str | None = None,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        *,
        name: str | None = None,
        group_affinity: str | None = None,
        group_rank_affinity: int = 0,
        detached: bool = False,
        max_deliveries: int = 3,
        async_op: Literal[False] = False,
    ) -> Channel[Any]: ...
    @overload
    def create_channel(
        self,
        channel_name: str | None = None,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        *,
        name: str | None = None,
        group_affinity: str | None = None,
        group_rank_affinity: int = 0,
        detached: bool = False,
        max_deliveries: int = 3,
        async_op: Literal[True],
    ) -> AsyncWork[Channel[Any]]: ...
    def create_channel(
        self,
        channel_name: str | None = None,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        *,
        name: str | None = None,
        group_affinity: str | None = None,
        group_rank_affinity: int = 0,
        detached: bool = False,
        max_deliveries: int = 3,
        async_op: bool = False,
    ) -> Channel[Any] | AsyncWork[Channel[Any]]:
        """Make a channel, or connect to the one of that name with a warning; it ends with this worker.

        Args:
            channel_name: unique in the job; *name* is its older keyword.
            maxsize, distributed, node_rank, local, max_deliveries, async_op: as Channel.create.
            name: older keyword for *channel_name*.
            group_affinity: (older) place it where a worker of this group runs, instead of on *node_rank*.
            group_rank_affinity: (older) which worker of that group.
            detached: it ends with the job's driver instead of this worker.

        Raises:
            UsageError: *maxsize* is no int (it was the fourth argument once), or there is no such worker.
        """
        from rlinf_actors.channel.channel import create_channel

        chosen = channel_name if channel_name is not None else name
        if chosen is None:
            raise UsageError("create_channel() needs a name: create_channel('rollouts')")
        beside = None if group_affinity is None else partial(_node_of, group_affinity, group_rank_affinity)
        work = create_channel(chosen, maxsize, distributed, node_rank, local, True, detached, max_deliveries, beside)
        return work if async_op else work.wait()

    @overload
    def connect_channel(self, name: str, async_op: Literal[False] = False) -> Channel[Any]: ...
    @overload
    def connect_channel(self, name: str, async_op: Literal[True]) -> AsyncWork[Channel[Any]]: ...
    def connect_channel(self, name: str, async_op: bool = False) -> Channel[Any] | AsyncWork[Channel[Any]]:
        """Return a handle of a channel that another process of the job made; *async_op* as Channel.connect.

        Raises:
            GroupNotFoundError: (a ValueError) there is none of that name.
        """
        from rlinf_actors.channel.channel import Channel

        return Channel.connect(name, async_op=True) if async_op else Channel.connect(name)


async def _node_of(group: str, rank: int) -> int:
    job = worker_job()
    if job is None:
        raise UsageError("group_affinity needs a worker of a group")
    runtime = await job.connected()
    found = await runtime.groups.find(runtime.namespace, group)
    state = found.states.get(rank)
    if state is None:
        raise UsageError(f"group {group!r} has no rank {rank}: it has {len(found.peers)} workers")
    return state.node_rank
