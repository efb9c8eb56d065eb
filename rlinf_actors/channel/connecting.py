"""How a handle gets to its channel: it makes it, or looks for it. Nothing here blocks.

The coroutines run on the I/O thread. What is asked of a handle meanwhile is kept, in order.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlinf_actors.channel.backend import View
from rlinf_actors.channel.client import Kept, Later, RemoteChannel, end_of_channel, remote_channel
from rlinf_actors.channel.gets import Request, Requests
from rlinf_actors.channel.queue import MAX_DELIVERIES
from rlinf_actors.cluster.cluster import Cluster
from rlinf_actors.cluster.connect import WorkerJob, worker_job
from rlinf_actors.cluster.service import launch_service
from rlinf_actors.errors import (
    ChannelBrokenError,
    ChannelClosedError,
    GroupNotFoundError,
    NameInUseError,
    UsageError,
)
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.settings import Settings
from rlinf_actors.wire.values import CHANNEL_GROUPS

HOST = "rlinf_actors.worker.channelhost:ChannelHost"


@dataclass(frozen=True)
class Member:
    """This process, as a member of its job.

    Attributes:
        runtime: its runtime; a worker's may not be in session with the head yet.
        job: of a worker, None of a driver.
        node_rank: where it runs.
        name: for people.
    """

    runtime: Runtime
    job: WorkerJob | None
    node_rank: int
    name: str

    async def connected(self) -> Runtime:
        """The runtime, in session with the head. I/O thread."""
        return self.runtime if self.job is None else await self.job.connected()

    async def cluster(self) -> Cluster:
        """The Cluster of this process; in a worker it is made on first use. I/O thread."""
        return await Cluster.connect() if self.job is not None else Cluster.current()


def member() -> Member:
    """Return what this process is.

    Raises:
        UsageError: a driver has no Cluster, or this process is a fork.
    """
    job = worker_job()
    if job is not None:
        job.runtime.check_usable()
        return Member(job.runtime, job, job.node_rank, f"{job.name} on {socket.gethostname()}")
    cluster = Cluster.current()
    name = f"the driver (process {os.getpid()}) on {socket.gethostname()}"
    return Member(cluster.runtime, None, cluster.here(), name)


@dataclass(frozen=True)
class Plan:
    """A channel that is to be made; see Channel.create.

    Attributes:
        beside: what gives the rank of its node instead, if anything does.
        line: file and line of the caller, for warnings.
    """

    name: str
    maxsize: int
    distributed: bool
    node_rank: int
    show_logs: bool
    detached: bool
    max_deliveries: int
    line: tuple[str, int]
    beside: Callable[[], Awaitable[int]] | None = None


async def make(here: Member, plan: Plan) -> tuple[RemoteChannel, int]:
    """Make a channel, or connect to the one of that name and warn; return it and its maxsize. I/O thread.

    Raises:
        PlacementError: there is no node of that rank.
    """
    node_rank = plan.node_rank if plan.beside is None else await plan.beside()
    cluster = await here.cluster()
    nodes = list(range(cluster.num_nodes)) if plan.distributed else [node_rank]
    detail = json.dumps({"maxsize": plan.maxsize, "distributed": plan.distributed})
    args: tuple[int, ...] = (plan.maxsize, Settings.load().channel_bytes)
    if plan.max_deliveries != MAX_DELIVERIES:
        args = (*args, plan.max_deliveries)
    try:
        group = await launch_service(
            cluster, CHANNEL_GROUPS + plan.name, HOST, args, nodes, detail, plan.show_logs, plan.detached
        )
    except NameInUseError:
        channel, maxsize = await find(here, plan.name)
        warnings.warn_explicit(
            f"channel {plan.name!r} exists (maxsize {maxsize}): connected to that one; what was asked for here "
            f"(maxsize {plan.maxsize}) has no effect",
            RuntimeWarning,
            *plan.line,
        )
        return channel, maxsize
    return remote_channel(cluster.runtime, group, plan.name, here.node_rank, here.name), plan.maxsize


async def find(here: Member, name: str) -> tuple[RemoteChannel, int]:
    """Return the channel of that name and its maxsize. I/O thread.

    Raises:
        GroupNotFoundError: there is none.
    """
    runtime = await here.connected()
    try:
        group = await runtime.groups.find(runtime.namespace, CHANNEL_GROUPS + name)
    except GroupNotFoundError:
        raise GroupNotFoundError(
            f"there is no channel {name!r} in namespace {runtime.namespace!r}: create it first, by "
            f"Channel.create({name!r})"
        ) from None
    return remote_channel(runtime, group, name, here.node_rank, here.name), int(json.loads(group.detail)["maxsize"])


async def _ended_before(runtime: Runtime, name: str) -> Exception:
    """Return the error for a channel that ended before this process first used it."""
    early = f"channel {name!r} ended before this process first used it"
    try:
        group = await runtime.groups.find(runtime.namespace, CHANNEL_GROUPS + name, ended=True)
    except GroupNotFoundError:  # the head was restarted since, or it is too long ago
        return ChannelBrokenError(f"{early}, and the head does not know how: whether items were lost is unknown")
    ends = [end_of_channel(name, peer.error) for peer in group.peers if peer.error is not None]
    lost = [end for end in ends if not isinstance(end, ChannelClosedError)]
    if lost:
        return type(lost[0])(f"{early}: {lost[0]}")
    return ChannelClosedError(f"{early}: it was closed, and every item was taken")


class Connecting(Requests):
    """What is behind a handle that came as an argument, until its channel is found: keeps requests, in order.

    Args:
        name, namespace: of the channel.

    Attributes:
        found, maxsize: the channel, once it is found, and its maxsize.
        ended: the search, which gives the channel's maxsize. Its error is that of every request that was kept.

    Raises:
        UsageError: the channel belongs to another job, or this process to none.
    """

    def __init__(self, name: str, namespace: str) -> None:
        here = member()
        if here.runtime.namespace != namespace:
            raise UsageError(
                f"channel {name!r} belongs to namespace {namespace!r}, and this process to {here.runtime.namespace!r}"
            )
        super().__init__(here.runtime.io, name, here.name)
        self.found: RemoteChannel | None = None
        self.maxsize = 0
        self._kept = Kept()
        self.ended: AsyncWork[int] = AsyncWork.of(here.runtime.io, self._find(here), f"connecting to channel {name!r}")
        self.ended._on_done(self._tell)

    async def _find(self, here: Member) -> int:
        try:
            channel, maxsize = await find(here, self._name)
        except GroupNotFoundError as error:
            raise await _ended_before(here.runtime, self._name) from error

        def found() -> None:
            self.maxsize, self.found = maxsize, channel

        self._kept.begin(lambda request: _send(channel, request), found)
        return maxsize

    def _tell(self) -> None:
        error = self.ended.error
        if error is not None:
            self.ended._seen = True  # by who asked for something; nothing was asked otherwise
            self._kept.fail(error)

    def show(self) -> AsyncWork[View]:
        return self._later("a look at", lambda channel: channel.show())

    def close(self) -> AsyncWork[None]:
        return self._later("close() of", lambda channel: channel.close())

    def _later(self, what: str, start: Any) -> Later[Any]:
        later: Later[Any] = Later(f"{what} channel {self._name!r}", start)
        self._begin(later)
        return later

    def _begin(self, request: Request | Later[Any]) -> None:
        if self._kept.add(request):
            return
        if self.found is not None:
            _send(self.found, request)
        else:
            assert self.ended.error is not None
            request.reject(self.ended.error)


def _send(channel: RemoteChannel, request: Request | Later[Any]) -> None:
    if isinstance(request, Later):
        request.join([request.start(channel)])
    else:
        channel._begin(request)
