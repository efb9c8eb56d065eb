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

HEAD_GRACE_S = 120.0
"""How long a head may be silent: as long as workers outlive it (agentd's head_grace_s)."""
STALL_S = 0.5
"""A timer of ours that is later than this says that we stood still ourselves."""


class HeadLink:
    """The session.

    Args:
        network: what to connect with.
        endpoint: the head's.
        hello: what to introduce this process with; sent again if the head has forgotten us.
        on_notice: called with every notice that is not the session's own.
        on_silence: called once, with the reason, when the head has been silent for HEAD_GRACE_S seconds.
        on_return: called when a head that had forgotten us has taken us back.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        hello: ClientHello,
        on_notice: Callable[[Body], None],
        on_silence: Callable[[str], None] = lambda reason: None,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self._hello = hello
        self._on_notice = on_notice
        self._on_silence = on_silence
        self._heard = 0.0
        self._beat_s = 1.0
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
        self._beat_s = welcome.beat_s
        self._beats = asyncio.get_running_loop().create_task(self._beat(), name="beats to the head")
        return welcome

    async def request(
        self, body: Body, timeout: float | None = None, on_reply: Callable[[Body], None] | None = None
    ) -> Body:
        """Ask the head; see ControlClient.request."""
        return await self._client.request(body, timeout, on_reply)

    def notify(self, body: Body) -> None:
        """Tell the head."""
        self._client.notify(body)

    def close(self, reason: str, linger_ms: int = 200) -> None:
        """Say goodbye and close; what the head does not take in *linger_ms* milliseconds is dropped."""
        for task in (self._beats, self._greeting):
            if task is not None:
                task.cancel()
        self._client.notify(Goodbye(reason))
        self._client.close(linger_ms)

    async def _greet(self, timeout: float | None) -> Welcome:
        answer = await self._client.request(self._hello, timeout)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the head at {self.endpoint} answered a hello with {type(answer).__name__}")
        self.welcome = answer
        return answer

    def own_robots(self) -> None:
        """This process owns robot workers: the head is to hear of it four times in their lease."""
        if self.welcome is not None:
            self._beat_s = min(self._beat_s, self.welcome.robot_lease_s / 4)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        await asyncio.sleep(self._beat_s * random.random())
        while loop.time() - self._heard < HEAD_GRACE_S:
            self._client.notify(Beat(self._hello.incarnation))
            due = loop.time() + self._beat_s
            await asyncio.sleep(self._beat_s)
            self._heard += max(0.0, loop.time() - due - STALL_S)  # while we stood still, nobody was silent
        self._on_silence(f"the head at {self.endpoint} has not answered for {HEAD_GRACE_S:g} s")

    def _noticed(self, body: Body) -> None:
        self._heard = asyncio.get_running_loop().time()
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
