"""The process behind a channel: a worker that has no class of a user's."""

from __future__ import annotations

import typing

from rlinf_actors.channel.host import ChannelHost as Host
from rlinf_actors.channel.queue import ChannelQueue
from rlinf_actors.cluster.attach import worker_job
from rlinf_actors.wire import frames
from rlinf_actors.worker.worker import Worker


class ChannelHost(Worker):
    """Holds a channel's items. Its main thread sleeps; the I/O thread does everything.

    Args:
        maxsize: items per key, 0 for no limit.
        max_bytes: bytes per key, 0 for no limit.
    """

    def __init__(self, maxsize: int, max_bytes: int) -> None:
        super().__init__()
        job, context = worker_job(), self._context
        assert job is not None
        assert context is not None
        runtime = job.connect()  # the head tells us which clients end
        server = context.server
        host = Host(ChannelQueue(maxsize, max_bytes), server.send, runtime.watched.watch)

        async def serve() -> None:
            server.serve(typing.get_args(frames.ChannelFrame), host.handle)

        runtime.io.submit(serve()).result()
