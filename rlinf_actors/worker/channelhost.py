"""ChannelHost: the worker class of the processes that store a channel's items."""

from __future__ import annotations

import functools
import logging
import os
import threading
import typing

from rlinf_actors.channel.queue import ChannelQueue
from rlinf_actors.channel.queue_server import QueueServer
from rlinf_actors.cluster.connect import worker_job
from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.net import reading
from rlinf_actors.net.further_arenas import owned
from rlinf_actors.net.loop import Tasks
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.wire import frames
from rlinf_actors.worker import figures
from rlinf_actors.worker.worker import Worker
from rlinf_actors.worker.worker_server import WorkerServer

log = logging.getLogger(__name__)

LAST_WORDS_MS = 1000
"""Milliseconds that clients have to read the last answers of a closed channel before its host ends."""


class ChannelHost(Worker):
    """Stores the items of a channel. The main thread of its process sleeps, and the I/O thread does all work.

    The process ends with exit code 0 when the channel is closed, all items are taken, and no undeliverable item is
    left. In a distributed channel, rank 0 also knows which replica has each key, and ends after the other replicas.

    Args:
        maxsize: most items that wait under each key, 0 for no limit.
        max_bytes: most bytes of the items of all keys together, 0 for no limit.
        max_deliveries: most deliveries of an item.
    """

    def __init__(self, maxsize: int, max_bytes: int, max_deliveries: int) -> None:
        super().__init__()
        job, context = worker_job(), self._context
        assert job is not None
        assert context is not None
        runtime = job.connect()  # the head tells which clients end
        server = context.server
        others = self._world_size - 1 if self._rank == 0 else 0
        ending = _Ending(runtime, server, self._group_name, others)
        queue = ChannelQueue(maxsize, max_bytes, max_deliveries)
        keep = functools.partial(owned, copy=runtime.copy)
        send, watch, emulated = server.send, runtime.watched.watch, runtime.emulated
        queue_server = QueueServer(queue, send, watch, keep, ending.begin, emulated, runtime.io.loop.call_soon)

        figures.channel = functools.partial(queue.figures, server.worker_of)

        if reading.active is not None:
            reading.active.leave_to_loop()

        async def serve() -> None:
            server.serve(typing.get_args(frames.ChannelFrame), queue_server.handle)
            server.on_link_lost(queue_server.link_lost)

        runtime.io.submit(serve()).result()


class _Ending:
    """Ends the host process of a closed channel. The host of rank 0 ends after the other replicas. I/O thread."""

    def __init__(self, runtime: Runtime, server: WorkerServer, group: str, others: int) -> None:
        self._runtime = runtime
        self._server = server
        self._group = group
        self._others = others
        self._tasks = Tasks()
        self._begun = False

    def begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        if self._others:
            self._tasks.start(self._wait(), "waiting for the end of a channel's other replicas")
        else:
            self._start()

    async def _wait(self) -> None:
        try:
            group = await self._runtime.groups.find(self._runtime.namespace, self._group)
        except RlinfActorsError as error:
            log.warning("this process of a closed channel runs until its creator ends: %s", error)
            return
        for peer in group.peers[1:]:
            peer.on_gone(self._gone)  # the head tells

    def _gone(self, _reason: Exception) -> None:
        self._others -= 1
        if not self._others:
            self._start()

    def _start(self) -> None:
        threading.Thread(target=self._end, name="the end of a channel", daemon=True).start()  # joins the I/O thread

    def _end(self) -> None:
        self._server.constructed.wait()  # else the creator takes the end of this host for a failed launch
        try:

            async def close() -> None:
                self._server.close(LAST_WORDS_MS)

            self._runtime.io.submit(close()).result()
            self._runtime.close()
        except BaseException:
            log.exception("the process of a closed channel did not end well")
            os._exit(1)
        os._exit(0)
