"""The methods of Worker that exchange messages with other workers and make channels.

They run on the caller's thread, and pickle and unpickle there. messaging.messenger explains how a message travels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from rlinf_actors import forks
from rlinf_actors.cluster.connect import worker_job
from rlinf_actors.errors import UsageError
from rlinf_actors.messaging import addressing, contents, pieces
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.settings import CHILDREN
from rlinf_actors.wire.protocol import waiting

if TYPE_CHECKING:
    from rlinf_actors.channel.channel import Channel
    from rlinf_actors.messaging.messenger import Messenger
    from rlinf_actors.model.address import WorkerAddress
    from rlinf_actors.worker.context import WorkerContext

T = TypeVar("T")

Options: TypeAlias = "CollectiveGroupOptions | None"
Rank: TypeAlias = "int | Sequence[int]"


class Messaging:
    """The methods of Worker that send messages to other workers and receive messages from them.

    Any thread and any coroutine may call the methods. With ``async_op=True`` a method returns at once an AsyncWork, to
    await or to wait for. Otherwise the method blocks the calling thread. On the event loop of a worker with ``async
    def`` methods, this stops the worker's other coroutines; messages still arrive.
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
        """Send an object to a worker of this job. Messages from one worker to another arrive in order.

        The send is done when the receiver's runtime holds the object, or earlier if all of it was copied. Then the
        object may change. With ``async_op=True`` tensors and arrays must not change before the AsyncWork is done. While
        the bytes on their way to the receiver exceed the window (RLINF_ACTORS_SEND_WINDOW, 64 MiB by default), the send
        waits until the receiver receives.

        Args:
            object: any picklable object; tensors, arrays and buffers in it travel as raw memory.
            dst_group_name: group of the receiver.
            dst_rank: rank of the receiver, or the path of ranks to a child of a worker: ``(0, 1)`` for group:0:1.
            async_op: return an AsyncWork. Cancelling a task that awaits it does not cancel the send.
            options: for tensors on an accelerator that travel by a collective library.
            piggyback_payload: if not None, the receiver gets ``(object, piggyback_payload)``.

        Returns:
            None, or the AsyncWork of the send.

        Raises:
            ValueError: a tensor at top level or in a list, dict or dataclass is not contiguous. Nothing was sent.
            SerializationError: a part of the object cannot be pickled. Nothing was sent.
            PeerDiedError: the receiver is gone.
            GroupNotFoundError: no group of that name is running.
            PlacementError: the group has no such rank.
        """
        messenger = self._messenger("send()", options)
        work = messenger.send(dst_group_name, dst_rank, object, piggyback_payload, now=not async_op, options=options)
        return None if work is None else _result(work, async_op, options)

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

        Args:
            src_group_name: group of the sender.
            src_rank: rank of the sender, or the path of ranks to a child of a worker.
            async_op: return an AsyncWork. A cancelled receive loses no message: if the task that awaits the work is
                cancelled, or the work is dropped before a caller saw the object, the message goes to the next receive.
            options: as for `send`.
            timeout: seconds to wait; None for no limit.

        Returns:
            The object, or ``(object, payload)`` if it was sent with a piggyback payload; or the AsyncWork of that.
            Tensors and arrays belong to the receiver and are writable.

        Raises:
            PeerDiedError: the sender is gone, and everything that it sent was received.
            GroupNotFoundError: no group of that name is running.
            CallTimeoutError: (a TimeoutError) no message came in time. The receive takes no later message.
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
        """Send one tensor; the receiver calls `recv_tensor` or `recv`.

        Args:
            tensor: a dense torch tensor of any dtype and shape, contiguous, on any device.
            dst_group_name, dst_rank, async_op, options: as for `send`.

        Raises:
            TypeError: *tensor* is not a torch tensor.
            ValueError, PeerDiedError, GroupNotFoundError, PlacementError: as for `send`.
        """
        messenger = self._messenger("send_tensor()", options)
        contents.check_tensor(tensor, "send_tensor()")
        work = messenger.send(dst_group_name, dst_rank, tensor, None, now=not async_op, options=options, in_pieces=True)
        return None if work is None else _result(work, async_op, options)

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
        """Receive a tensor into *tensor*.

        Args:
            tensor: a torch tensor of the shape and dtype that was sent, with any strides and on any device. With
                ``async_op=True`` it has its new values once the work was waited for or awaited.
            src_group_name, src_rank, async_op, options, timeout: as for `recv`.

        Raises:
            TypeError: the received object is not a tensor.
            ValueError: shape or dtype differ; the text names both, and *tensor* is unchanged.
            PeerDiedError, GroupNotFoundError, CallTimeoutError: as for `recv`. *tensor* may hold a part of what was
                sent, and nothing writes to it any more.
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
        """Send an object of one worker, the source, to all members. Each of them calls this method.

        The object travels once to each node that has members, and from there to the other members on the node.
        Broadcasts among the same members from the same source keep their order. They are independent of other
        broadcasts and of `send`.

        Args:
            object: at the source the object to send, as for `send`; ignored at the other members.
            groups: the members: ``[(name, ranks), ...]``, with a rank or a list of ranks; by default this group. A
                tuple of ranks is the path to a child: ``("g", (0, 1))`` is g:0:1, ``("g", [(0, 0), (0, 1)])`` are two
                children, and ``("g", [0, 1])`` are two workers. In a child the default is its siblings.
            src: ``(name, rank)`` of the source; by default the first member.
            async_op: return an AsyncWork. Cancelling a task that awaits it changes nothing: other members depend on it.
            options: as for `send`.

        Returns:
            The object (at the source, the object that was passed itself), or the AsyncWork of it.

        Raises:
            PeerDiedError: a member is gone.
            WorkerError: (also of the original's type) the source could not send its object.
            ValueError: as for `send`; or this worker, or the source, is not a member.
            SerializationError, GroupNotFoundError, PlacementError: as for `send`.
        """
        self._messenger("broadcast()", None)
        assert self._context is not None
        if groups is None:
            above = self._worker_address.rank_path[:-1]
            groups = [(self._group_name, [(*above, rank) for rank in range(self._world_size)])]
        work = self._context.broadcaster.broadcast(object, groups, src, _options_error(options), options)
        return _result(work, async_op, options)

    def _receive(
        self, what: str, group: str, rank: Rank, async_op: bool, options: Options, timeout: float | None, into: Any
    ) -> Any:
        if timeout is not None:
            timeout = waiting(timeout)
        messenger = self._messenger(what, options)
        if into is None and not async_op:
            return messenger.blocking.receive(group, rank, timeout)
        sender = addressing.address(group, rank)
        if into is None:
            work = messenger.receive(sender)
        elif not async_op and (into.device.type != "cpu" or into.numel() * into.element_size() >= pieces.FROM):
            work = messenger.receive_into(sender, into)
        else:
            name = sender.get_name()
            work = messenger.receive(sender, lambda got: contents.copy_into(into, got, name))
        work.options = options
        if not async_op:
            return messenger.wait(work, timeout)
        if timeout is not None:
            work.limit(timeout)
        return work

    def _messenger(self, what: str, options: Any) -> Messenger:
        problem = None if options is None else _options_error(options)
        if problem is not None:
            raise problem
        context = self._context
        address = self._worker_address
        here = context is not None and context.made_in == forks.generation
        if context is None or not here or (address is not context.address and address != context.address):
            raise UsageError(
                f"{what} of {self._worker_name} was called in process {os.getpid()}, which is not its own. A process "
                "that a worker has started takes part when it has constructed "
                "Worker(parent_address=worker.worker_address, world_size=..., rank=...) and has the worker's "
                f"{CHILDREN} in its environment"
            )
        return context.messenger


def _options_error(options: Any) -> TypeError | None:
    if options is None or isinstance(options, CollectiveGroupOptions):
        return None
    return TypeError(f"options is a {type(options).__name__}; it must be a CollectiveGroupOptions")


def _result(work: AsyncWork[T], async_op: bool, options: Options) -> AsyncWork[T] | T:
    work.options = options
    return work if async_op else work.wait()


class Channels:
    """The methods of Worker that make and find channels. Any thread but the I/O thread may call them."""

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
        """Make a channel, which ends with this worker unless *detached*.

        If the job has a channel of that name, warn and return that channel.

        Args:
            channel_name: name of the channel, unique in the job.
            maxsize, distributed, node_rank, local, max_deliveries, async_op: as for `Channel.create`.
            name: older keyword for *channel_name*.
            group_affinity: (older) instead of *node_rank*: group of a worker on whose node the items are stored.
            group_rank_affinity: (older) rank of that worker.
            detached: True if the channel ends with the job's driver instead of this worker.

        Raises:
            UsageError: *maxsize* is not an int, or the group *group_affinity* has no rank *group_rank_affinity*.
        """
        from rlinf_actors.channel.channel import create_channel

        chosen = channel_name if channel_name is not None else name
        if chosen is None:
            raise UsageError("create_channel() needs a name: create_channel('rollouts')")
        beside = None if group_affinity is None else partial(_node_of, group_affinity, group_rank_affinity)
        work = create_channel(chosen, maxsize, distributed, node_rank, local, True, detached, max_deliveries, beside)
        return work if async_op else work.wait()

    @overload
    def connect_channel(
        self, channel_name: str | None = None, async_op: Literal[False] = False, *, name: str | None = None
    ) -> Channel[Any]: ...
    @overload
    def connect_channel(
        self, channel_name: str | None = None, *, async_op: Literal[True], name: str | None = None
    ) -> AsyncWork[Channel[Any]]: ...
    @overload
    def connect_channel(self, channel_name: str, async_op: Literal[True]) -> AsyncWork[Channel[Any]]: ...
    def connect_channel(
        self, channel_name: str | None = None, async_op: bool = False, *, name: str | None = None
    ) -> Channel[Any] | AsyncWork[Channel[Any]]:
        """Return a handle to a channel that another process of the job made; see `Channel.connect`.

        Args:
            channel_name: name of the channel; *name* means the same.
            async_op: return at once an AsyncWork whose result is the handle.

        Raises:
            GroupNotFoundError: (a ValueError) no channel of the job has that name.
        """
        from rlinf_actors.channel.channel import Channel

        chosen = channel_name if channel_name is not None else name
        if chosen is None:
            raise UsageError("connect_channel() needs a name: connect_channel('rollouts')")
        return Channel.connect(chosen, async_op=True) if async_op else Channel.connect(chosen)


async def _node_of(group: str, rank: int) -> int:
    job = worker_job()
    if job is None:
        raise UsageError("group_affinity needs a worker of a group")
    runtime = await job.connected()
    found = await runtime.groups.find(runtime.namespace, group)
    state = found.states.get(rank)
    if state is None:
        raise UsageError(f"group {group!r} has no rank {rank}: it has {counted(len(found.peers), 'worker')}")
    return state.node_rank
