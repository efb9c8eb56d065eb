"""A driver's or worker's session with the head: hello, beats, notices. Loop thread only."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from rlinf_actors.errors import ProtocolError
from rlinf_actors.net.link import Network
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.wire.messages import HELLO_AGAIN, Beat, Body, ClientHello, Goodbye, Welcome

log = logging.getLogger(__name__)


class HeadLink:
    """The session.

    Args:
        network: what to connect with.
        endpoint: the head's.
        hello: what to introduce this process with; sent again if the head has forgotten us.
        on_notice: called with every notice that is not the session's own.
        on_return: called when a head that had forgotten us has taken us back.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        hello: ClientHello,
        on_notice: Callable[[Body], None],
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self._hello = hello
        self._on_notice = on_notice
        self._on_return = on_return
        self._beats: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None
        identity = f"{hello.role}:{hello.incarnation}".encode()
        self._client = ControlClient(network, endpoint, identity, self._noticed)

    async def start(self, timeout: float | None) -> Welcome:
        """Introduce this process.

        Raises:
            ClusterTimeoutError: the head did not answer in *timeout* seconds.
            ProtocolMismatchError, AuthenticationError: it refused.
        """
        welcome = await self._greet(timeout)
        self._beats = asyncio.get_running_loop().create_task(self._beat(welcome.beat_s), name="beats to the head")
        return welcome

    async def request(self, body: Body, timeout: float | None = None) -> Body:
        """Ask the head; see ControlClient.request."""
        return await self._client.request(body, timeout)

    def notify(self, body: Body) -> None:
        """Tell the head."""
        self._client.notify(body)

    def close(self, reason: str) -> None:
        """Say goodbye and close."""
        for task in (self._beats, self._greeting):
            if task is not None:
                task.cancel()
        self._client.notify(Goodbye(reason))
        self._client.close(linger_ms=200)

    async def _greet(self, timeout: float | None) -> Welcome:
        answer = await self._client.request(self._hello, timeout)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the head at {self.endpoint} answered a hello with {type(answer).__name__}")
        self.welcome = answer
        return answer

    async def _beat(self, beat_s: float) -> None:
        await asyncio.sleep(beat_s * random.random())
        while True:
            self._client.notify(Beat(self._hello.incarnation))
            await asyncio.sleep(beat_s)

    def _noticed(self, body: Body) -> None:
        if isinstance(body, Beat):
            if body.incarnation == HELLO_AGAIN and (self._greeting is None or self._greeting.done()):
                # the head restarted and does not know us: introduce ourselves again
                self._greeting = asyncio.get_running_loop().create_task(self._again(), name="hello again")
            return
        self._on_notice(body)

    async def _again(self) -> None:
        try:
            await self._greet(None)
        except Exception:
            log.exception("the head at %s does not take this process back", self.endpoint)
        else:
            self._on_return()
