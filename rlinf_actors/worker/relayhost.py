"""RelayHost: the worker class of the processes that pass messages on to the workers of their node (`worker.relay`)."""

from __future__ import annotations

import os

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.net import reading
from rlinf_actors.net.local_network import LocalNetwork
from rlinf_actors.wire import frames
from rlinf_actors.worker.relay import Relay
from rlinf_actors.worker.worker import Worker


class RelayHost(Worker):
    """Passes messages on. The main thread of its process sleeps, and the I/O thread does all work."""

    def __init__(self) -> None:
        super().__init__()
        context = self._context
        assert context is not None
        runtime, server = context.runtime, context.server
        if not isinstance(runtime.network, LocalNetwork):
            raise RlinfActorsError("this node has no unix streams between its processes, so it needs no relay")
        folder = os.path.dirname(context.endpoint.ipc.removeprefix("ipc://"))

        if reading.active is not None:
            reading.active.leave_to_loop()

        async def serve() -> None:
            relay = Relay(runtime.network, folder, lambda peer, frame, parts: server.send(peer, frame, parts, now=True))
            server.serve((frames.Relayed,), relay.handle)
            server.on_link_lost(relay.forget)
            server.on_forgotten(relay.forget)

        runtime.io.submit(serve()).result()
