"""The process behind a channel: a worker that has no class of a user's."""

from __future__ import annotations

import logging
import os
import threading
import typing
from collections.abc import Callable

from rlinf_actors.channel.host import ChannelHost as Host
from rlinf_actors.channel.queue import ChannelQueue
from rlinf_actors.cluster.attach import worker_job
from rlinf_actors.model.buffers import Buffer, lent
from rlinf_actors.runtime.process import Runtime
from rlinf_actors.wire import frames
from rlinf_actors.worker.server import WorkerServer
from rlinf_actors.worker.worker import Worker

log = logging.getLogger(__name__)

LAST_WORDS_MS = 1000
"""How long (milliseconds) the last answers of a channel that was closed may take to be read."""


class ChannelHost(Worker):
    """Holds a channel's items. Its main thread sleeps; the I/O thread does everything.

    The process ends by itself, with exit code 0, when the channel was closed and all items were taken.

    Args:
        maxsize: items per key, 0 for no limit.
        max_bytes: bytes of all keys together, 0 for no limit.
    """

    def __init__(self, maxsize: int, max_bytes: int) -> None:
        super().__init__()
        job, context = worker_job(), self._context
        assert job is not None
        assert context is not None
        runtime = job.connect()  # the head tells us which clients end
        server = context.server
        ending = _Ending(runtime, server)

        def watch(incarnation: str, on_gone: Callable[[], None]) -> None:
            def gone() -> None:
                server.forget(incarnation)
                on_gone()

            runtime.watched.watch(incarnation, gone)

        host = Host(ChannelQueue(maxsize, max_bytes), server.send, watch, _keeper(runtime), ending.begin)

        async def serve() -> None:
            server.serve(typing.get_args(frames.ChannelFrame), host.handle)

        runtime.io.submit(serve()).result()


def _keeper(runtime: Runtime) -> Callable[[Buffer], Buffer]:
    """Large parts may be views of the producer's memory; a copy in ours is lent to the consumer as it is."""

    def keep(part: Buffer) -> Buffer:
        return runtime.copy(part) if lent(part) else part

    return keep


class _Ending:
    """Ends the process once. I/O thread."""

    def __init__(self, runtime: Runtime, server: WorkerServer) -> None:
        self._runtime = runtime
        self._server = server
        self._begun = False

    def begin(self) -> None:
        """Nobody needs the channel any more."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._end, name="the end of a channel", daemon=True).start()  # joins this thread

    def _end(self) -> None:
        try:

            async def close() -> None:
                self._server.close(LAST_WORDS_MS)

            self._runtime.io.submit(close()).result()
            self._runtime.close()
        except BaseException:
            log.exception("the host of a closed channel did not end well")
            os._exit(1)
        os._exit(0)
