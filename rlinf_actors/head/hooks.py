"""Hooks: a program that is run, and a web page that is posted to, for events such as deaths of workers.

Each hook has a thread and a bounded queue, so neither the head nor the other hook waits for it. A program is started by
its words, without a shell, as the head's user. It gets the event as JSON on stdin. When its time is over, or it has
ended, its process group is killed: so nothing is left of it. The page is posted to by a program too
(`head.post_event`). A failure is logged once, until a delivery succeeds; `rlinf-actors status` has the counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from rlinf_actors.errors import ConfigError
from rlinf_actors.head import post_event
from rlinf_actors.head.notify import Notify, check_url, read_secret
from rlinf_actors.net.loop import call_threadsafe
from rlinf_actors.plurals import counted
from rlinf_actors.settings import FOR_THE_UNIT_ALONE
from rlinf_actors.wire.event_values import ClusterEvent, event_dict
from rlinf_actors.wire.hook_values import HookState
from rlinf_actors.wire.protocol import printable

log = logging.getLogger(__name__)

WAITING = 1000
"""Most events that wait for a hook; further ones are counted and dropped."""
END_S = 2.0
"""Seconds that hooks have for the events that wait when the head ends."""
SAID_BYTES = 2000
"""Last bytes of a program's stderr that are shown when it fails."""
FAULT_CHARS = 500


class Hooks:
    """The hooks of a head. Loop thread only.

    Args:
        notify: the checked configuration.
        environ: the environment of this process; programs get it without the variables of systemd's units.
        loop: the head's loop.
        waiting: most events that wait for a hook.
    """

    def __init__(
        self,
        notify: Notify,
        environ: Mapping[str, str],
        loop: asyncio.AbstractEventLoop,
        waiting: int = WAITING,
    ) -> None:
        env = {name: value for name, value in environ.items() if name not in FOR_THE_UNIT_ALONE}
        self._kinds = frozenset(notify.kinds)
        self._hooks: list[_Hook] = []
        if notify.command:
            self._hooks.append(
                _Hook("command", notify.command, _plain, notify.timeout_s, env, loop, waiting),
            )
        if notify.webhook or notify.webhook_file:
            words = (sys.executable, "-I", post_event.__file__)
            packet = lambda event: _for_page(notify, event)  # noqa: E731
            self._hooks.append(_Hook("webhook", words, packet, notify.timeout_s, env, loop, waiting))

    def tell(self, event: ClusterEvent) -> None:
        """Pass an event to each hook, if it is of one of their kinds. Nothing waits."""
        if event.kind in self._kinds:
            for hook in self._hooks:
                hook.tell(event)

    def states(self) -> list[HookState]:
        return [hook.state for hook in self._hooks]

    def close(self) -> None:
        """Deliver the events that wait, for at most END_S, and end the threads and programs. May be called again."""
        for hook in self._hooks:
            hook.stop()
        for hook in self._hooks:
            hook.join()


def _plain(event: ClusterEvent) -> bytes:
    return json.dumps(event_dict(event)).encode()


def _for_page(notify: Notify, event: ClusterEvent) -> bytes:
    """Return the input of post_event. The files with secrets are read each time, so that they can be replaced."""
    url = notify.webhook
    if notify.webhook_file:
        url = read_secret(notify.webhook_file, "notify.webhook_file")
        check_url(url, "notify.webhook_file")
    token = read_secret(notify.token_file, "notify.token_file") if notify.token_file else ""
    asked = {"url": url, "token": token, "timeout_s": notify.timeout_s, "event": event_dict(event)}
    return json.dumps(asked).encode()


class _Hook:
    """One hook. Its thread runs one program at a time.

    Attributes:
        state: the counts, for people.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        packet: Callable[[ClusterEvent], bytes],
        timeout_s: float,
        env: Mapping[str, str],
        loop: asyncio.AbstractEventLoop,
        waiting: int,
    ) -> None:
        self.state = HookState(name)
        self._words = list(words)
        self._packet = packet
        self._timeout_s = timeout_s
        self._env = dict(env)
        self._loop = loop
        self._most = waiting
        self._queue: queue.SimpleQueue[ClusterEvent | None] = queue.SimpleQueue()
        self._ends_at: float | None = None  # of all programs, once the head ends
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._left = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"head-{name}", daemon=True)
        self._thread.start()

    def tell(self, event: ClusterEvent) -> None:
        if self.state.waiting >= self._most:
            if not self.state.dropped:
                text = "[notify] %s is too slow: %s for it. Further ones are dropped, and counted in status"
                log.error(text, self.state.name, counted(self.state.waiting, "event", "waits|wait"))
            self.state = replace(self.state, dropped=self.state.dropped + 1)
            return
        self.state = replace(self.state, waiting=self.state.waiting + 1)
        self._queue.put(event)

    def stop(self) -> None:
        if self._ends_at is None:
            self._ends_at = time.monotonic() + END_S
            self._queue.put(None)
            os.write(self._waker, b"x")

    def join(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.join()
            os.close(self._woken)
            os.close(self._waker)
            if self._left:
                left = counted(self._left, "event", "was|were")
                log.error("[notify] %s: the head ended before %s delivered", self.state.name, left)

    def _delivered(self, fault: str) -> None:
        """Count an event that was delivered, or not for the reason *fault*. Loop thread."""
        state = self.state
        if fault and not state.fault:
            log.error(
                "[notify] %s failed: %s. Further failures are counted in `rlinf-actors status`", state.name, fault
            )
        elif state.fault and not fault:
            missed = counted(state.failed + state.dropped, "event", "was|were")
            log.warning("[notify] %s works again; %s not delivered so far", state.name, missed)
        self.state = replace(
            state,
            sent=state.sent + (not fault),
            failed=state.failed + bool(fault),
            waiting=state.waiting - 1,
            fault=fault,
        )

    # --- its own thread ---

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            if self._ends_at is not None and time.monotonic() >= self._ends_at:
                self._left += 1
                continue
            try:
                fault = self._deliver(self._packet(event))
            except ConfigError as error:
                fault = str(error)
            except OSError as error:
                fault = f"the program cannot be started: {error.strerror or error}"
            call_threadsafe(self._loop, self._delivered, printable(fault, FAULT_CHARS))

    def _deliver(self, packet: bytes) -> str:
        """Run the program with *packet* as its stdin. Return "", or why it failed."""
        given = os.memfd_create("event", os.MFD_CLOEXEC)
        try:
            with open(given, "wb", closefd=False) as file:
                file.write(packet)
            os.lseek(given, 0, os.SEEK_SET)
            process = subprocess.Popen(
                self._words, stdin=given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=self._env, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(given)
        assert process.stderr is not None
        with process.stderr as stderr, _pidfd(process.pid) as ended:
            said, in_time = self._wait(stderr.fileno(), ended, time.monotonic() + self._timeout_s)
            with contextlib.suppress(ProcessLookupError):  # before `wait`: until then no other group has this number
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        if not in_time and self._ends_at is not None:
            self._left += 1
            return "the head ended, and killed it"
        if not in_time:
            return f"it took more than {self._timeout_s:g} s, and was killed"
        if code:
            how = f"it ended with signal {-code}" if code < 0 else f"it ended with code {code}"
            text = said.decode(errors="replace").strip()
            if code == post_event.FAILED and self._words[-1] == post_event.__file__:
                return text
            return f"{how}: {text}" if text else how
        return ""

    def _wait(self, stderr: int, ended: int, limit: float) -> tuple[bytes, bool]:
        """Wait until the program has ended. Return the last bytes of its stderr, and False if its time is over."""
        said = read = b""
        poll = select.poll()
        for fd in (stderr, ended, self._woken):
            poll.register(fd, select.POLLIN)
        while True:
            if self._ends_at is not None:
                limit = min(limit, self._ends_at)
                with contextlib.suppress(KeyError):
                    poll.unregister(self._woken)
            ready = [fd for fd, _ in poll.poll(max(0.0, limit - time.monotonic()) * 1000)]
            if stderr in ready:
                read = os.read(stderr, 65536)
                said = (said + read)[-SAID_BYTES:]
                if not read:
                    poll.unregister(stderr)
            if ended in ready and (stderr not in ready or not read):
                return said, True
            if time.monotonic() >= limit:
                return said, False


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)
