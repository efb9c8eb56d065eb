"""HeadSession: the session of a driver or worker with the head: hello, heartbeats, notices. Loop thread only.

While the head does not answer, HeadSession repeats its hello with growing pauses. Requests wait for the head, each
until its own deadline, and are sent again when the head is back.

A driver sends heartbeats. It also checks whether the head's machine is reachable: if the network is cut, the session
ends after the lease. A worker sends none, because the agentd of its node tells the head whether the worker lives: so
10,000 workers cost the head nothing. That agentd also tells the worker when it has registered with the head again
(`node_registered`), and ends the worker if the head stays away. Two things need signs of life from the head, and make
a worker send heartbeats: robots that it owns (`own_robots`), and the wait of `silent`.
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
from rlinf_actors.tracing.clocks import HeadClock
from rlinf_actors.wire.agent_messages import HELLO_AGAIN, Beat, ClientHello, Goodbye, Welcome
from rlinf_actors.wire.client_messages import WatchClients
from rlinf_actors.wire.control_codec import Body

log = logging.getLogger(__name__)

OWNER_BEATS = 8
"""Number of heartbeats that an owner of robot workers sends in one robot lease.

A heartbeat acknowledges the head's last answer, and three more heartbeats may be late.
"""
WATCHED_AT_ONCE = 1000
"""Most clients in one WatchClients."""
SILENT_HEAD_S = 5.0
"""Seconds that stopping a group or a Cluster waits for a silent head, which may be restarting."""
HEAD_GRACE_S = 120.0
"""Seconds that a head may be silent while its machine answers. The head's Welcome replaces this default."""


class HeadSession:
    """Keeps this driver or worker registered with the head: sends the hello and heartbeats, and detects a lost head.

    A worker sends heartbeats only if it owns robots, or waits for signs of life from the head.

    Args:
        network: makes the connection.
        endpoint: endpoint of the head.
        hello: the message that registers this process; sent again if the head no longer knows this process.
        on_notice: called with each message that the head sends unasked, except those about the session itself.
        on_silence: called once, with the reason, when the session has ended: the network is cut, no head came back in
            time, or the head does not accept this process again.
        on_return: called when a restarted head has accepted this process again.
        on_given_up: called instead of *on_silence*, with the reason, if the head has declared this process dead.
        on_failed: called if *on_notice* has raised, with the notice and the error.
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
        # agentd checks the network for all workers of its node
        self._detector = FailureDetector(HEAD_GRACE_S, hello.role == "driver", f"the head at {endpoint}")
        self._beat_s = 1.0
        self.clock = HeadClock()  # differences of the head's clock and ours, for traces
        self._head_clock = 0.0  # in the head's last answer; the next beat repeats it
        self._waited = (-math.inf, 0.0)  # the head's last sign of life, and the start of the first `silent` after it
        self._waits = 0  # calls of `silent` under way
        self._owns_robots = False
        self._beats_wanted = asyncio.Event()  # set when heartbeats may be due from now on
        self._on_return = on_return
        self._on_given_up = on_given_up
        self._backoff = ReconnectBackoff(random.random)
        self._closed = False
        self._tasks = Tasks()
        self._beats: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._network = network
        self.identity = self._new_identity()  # of the present connection, at the head
        self._client = ControlClient(
            network, endpoint, self.identity, self._noticed, self._reconnected, on_failed=on_failed
        )

    async def start(self, timeout: float | None) -> Welcome:
        """Send the hello, start the heartbeats, and return the head's Welcome.

        Raises:
            ClusterTimeoutError: the head did not answer in *timeout* seconds.
            ProtocolMismatchError, AuthenticationError: the head rejected this process.
        """
        welcome = await self._first_welcome(timeout)
        self._beat_s = welcome.beat_s
        if self._hello.role == "driver":
            self._hello = replace(self._hello, token=welcome.token)  # a head that is restarted learns it from us
        self._beats = self._tasks.start(self._keep_session(), "beating to the head", failed=self._task_failed)
        return welcome

    async def request(
        self, body: Body, timeout: float | None = None, on_reply: Callable[[Body], None] | None = None
    ) -> Body:
        """Send a request to the head and return the answer. While a head restarts, the request waits for the new head.

        Args:
            body: the request.
            timeout: seconds to wait for the answer, None for no limit.
            on_reply: called with the answer as it arrives, before any notice that the head sent after the answer.

        Raises:
            ClusterTimeoutError: no answer in *timeout* seconds. The message says whether the head was silent.
        """
        loop = asyncio.get_running_loop()
        asked = loop.time()
        try:
            return await self._client.request(body, timeout, on_reply)
        except ClusterTimeoutError:
            # without heartbeats the head was silent before because nothing was asked
            silent = self._detector.seconds(loop.time()) if self._beating else loop.time() - asked
            if silent < self._detector.suspect_s:
                raise
            raise ClusterTimeoutError(
                f"the head at {self.endpoint} has not answered for {silent:.0f} s; "
                f"{type(body).__name__} waited {timeout:g} s for it. Is it running? "
                "Workers that run go on without it for a while"
            ) from None

    async def silent(self, seconds: float) -> None:
        """Wait until the head has sent no sign of life for *seconds*. Does not return while the head answers.

        For all callers the seconds count from the first call of this method since the head's last sign of life.
        """
        loop = asyncio.get_running_loop()
        asked = loop.time()
        self._waits += 1
        self._beats_wanted.set()
        try:
            while True:
                if self._waited[0] != self._detector.last:
                    self._waited = (self._detector.last, max(asked, self._detector.last))
                left = self._waited[1] + seconds - loop.time()
                if left <= 0:
                    return
                await asyncio.sleep(left)
        finally:
            self._waits -= 1

    def notify(self, body: Body) -> None:
        self._client.notify(body)

    def close(self, reason: str, linger_ms: int = 200, error: RlinfActorsError | None = None) -> None:
        """End the session: send the head a Goodbye with *reason*, and close the connection.

        Pending requests fail with *error*. Messages that are still unsent after *linger_ms* milliseconds are dropped.
        """
        self._closed = True
        self._tasks.cancel()
        self._client.notify(Goodbye(reason))
        self._client.close(linger_ms, error)

    async def _first_welcome(self, timeout: float | None) -> Welcome:
        """Send the first hello, and return the head's answer, a Welcome.

        If a worker's key is refused, the worker tries again until *timeout* seconds have passed, because a restarted
        head knows the keys of workers only when their agentds have reconnected.
        """
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

    def _new_identity(self) -> bytes:
        return secret_identity(f"{self._hello.role}:{self._hello.incarnation}")

    async def _connect_again(self, until: float = math.inf) -> None:
        """Pause, then replace the connection to the head by a new one.

        If that fails, as without a free file descriptor, pause longer and try again, until the loop's time is *until*.

        Raises:
            ClusterTimeoutError: no connection could be made by then.
        """
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._backoff.pause())
            try:
                self.identity = self._new_identity()
                self._client.reopen(self.identity)
                return
            except OSError as error:
                text = f"no connection to the head at {self.endpoint} can be made: {error.strerror or error}"
                if loop.time() >= until:
                    raise ClusterTimeoutError(text) from None
                self._say(self._backoff.failed(loop.time(), f"{text}; calls between workers go on, trying again"))

    def _head_slow(self, text: str) -> None:
        self._say(self._backoff.failed(asyncio.get_running_loop().time(), f"{text}; calls between workers go on"))

    async def _greet(self, timeout: float | None, on_waiting: Callable[[str], object] | None = None) -> Welcome:
        answer = await self._client.request(self._hello, timeout, first=True, on_waiting=on_waiting)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the head at {self.endpoint} answered a hello with {type(answer).__name__}")
        if self.welcome is None or self.welcome.epoch != answer.epoch:
            self._head_clock = 0.0  # another head has another clock
        self.welcome = answer
        self._detector.beat_s, self._detector.lease_s = answer.beat_s, answer.lease_s
        self._detector.grace_s = answer.head_grace_s
        self._detector.heard(asyncio.get_running_loop().time())
        return answer

    def own_robots(self) -> None:
        """Send heartbeats more often from now on, because this process owns workers that hold robots.

        A robot's lease may depend on these heartbeats, so OWNER_BEATS of them are sent in the time of one lease.
        """
        if self.welcome is not None:
            self._owns_robots = True
            self._beats_wanted.set()
            self._beat_s = min(self._beat_s, self.welcome.robot_lease_s / OWNER_BEATS)
            self._beat()  # the next beat may be due only after a whole interval of before

    def node_registered(self, epoch: str, again: bool) -> None:
        """Register with the head again if this process's session may be gone, or its messages lost.

        Called when the agentd of this process's node has registered with the head *epoch*. *again* is True if that head
        had registered the agentd before: their connection was lost, or one of them was silent.
        """
        if self.welcome is None or again or epoch != self.welcome.epoch:
            self._greet_again()

    @property
    def _beating(self) -> bool:
        return self._hello.role == "driver" or self._owns_robots or self._waits > 0

    async def _keep_session(self) -> None:
        """Send heartbeats and watch for the head's answers, until the failure detector has declared the head lost.

        While no heartbeats are sent, wait until they are wanted: the head's silence then means nothing.
        """
        loop = asyncio.get_running_loop()
        self._detector.heard(loop.time())
        next_beat = loop.time() + self._beat_s * random.random()
        while True:
            if not self._beating:
                self._beats_wanted.clear()
                await self._beats_wanted.wait()
                next_beat = loop.time()
                self._detector.heard(next_beat)
            due = min(next_beat, self._detector.next_deadline())
            await asyncio.sleep(due - loop.time())
            if not self._beating:
                continue
            now = max(loop.time(), due)  # uvloop's clock is coarser than its time()
            if stall := stalled_s(due, now):
                self._detector.stalled(stall, now)
            if now >= next_beat:
                next_beat = now + self._beat_s
                if not self._away:  # else a hello is on its way, and beats would only pile up
                    self._beat()
            if self._detector.suspected(now):
                self._greet_again()
            if self._detector.should_check(now):
                self._tasks.start(self._check_reachability(), "checking the head", failed=self._check_failed)
            if self._report_if_lost(now):
                return

    def _task_failed(self, error: InternalError) -> None:
        if not self._closed:
            self._on_silence(str(error))

    def _beat(self) -> None:
        self._client.notify(Beat(self._hello.incarnation, asyncio.get_running_loop().time(), self._head_clock))

    async def _check_reachability(self) -> None:
        sight = await self._network.check_reachability(self.endpoint, self._detector.check_timeout_s)
        now = asyncio.get_running_loop().time()
        self._detector.checked(sight is not Reachability.SILENT, now)
        self._report_if_lost(now)

    def _check_failed(self, _error: InternalError) -> None:
        self._detector.check_failed(asyncio.get_running_loop().time())

    def _report_if_lost(self, now: float) -> bool:
        """If the failure detector has declared the head lost, call `on_silence` and return True; else return False."""
        reason = self._detector.verdict(now)
        if reason is not None and not self._closed:
            self._on_silence(reason)
        return reason is not None

    @property
    def _away(self) -> bool:
        return self._greeting is not None and not self._greeting.done()

    def _noticed(self, body: Body) -> None:
        if isinstance(body, Beat):  # an answer to a beat; other notices may come although our messages are lost
            again = body.incarnation == HELLO_AGAIN
            # from the head of this session, not an echo by a connection to ourselves
            if again or (self.welcome is not None and body.incarnation == self.welcome.epoch):
                self._detector.heard(asyncio.get_running_loop().time())
            if again:
                self._greet_again()  # the head was restarted, and does not know this process
            elif self.welcome is not None and body.incarnation == self.welcome.epoch:
                self._head_clock = body.word
                self.clock.answered(body.at, asyncio.get_running_loop().time(), body.word)
            return
        if isinstance(body, Goodbye) and body.restarting:
            self._restarting()
            return
        self._on_notice(body)

    def _restarting(self) -> None:
        """Hold requests back from now on, because the head has announced that it restarts.

        They are sent when the new head has accepted this process. The hello to the new head is sent later: when the
        connection is re-established, or when the head has left heartbeats unanswered.
        """
        if self._beats is None:
            return  # not welcomed yet: the first hello is repeated
        self._client.hold()
        now = asyncio.get_running_loop().time()
        text = f"the head at {self.endpoint} is being restarted; calls between workers go on, launches wait for it"
        self._say(self._backoff.failed(now, text))

    def _reconnected(self) -> None:
        if self._away:
            self._client.repeat_first()  # lost before it was answered
        else:
            self._greet_again()

    def _greet_again(self) -> None:
        """Register with the head again, and hold requests back until the head has accepted this process.

        Called if the head does not know this process, or if messages to the head or from the head may be lost.
        """
        if self._beats is None:
            self._client.repeat_first()  # lost before it was answered
        elif not self._away:
            self._client.hold()
            self._greeting = self._tasks.start(
                self._again(), "saying hello to the head again", failed=self._task_failed
            )

    async def _again(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                timeout = self._backoff.attempt_timeout(self._detector.lease_s)
                await self._greet(timeout, self._head_slow)
                break
            except RlinfActorsError as error:
                if self._closed:
                    return
                if isinstance(error, NodeLostError):
                    self._on_given_up(str(error))
                    return
                if not isinstance(error, (ClusterTimeoutError, AuthenticationError, ProtocolMismatchError)):
                    self._on_silence(str(error))  # the head is there and does not take this process back
                    return
                # the head is away, or does not know this worker's agent yet, or is of a version that may be replaced
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
        self._on_return()  # first: a launch that waits may need the name of a group that has ended here
        self._client.resume()

    def _say(self, text: str) -> None:
        if text:  # at WARNING the lines of all workers would repeat each other
            log.log(logging.WARNING if self._hello.role == "driver" else logging.INFO, "%s", text)


class WatchedClients:
    """Calls back when a driver or worker of the job ends, which the head reports. Loop thread.

    Args:
        notify: sends the head a message that needs no answer.
    """

    def __init__(self, notify: Callable[[Body], None]) -> None:
        self._notify = notify
        self._watched: dict[str, list[Callable[[], None]]] = {}

    def watch(self, incarnation: str, on_gone: Callable[[], None]) -> Callable[[], None]:
        """Ask the head to report the end of a driver or worker, and then call *on_gone*.

        If the client has ended already, *on_gone* is called when the head has said so.

        Args:
            incarnation: incarnation of the driver's or worker's process.
            on_gone: called once, after the end.

        Returns:
            A function that cancels the watch.
        """
        known = self._watched.setdefault(incarnation, [])
        known.append(on_gone)
        if len(known) == 1:
            self._notify(WatchClients([incarnation]))

        def unwatch() -> None:
            if on_gone in known:
                known.remove(on_gone)
            if not known and self._watched.get(incarnation) is known:
                del self._watched[incarnation]

        return unwatch

    def renew(self) -> None:
        """Ask a restarted head to report the ends of all watched clients too."""
        watched = list(self._watched)
        for start in range(0, len(watched), WATCHED_AT_ONCE):
            self._notify(WatchClients(watched[start : start + WATCHED_AT_ONCE]))

    def gone(self, incarnation: str) -> None:
        """Call all callbacks that wait for the end of this client. Called when the head has reported the end."""
        call_all(self._watched.pop(incarnation, ()))
