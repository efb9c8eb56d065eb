"""A driver's or worker's session with the head: hello, beats, notices. Loop thread only."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from rlinf_actors.errors import NodeLostError, ProtocolError
from rlinf_actors.net.link import Network, Sight
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.silence import HeadSilence
from rlinf_actors.wire.messages import HELLO_AGAIN, Beat, Body, ClientHello, Goodbye, Welcome

log = logging.getLogger(__name__)

HEAD_GRACE_S = 120.0
"""How long a head may be silent while its machine answers, until it has said how long workers outlive it."""
STALL_S = 0.5
"""A timer of ours that is later than this says that we stood still ourselves."""


class HeadLink:
    """The session.

    Args:
        network: what to connect with.
        endpoint: the head's.
        hello: what to introduce this process with; sent again if the head has forgotten us.
        on_notice: called with every notice that is not the session's own.
        on_silence: called once, with the reason, when this process is on its own: the network is cut, or no head came
            back in time.
        on_return: called when a head that had forgotten us has taken us back.
        on_given_up: called with the reason when the head refuses to take us back, because it has given up on us.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        hello: ClientHello,
        on_notice: Callable[[Body], None],
        on_silence: Callable[[str], None] = lambda reason: None,
        on_return: Callable[[], None] = lambda: None,
        on_given_up: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self._hello = hello
        self._on_notice = on_notice
        self._on_silence = on_silence
        # a worker's agent looks for all of its node, and ends the worker if need be
        self._silence = HeadSilence(HEAD_GRACE_S, hello.role == "driver", f"the head at {endpoint}")
        self._beat_s = 1.0
        self._on_return = on_return
        self._on_given_up = on_given_up
        self._beats: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._pulse: ControlClient | None = None
        self._network = network
        self._identity = f"{hello.role}:{hello.incarnation}"
        self._client = ControlClient(network, endpoint, self._identity.encode(), self._noticed)

    async def start(self, timeout: float | None) -> Welcome:
        """Introduce this process.

        Raises:
            ClusterTimeoutError: the head did not answer in *timeout* seconds.
            ProtocolMismatchError, AuthenticationError: it refused.
        """
        welcome = await self._greet(timeout)
        self._beat_s = welcome.beat_s
        self._beats = asyncio.get_running_loop().create_task(self._tend(), name="beats to the head")
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
        for task in (self._beats, self._greeting, self._looking):
            if task is not None:
                task.cancel()
        self._drop_pulse()
        self._client.notify(Goodbye(reason))
        self._client.close(linger_ms)

    async def _greet(self, timeout: float | None) -> Welcome:
        answer = await self._client.request(self._hello, timeout)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the head at {self.endpoint} answered a hello with {type(answer).__name__}")
        self.welcome = answer
        self._silence.beat_s, self._silence.lease_s = answer.beat_s, answer.lease_s
        self._silence.grace_s = answer.head_grace_s
        return answer

    def own_robots(self) -> None:
        """This process owns robot workers: the head is to hear of it four times in their lease."""
        if self.welcome is not None:
            self._beat_s = min(self._beat_s, self.welcome.robot_lease_s / 4)

    async def _tend(self) -> None:
        """Beat, and mind the head's silence; ends when that has a verdict."""
        loop = asyncio.get_running_loop()
        self._silence.heard(loop.time())
        next_beat = loop.time() + self._beat_s * random.random()
        while True:
            due = min(next_beat, self._silence.next_deadline())
            await asyncio.sleep(due - loop.time())
            now = max(loop.time(), due)  # uvloop's clock is coarser than its time()
            if now - due > STALL_S:
                self._silence.stood_still(now - due, now)
            if now >= next_beat:
                next_beat = now + self._beat_s
                for client in (self._client, self._pulse):
                    if client is not None:
                        client.notify(Beat(self._hello.incarnation))
            if self._silence.look(now):
                self._looking = loop.create_task(self._look(), name="look at the head")
            if self._judge(now):
                return

    async def _look(self) -> None:
        there = await self._network.look(self.endpoint, self._silence.look_timeout_s) is not Sight.SILENT
        now = asyncio.get_running_loop().time()
        self._silence.looked(there, now)
        if there and self._silence.suspected(now):
            # What a cut lost TCP repeats after pauses as long as the cut, and what we said will arrive once. Until
            # then the head hears over a new connection that we are here.
            self._drop_pulse()
            self._pulse = ControlClient(self._network, self.endpoint, f"{self._identity}~".encode(), self._over_pulse)
            self._pulse.notify(Beat(self._hello.incarnation))
        if self._judge(now) and self._beats is not None:
            self._beats.cancel()

    def _judge(self, now: float) -> bool:
        """Whether it is over."""
        reason = self._silence.verdict(now)
        if reason is not None:
            self._on_silence(reason)
        return reason is not None

    def _over_pulse(self, body: Body) -> None:
        if isinstance(body, Goodbye):
            self._noticed(body)
        elif body != Beat(HELLO_AGAIN):  # a head that was restarted closes the other connection, which is made anew
            self._silence.heard(asyncio.get_running_loop().time())

    def _drop_pulse(self) -> None:
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.close()

    def _noticed(self, body: Body) -> None:
        self._silence.heard(asyncio.get_running_loop().time())
        self._drop_pulse()
        if isinstance(body, Beat):
            if body.incarnation == HELLO_AGAIN and (self._greeting is None or self._greeting.done()):
                # the head restarted and does not know us: introduce ourselves again
                self._greeting = asyncio.get_running_loop().create_task(self._again(), name="hello again")
            return
        self._on_notice(body)

    async def _again(self) -> None:
        try:
            await self._greet(None)
        except NodeLostError as error:  # it gave up on us, and remembers that
            self._on_given_up(str(error))
        except Exception:
            log.exception("the head at %s does not take this process back", self.endpoint)
        else:
            self._on_return()
