"""A driver's or worker's session with the head: hello, beats, notices. Loop thread only.

Ends of other clients of the job, for who keeps something for them. Loop thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable

from msgspec.structs import replace

from rlinf_actors.errors import (
    AuthenticationError,
    ClusterTimeoutError,
    InternalError,
    NodeLostError,
    ProtocolError,
    ProtocolMismatchError,
    RlinfActorsError,
    WrongServerError,
)
from rlinf_actors.net.failure_detection import FailureDetector, ReconnectBackoff, stalled_s
from rlinf_actors.net.link import Network, Reachability, secret_identity
from rlinf_actors.net.loop import Tasks
from rlinf_actors.net.rpc import ControlClient, KeyRefusedError
from rlinf_actors.runtime.future import call_all
from rlinf_actors.wire.agent_messages import HELLO_AGAIN, Beat, ClientHello, Goodbye, Welcome
from rlinf_actors.wire.client_messages import WatchClients
from rlinf_actors.wire.control_codec import Body

log = logging.getLogger(__name__)

OWNER_BEATS = 8
"""Beats of an owner of robot workers in their lease: the head knows of an answer with the next beat, and three more may
be late.
"""
SILENT_HEAD_S = 5.0
"""How long the end of a group, or of a Cluster, waits for a head that says nothing: one may be restarted meanwhile."""
HEAD_GRACE_S = 120.0
"""How long a head may be silent while its machine answers, until it has said how long workers outlive it."""


class HeadSession:
    """The session.

    A head that is away is greeted again and again, with growing pauses; requests wait for it meanwhile, each to its
    own deadline, and are asked again when it is back. A driver asks its machine too: silence there means that the
    network is cut, and ends the session after the lease.

    Args:
        network: what to connect with.
        endpoint: the head's.
        hello: what to introduce this process with; sent again if the head has forgotten us.
        on_notice: called with every notice that is not the session's own.
        on_silence: called once, with the reason, when this process is on its own: the network is cut, no head came
            back in time, or it does not take this process back.
        on_return: called when a head that had forgotten us has taken us back.
        on_given_up: called instead if it does not because it has given up on this process.
        on_failed: called with a notice whose handler raised.
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
        on_failed: Callable[[Body, InternalError], object] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self._hello = hello
        self._on_notice = on_notice
        self._on_silence = on_silence
        # a worker's agent looks for all of its node, and ends the worker if need be
        self._detector = FailureDetector(HEAD_GRACE_S, hello.role == "driver", f"the head at {endpoint}")
        self._beat_s = 1.0
        self._word = 0.0  # the head's clock in its last answer, which the next beat repeats
        self._waited = (-math.inf, 0.0)  # when the head was heard of last, and the first wait for it since began
        self._on_return = on_return
        self._on_given_up = on_given_up
        self._backoff = ReconnectBackoff(random.random)
        self._closed = False
        self._tasks = Tasks()
        self._beats: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._network = network
        self.identity = secret_identity(f"{hello.role}:{hello.incarnation}")
        self._client = ControlClient(
            network, endpoint, self.identity, self._noticed, self._greet_again, on_failed=on_failed
        )

    async def start(self, timeout: float | None) -> Welcome:
        """Introduce this process.

        Raises:
            ClusterTimeoutError: the head did not answer in *timeout* seconds.
            ProtocolMismatchError, AuthenticationError: it refused.
        """
        welcome = await self._first_welcome(timeout)
        self._beat_s = welcome.beat_s
        if self._hello.role == "driver":
            self._hello = replace(self._hello, token=welcome.token)  # a head that is restarted learns it from us
        self._beats = self._tasks.start(self._tend(), "beating to the head", failed=self._broke)
        return welcome

    async def request(
        self, body: Body, timeout: float | None = None, on_reply: Callable[[Body], None] | None = None
    ) -> Body:
        """Ask the head, now or when it is back; see ControlClient.request.

        Raises:
            ClusterTimeoutError: no answer in *timeout* seconds; says so if the head was away in that time.
        """
        try:
            return await self._client.request(body, timeout, on_reply)
        except ClusterTimeoutError:
            now = asyncio.get_running_loop().time()
            if not self._detector.suspected(now):
                raise
            raise ClusterTimeoutError(
                f"the head at {self.endpoint} has not answered for {self._detector.seconds(now):.0f} s; "
                f"{type(body).__name__} waited {timeout:g} s for it. Is it running? "
                "Workers that run go on without it for a while"
            ) from None

    async def silent(self, seconds: float) -> None:
        """Wait until the head has been silent for *seconds*, counted from the first such wait since it was heard of."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while True:
            if self._waited[0] != self._detector.last:
                self._waited = (self._detector.last, max(asked, self._detector.last))
            left = self._waited[1] + seconds - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(left)

    def notify(self, body: Body) -> None:
        """Tell the head."""
        self._client.notify(body)

    def close(self, reason: str, linger_ms: int = 200, error: RlinfActorsError | None = None) -> None:
        """Say goodbye and close; what the head does not take in *linger_ms* milliseconds is dropped.

        Requests that wait for an answer end with *error*.
        """
        self._closed = True
        self._tasks.cancel()
        self._client.notify(Goodbye(reason))
        self._client.close(linger_ms, error)

    async def _first_welcome(self, timeout: float | None) -> Welcome:
        """A worker comes with its job's key, and a head that was restarted knows that when it has its agents back."""
        loop = asyncio.get_running_loop()
        until = math.inf if timeout is None else loop.time() + timeout
        while True:
            left = None if timeout is None else max(0.0, until - loop.time())
            try:
                welcome = await self._greet(left)
            except (KeyRefusedError, WrongServerError) as error:
                if self._hello.role != "worker" or loop.time() + self._detector.beat_s >= until:
                    raise
                log.debug("trying again: %s", error)
            else:
                self._backoff.recovered(loop.time())  # the next absence begins with short pauses again
                return welcome
            await self._connect_again(until)

    async def _connect_again(self, until: float = math.inf) -> None:
        """Make a new connection, after a pause; one that cannot be made (no descriptor is left, perhaps) after more.

        Raises:
            ClusterTimeoutError: none could be made by that time of the loop.
        """
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._backoff.pause())
            try:
                self._client.reopen()
                return
            except OSError as error:
                text = f"no connection to the head at {self.endpoint} can be made: {error.strerror or error}"
                if loop.time() >= until:
                    raise ClusterTimeoutError(text) from None
                self._say(self._backoff.failed(loop.time(), f"{text}; calls between workers go on, trying again"))

    async def _greet(self, timeout: float | None) -> Welcome:
        answer = await self._client.request(self._hello, timeout, first=True)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the head at {self.endpoint} answered a hello with {type(answer).__name__}")
        if self.welcome is None or self.welcome.epoch != answer.epoch:
            self._word = 0.0  # another head has another clock
        self.welcome = answer
        self._detector.beat_s, self._detector.lease_s = answer.beat_s, answer.lease_s
        self._detector.grace_s = answer.head_grace_s
        self._detector.heard(asyncio.get_running_loop().time())
        return answer

    def own_robots(self) -> None:
        """This process owns robot workers: answer the head eight times in their lease."""
        if self.welcome is not None:
            self._beat_s = min(self._beat_s, self.welcome.robot_lease_s / OWNER_BEATS)
            self._beat()  # the next one may be due in a whole beat of before

    async def _tend(self) -> None:
        """Beat, and mind the head's silence; ends when that has a verdict."""
        loop = asyncio.get_running_loop()
        self._detector.heard(loop.time())
        next_beat = loop.time() + self._beat_s * random.random()
        while True:
            due = min(next_beat, self._detector.next_deadline())
            await asyncio.sleep(due - loop.time())
            now = max(loop.time(), due)  # uvloop's clock is coarser than its time()
            if stall := stalled_s(due, now):
                self._detector.stalled(stall, now)
            if now >= next_beat:
                next_beat = now + self._beat_s
                if not self._away:  # else there is a hello on its way, and beats to nobody would only pile up
                    self._beat()
            if self._detector.suspected(now):
                self._greet_again()
            if self._detector.should_check(now):
                self._tasks.start(self._look(), "looking at the head", failed=self._not_looked)
            if self._judge(now):
                return

    def _broke(self, error: InternalError) -> None:
        """The session cannot go on without the task that failed."""
        if not self._closed:
            self._on_silence(str(error))

    def _beat(self) -> None:
        self._client.notify(Beat(self._hello.incarnation, word=self._word))

    async def _look(self) -> None:
        sight = await self._network.check_reachability(self.endpoint, self._detector.check_timeout_s)
        now = asyncio.get_running_loop().time()
        self._detector.checked(sight is not Reachability.SILENT, now)
        self._judge(now)

    def _not_looked(self, _error: InternalError) -> None:
        self._detector.check_failed(asyncio.get_running_loop().time())

    def _judge(self, now: float) -> bool:
        """Whether it is over."""
        reason = self._detector.verdict(now)
        if reason is not None and not self._closed:
            self._on_silence(reason)
        return reason is not None

    @property
    def _away(self) -> bool:
        return self._greeting is not None and not self._greeting.done()

    def _noticed(self, body: Body) -> None:
        if isinstance(body, Beat):  # an answer to what we said: anything else may come although we are not heard
            again = body.incarnation == HELLO_AGAIN
            # of the head that took us; not our own, by a connection to ourselves
            if again or (self.welcome is not None and body.incarnation == self.welcome.epoch):
                self._detector.heard(asyncio.get_running_loop().time())
            if again:
                self._greet_again()  # the head was restarted, and does not know us
            elif self.welcome is not None and body.incarnation == self.welcome.epoch:
                self._word = body.word
            return
        if isinstance(body, Goodbye) and body.restarting:
            self._restarting()
            return
        self._on_notice(body)

    def _restarting(self) -> None:
        """The head has been stopped and is expected back: requests wait until it has taken this process back.

        The hello follows when the connection is made anew, or when the head has been silent for long.
        """
        if self._beats is None:
            return  # not welcomed yet: the first hello is repeated
        self._client.hold()
        now = asyncio.get_running_loop().time()
        text = f"the head at {self.endpoint} is being restarted; calls between workers go on, launches wait for it"
        self._say(self._backoff.failed(now, text))

    def _greet_again(self) -> None:
        """The head does not know us, or what we or it said may be lost: a hello brings both up to date."""
        if self._beats is None:
            self._client.repeat_first()  # lost before it was answered
        elif not self._away:
            self._client.hold()
            self._greeting = self._tasks.start(self._again(), "saying hello to the head again", failed=self._broke)

    async def _again(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._greet(self._backoff.attempt_timeout(self._detector.lease_s))
                break
            except RlinfActorsError as error:
                if self._closed:
                    return
                if isinstance(error, NodeLostError):
                    self._on_given_up(str(error))
                    return
                if not isinstance(error, (ClusterTimeoutError, AuthenticationError, ProtocolMismatchError)):
                    self._on_silence(str(error))  # it is there, and does not take this process back
                    return
                # not there; there and without the agent that knows this worker; or of a version that may be replaced
                why = "no answer" if isinstance(error, ClusterTimeoutError) else error
                self._say(
                    self._backoff.failed(
                        loop.time(),
                        f"the head at {self.endpoint} is not there ({why}); calls between workers go on, trying again",
                    )
                )
            await self._connect_again()
        away = self._backoff.recovered(loop.time())
        if away is not None:
            self._say(f"the head at {self.endpoint} is there again, after {away:.0f} s")
        self._on_return()  # first: a launch that waits may want the name of a group that we do not know any more
        self._client.resume()

    def _say(self, text: str) -> None:
        if text:  # a worker's lines would be repeated by each of them
            log.log(logging.WARNING if self._hello.role == "driver" else logging.INFO, "%s", text)


class WatchedClients:
    """Which clients this process watches.

    Args:
        tell: sends a notice to the head.
    """

    def __init__(self, tell: Callable[[Body], None]) -> None:
        self._tell = tell
        self._watched: dict[str, list[Callable[[], None]]] = {}

    def watch(self, incarnation: str, on_gone: Callable[[], None]) -> Callable[[], None]:
        """Call *on_gone* once that client has ended; soon if it has already.

        Returns:
            A function that ends the watch.
        """
        known = self._watched.setdefault(incarnation, [])
        known.append(on_gone)
        if len(known) == 1:
            self._tell(WatchClients([incarnation]))

        def unwatch() -> None:
            if on_gone in known:
                known.remove(on_gone)
            if not known and self._watched.get(incarnation) is known:
                del self._watched[incarnation]

        return unwatch

    def again(self) -> None:
        """The head was restarted: it has forgotten whom we watch."""
        if self._watched:
            self._tell(WatchClients(list(self._watched)))

    def gone(self, incarnation: str) -> None:
        """The head says that a client has ended."""
        call_all(self._watched.pop(incarnation, ()))
