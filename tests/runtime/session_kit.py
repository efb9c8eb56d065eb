"""A session with the head under test, and the head's end of it."""

from __future__ import annotations

import asyncio

from rlinf_actors.net.rpc import ControlServer
from rlinf_actors.runtime.head_session import HeadSession
from rlinf_actors.wire.agent_messages import Beat, ClientHello, Welcome

HELLO = ClientHello(1, "0.1", "inc", "driver", "ns", "here", 1, 2)


class Ends:
    """A head's end of the link, and the session under test."""

    def __init__(self, network, hello=HELLO) -> None:
        self.server = ControlServer(network, lambda peer, envelope: self.came.put_nowait((peer, envelope)))
        self.came: asyncio.Queue = asyncio.Queue()
        self.notices: asyncio.Queue = asyncio.Queue()
        self.endpoint = self.server.bind("ipc:///head")
        self.network = network
        self.alone: asyncio.Queue = asyncio.Queue()
        self.given_up: asyncio.Queue = asyncio.Queue()
        self.link = HeadSession(
            network,
            self.endpoint,
            hello,
            self.notices.put_nowait,
            on_silence=self.alone.put_nowait,
            on_given_up=self.given_up.put_nowait,
        )

    async def next(self, kind):
        """The next message. A heartbeat counts only if the caller asks for one."""
        while True:
            peer, envelope = await asyncio.wait_for(self.came.get(), 10)
            if isinstance(envelope.body, kind):
                return peer, envelope
            assert isinstance(envelope.body, Beat), envelope

    async def welcome(self, beat_s=0.01, lease_s=10.0, grace_s=120.0):
        starting = asyncio.ensure_future(self.link.start(10))
        peer, request = await self.next(ClientHello)
        self.server.reply(peer, request.id, Welcome("e", "0.1", beat_s, lease_s, "tok", head_grace_s=grace_s))
        await starting
        return peer
