"""Make a channel (`make`) or find an existing one (`find`). Nothing here blocks.

The coroutines run on the I/O thread. `ConnectingChannel` keeps the requests of a handle until its channel is found.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from typing import Any

import msgspec

from rlinf_actors.channel.client import DeferredQuery, RemoteChannel, RequestBuffer, end_of_channel, remote_channel
from rlinf_actors.channel.requests import Request, RequestMaker
from rlinf_actors.channel.results import View
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
from rlinf_actors.model.names import wrong_name
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.settings import Settings
from rlinf_actors.wire.values import CHANNEL_GROUPS

HOST = "rlinf_actors.worker.channelhost:ChannelHost"


class JobMember(msgspec.Struct, frozen=True):
    """This process as a member of its job: what is needed to make and find channels.

    Attributes:
        runtime: of this process; a worker's runtime may not have reached the head yet.
        job: the WorkerJob of a worker; None in a driver.
        node_rank: rank of this node.
        name: text that names this process and its machine to people.
    """

    runtime: Runtime
    job: WorkerJob | None
    node_rank: int
    name: str


def member() -> JobMember:
    """Return the runtime, node and name of this process, for the channels that it makes or finds.

    Raises:
        UsageError: this driver has no Cluster, or this process is a forked child that may not use the runtime.
    """
    job = worker_job()
    if job is not None:
        job.runtime.check_usable()
        return JobMember(job.runtime, job, job.node_rank, f"{job.name} on {socket.gethostname()}")
    cluster = Cluster.current()
    name = f"the driver (process {os.getpid()}) on {socket.gethostname()}"
    return JobMember(cluster.runtime, None, cluster.here(), name)


async def make(
    here: JobMember,
    name: str,
    maxsize: int,
    node_rank: int | None,
    show_logs: bool,
    detached: bool,
    max_deliveries: int,
    line: tuple[str, int],
) -> tuple[RemoteChannel, int]:
    """Make a channel, and return its RemoteChannel and maxsize. I/O thread only.

    If a channel of that name exists, warn, and return the existing channel and its maxsize. The channel has a host on
    the node *node_rank*, or on every node if that is None. *line* is the caller's file and line number, for the
    warning.

    Raises:
        PlacementError: no node has the rank *node_rank*.
    """
    cluster = Cluster.current() if here.job is None else await Cluster.connect()
    nodes = list(range(cluster.num_nodes)) if node_rank is None else [node_rank]
    detail = json.dumps({"maxsize": maxsize, "distributed": node_rank is None})
    args = (maxsize, Settings.load().channel_bytes, max_deliveries)
    try:
        group = await launch_service(cluster, CHANNEL_GROUPS + name, HOST, args, nodes, detail, show_logs, detached)
    except NameInUseError:
        channel, found = await find(here, name)
        warnings.warn_explicit(
            f"channel {name!r} exists (maxsize {found}): connected to that channel; the arguments given "
            f"here (maxsize {maxsize}) have no effect",
            RuntimeWarning,
            *line,
        )
        return channel, found
    return remote_channel(cluster.runtime, group, name, here.node_rank, here.name), maxsize


def check_name(name: Any) -> None:
    """Raise UsageError if *name* cannot be the name of a channel."""
    if wrong := wrong_name(name, "a channel"):
        raise UsageError(wrong)


async def find(here: JobMember, name: str) -> tuple[RemoteChannel, int]:
    """Return the RemoteChannel and the maxsize of the existing channel *name*. I/O thread only.

    A program of RLinf may connect a worker to a channel that another worker is about to make. So in a worker of such a
    program the head waits for the channel.

    Raises:
        GroupNotFoundError: no channel has that name.
    """
    runtime = here.runtime if here.job is None else await here.job.connected()
    wait_s = 0.0 if here.job is None else Settings.load().channel_wait_s
    try:
        group = await runtime.groups.find(runtime.namespace, CHANNEL_GROUPS + name, wait_s=wait_s)
    except GroupNotFoundError:
        raise GroupNotFoundError(
            f"there is no channel {name!r} in job {runtime.namespace!r}: create it first, by Channel.create({name!r})"
        ) from None
    return remote_channel(runtime, group, name, here.node_rank, here.name), int(json.loads(group.detail)["maxsize"])


async def _ended_before(runtime: Runtime, name: str) -> Exception:
    """Return the error for a channel that the head does not list: how its hosts ended, if the head still knows that."""
    early = f"channel {name!r} ended before this process first used it"
    try:
        group = await runtime.groups.find(runtime.namespace, CHANNEL_GROUPS + name, ended=True)
    except GroupNotFoundError:  # the head was restarted since, or has forgotten it
        return ChannelBrokenError(f"{early}, and the head does not know how: whether items were lost is unknown")
    ends = [end_of_channel(name, peer.error) for peer in group.peers if peer.error is not None]
    lost = [end for end in ends if not isinstance(end, ChannelClosedError)]
    if lost:
        return type(lost[0])(f"{early}: {lost[0]}")
    return ChannelClosedError(f"{early}: it was closed, and every item was taken")


class ConnectingChannel(RequestMaker):
    """Keeps the requests of a handle that came as an argument of a call, in order, until the handle's channel is found.

    Attributes:
        found: the channel; None until it is found.
        search: the search for the channel. If it fails, every kept request fails with its error.

    Raises:
        UsageError: the channel belongs to another job, or this process belongs to none.
    """

    def __init__(self, name: str, namespace: str) -> None:
        here = member()
        if here.runtime.namespace != namespace:
            raise UsageError(
                f"channel {name!r} belongs to job {namespace!r}, and this process to {here.runtime.namespace!r}"
            )
        super().__init__(here.runtime.io, name, here.name)
        self.found: RemoteChannel | None = None
        self._buffer = RequestBuffer()
        self.search: AsyncWork[None] = AsyncWork.of(
            here.runtime.io, self._find(here), f"connecting to channel {name!r}"
        )
        self.search._on_done(self._search_done)

    @property
    def starting(self) -> bool:
        """True if a host process is not running yet. False while the channel is not found."""
        return self.found is not None and self.found.starting

    async def _find(self, here: JobMember) -> None:
        try:
            channel, _ = await find(here, self._name)
        except GroupNotFoundError as error:
            raise await _ended_before(here.runtime, self._name) from error

        def found() -> None:
            self.found = channel

        self._buffer.flush(lambda request: _send(channel, request), found)

    def _search_done(self) -> None:
        error = self.search.error
        if error is not None:
            self.search._seen = True  # the requests report it
            self._buffer.fail(error)

    def show(self, what: str = "counts") -> AsyncWork[View]:
        return self._deferred("a look at", lambda channel: channel.show(what))

    def close(self) -> AsyncWork[None]:
        return self._deferred("close() of", lambda channel: channel.close())

    def _deferred(self, what: str, start: Any) -> DeferredQuery[Any]:
        query: DeferredQuery[Any] = DeferredQuery(f"{what} channel {self._name!r}", start)
        self._begin(query)
        return query

    def _begin(self, request: Request | DeferredQuery[Any]) -> None:
        if self._buffer.add(request):
            return
        if self.found is not None:
            _send(self.found, request)
        else:
            assert self.search.error is not None
            request.reject(self.search.error)


def _send(channel: RemoteChannel, request: Request | DeferredQuery[Any]) -> None:
    if isinstance(request, DeferredQuery):
        request.join([request.start(channel)])
    else:
        channel._begin(request)
