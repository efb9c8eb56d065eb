"""The guard of a robot worker: the thread that makes the worker's robots safe when its lease ends.

`worker.main` makes the guard on the main thread, before any user code runs. Above the worker is its watchdog
(template.watchdog), which ends the worker if the guard cannot run.

House rules:
* The guard decides by itself, from the last deadline that it received: a robot stops even if no process can reach the
  guard.
* The guard reads the clock before queued packets, so that packets that arrived while this process stood still cannot
  renew a lease that has ended.
* on_lease_lost runs once, or not at all if `_close` has returned. The process ends after it.
* The guard takes no lock that a user's thread may hold, since the guard stops those threads.
* Nothing may prevent on_lease_lost. Its thread is made at the start, since the process may be able to make none at the
  end. A step before it that fails is skipped, and told afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import inspect
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgspec

from rlinf_actors import forks, procfs
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.exhaustion import OwnThread
from rlinf_actors.exit_codes import LEASE_LOST
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.wire.values import WorkerSpec
from rlinf_actors.worker.leasepage import END_MARGIN, Alarm, Lease, LeasePage, LeasePageWriter, lost, suspended
from rlinf_actors.worker.standstill import SIGNAL, ThreadStopper, release_conditions, waits_for_lock

T = TypeVar("T")

ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a process. A robot worker makes its robots safe before it ends."""
UNWIND_S = 0.25
"""Seconds that on_lease_lost may wait for a lock. Then the held threads are ended, to release their locks."""
GUARD_S = 0.15
"""Least seconds that the guard has to say that it is at work, before the watchdog kills the worker."""
HELD_S = 0.3
"""Most seconds from the end of the lease until on_lease_lost begins, whether the watchdog answers or not."""
F_SETPIPE_SZ = 1031  # linux/fcntl.h
ROOM_BYTES = 1 << 20
"""Size of the pipes of stdout and stderr while on_lease_lost runs; 64 KiB before."""
DONE_S = 0.1
"""Most seconds to wait for the watchdog at the end."""


class Guarded(msgspec.Struct):
    """What a robot worker has from its watchdog.

    Attributes:
        page: the lease page. The guard may only lose it.
        socket: descriptor of the connection to the watchdog.
        stopper: descriptor of the connection to the stopper; -1 if the class has no stop_hardware.
    """

    page: LeasePageWriter
    socket: int
    stopper: int = -1


class Guard:
    """Watches the lease of one robot worker, and makes its robots safe when the lease ends.

    Construct it on the main thread before any user code runs. *instance* returns the instance of the user's class, None
    while there is none.
    """

    def __init__(
        self, spec: WorkerSpec, place: packets.WorkerPlace, guarded: Guarded, instance: Callable[[], Any]
    ) -> None:
        self._spec = spec
        self._page = guarded.page
        # 0: an order has ended it, which waits to be read
        last_moment = self.page.deadline_ns / 1e9 or time.monotonic() + place.lease_s
        self._lease = Lease(last_moment + END_MARGIN * place.lease_s + suspended(), place.lease_s)
        self._timer = Alarm()
        self._watchdog = socket.socket(fileno=guarded.socket)
        self._instance = instance
        self._closed = False
        self._asked: list[str] = []
        self._threads = ThreadStopper()
        self._failed: list[str] = []  # steps of this guard
        self._hook_due, self._hook_done = allocate_lock(), allocate_lock()
        for lock in (self._hook_due, self._hook_done):
            lock.acquire()
        release_conditions()
        self._wakeup, signals = socket.socketpair()
        for end in (self._wakeup, signals):
            end.setblocking(False)
        self._signals = signals
        for number in ENDINGS:
            signal.signal(number, self._on_ending)
        signal.signal(signal.SIGCONT, self._on_continued)
        # this wakes the guard also while the main thread is in C
        signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
        forks.handled_in_parent([*ENDINGS, signal.SIGCONT], self._forget)
        self._send(packets.Renewed(spec.id, self._lease.until - suspended()))
        self._hook = threading.Thread(target=self._call_hook, name="rlinf-actors-on-lease-lost", daemon=True)
        self._hook.start()
        self._threads.spared.append(self._hook)
        OwnThread(target=self._run, name="rlinf-actors-guard", daemon=True).start()

    @property
    def page(self) -> LeasePage:
        return self._page.page

    def keep(self, pid: int) -> str:
        """Let a process and its descendants run while on_lease_lost runs.

        Return "", or the reason why that is impossible.
        """
        found = above = procfs.stat(pid)
        if found is None or found.ended:
            return "there is no such process"
        tops = (os.getpid(), os.getppid())  # orphans are the watchdog's
        while above is not None and above.parent not in (0, *tops):
            above = procfs.stat(above.parent)
        if above is None or not above.parent or pid in tops:  # it would be killed after on_lease_lost
            return "this worker did not start it"
        self._send(packets.Keep(pid, found.started))
        return ""

    def keep_thread(self, thread: threading.Thread) -> str:
        """Do not hold a thread while on_lease_lost runs. Return "", or the reason why that is impossible."""
        if not thread.is_alive():
            return "it does not run"
        if thread is threading.main_thread():
            return "the main thread runs the calls of this worker"
        self._threads.spared.append(thread)
        return ""

    def closed(self) -> None:
        """Note that `_close` of the instance has returned, so that on_lease_lost does not run. Any thread."""
        self._closed = True
        self._send(packets.Closed())

    def lose(self, reason: str) -> None:
        """End the lease at once, so that the guard makes the robots safe. Any thread; does not wait.

        *reason* is the text that the report about the end gives.
        """
        self._asked.append(reason)
        with contextlib.suppress(BlockingIOError):  # full: the guard is awake
            self._signals.send(b"\0")

    def stay(self) -> NoReturn:
        """End the lease, because the calling thread can run no more calls.

        Block until the guard ends the process.
        """
        self.lose(f"its thread {threading.current_thread().name}, which served calls, ended")
        while True:
            with contextlib.suppress(BaseException):
                self._threads.stop_here()
            threading.Event().wait()

    def _on_ending(self, number: int, _: object) -> None:
        self.lose(f"it was sent {signal.Signals(number).name}")

    def _on_continued(self, *_: object) -> None:
        """Handle SIGCONT on the main thread.

        If the lease ended while the process was stopped, stop the main thread at once.
        """
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._lease.lost(now):
            self.lose(self._lease.stood_still(now))
            self._threads.handler(SIGNAL, None)

    def _forget(self) -> None:
        """Restore the default signal handlers in a process that the worker has forked. Called there after each fork.

        The child closes its end of the connection to the watchdog, which notices by it that the worker was replaced.
        """
        self._watchdog.close()
        signal.set_wakeup_fd(-1)
        ours: list[tuple[int, object]] = [(number, self._on_ending) for number in ENDINGS]
        for number, handler in [*ours, (signal.SIGCONT, self._on_continued), (SIGNAL, self._threads.handler)]:
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    # --- the guard's thread ---

    def _run(self) -> None:
        try:
            try:
                reason = self._wait()
            except Exception:  # noqa: BLE001 - an internal error: the robots are not guarded any more
                reason = lost(self._spec.claims, f"its guard failed\n{traceback.format_exc()}")
            held_by = time.monotonic() + HELD_S
            if not self._closed:
                self._threads.interrupt()  # first: a C loop that sees the lost page must not continue in Python
            self._page.lose()
            self._send(packets.LeaseLost(self._spec.id, reason[: packets.TEXT_CHARS]))
            if not self._closed:
                self._make_safe(held_by)
                say(f"[rlinf-actors] {self._spec.group}:{self._spec.rank}: {reason}\n")
        finally:
            os._exit(LEASE_LOST)

    def _wait(self) -> str:
        """Wait for the end of the lease. Return why it has ended, as text for people."""
        poll = select.poll()
        for fd in (self._watchdog.fileno(), self._wakeup.fileno(), self._timer.fd):
            poll.register(fd, select.POLLIN)
        while True:
            self._timer.set(self._lease.end - time.clock_gettime(time.CLOCK_BOOTTIME))
            ready = {fd for fd, _ in poll.poll()} - {self._timer.fd}
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            if self._lease.lost(now):  # before queued packets are read: these renew nothing any more
                return lost(self._spec.claims, self._asked[0] if self._asked else self._lease.stood_still(now))
            if not ready and now >= self._lease.end:
                return lost(self._spec.claims, self._lease.no_word(now))
            for fd in ready:
                if fd == self._watchdog.fileno():
                    if text := self._heard():
                        return text
                elif reason := self._woken():
                    return lost(self._spec.claims, reason)

    def _heard(self) -> str:
        """Receive one packet of the watchdog and handle it. Return why the lease has ended, "" if it has not."""
        packet = self._receive()
        if packet is None:
            return lost(self._spec.claims, "its watchdog ended")
        if isinstance(packet, packets.Revoke):
            return packet.reason
        if isinstance(packet, packets.Renew):
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            if self._lease.lost(now):  # this process was stopped after it read the clock
                return lost(self._spec.claims, self._lease.stood_still(now))
            self._lease.renew(packet.until + suspended())
            self._send(packets.Renewed(self._spec.id, packet.until))
        return ""

    def _receive(self) -> packets.ToWorker | None:
        """Return the next packet of the watchdog; None if it has ended."""
        try:
            data = self._watchdog.recv(packets.MAX_PACKET >> 4)
        except OSError:
            data = b""
        return packets.decode_to_worker(data) if data else None

    def _send(self, packet: packets.ToWatchdog) -> None:
        with contextlib.suppress(OSError):  # it has ended, or user code has closed the connection
            self._watchdog.send(packets.encode(packet), socket.MSG_DONTWAIT)

    def _woken(self) -> str:
        signals = self._wakeup.recv(4096)
        if self._asked:
            return self._asked[0]
        return next((f"it was sent {number.name}" for number in ENDINGS if number in signals), "")

    def _make_safe(self, held_by: float) -> None:
        if self._instance() is None:
            return
        if self._try_to(self._threads.stop_all) is False:
            self._failed.append("the main thread is in C code that does not return; on_lease_lost runs beside it")
        self._try_to(lambda: self._ask_watchdog(packets.Held(), held_by))
        self._try_to(_make_room)
        end = time.monotonic() + packets.ON_LEASE_LOST_S
        self._hook_due.release()
        done = unwound = False
        while not done and time.monotonic() < end:
            done = self._hook_done.acquire(timeout=min(UNWIND_S, max(0.0, end - time.monotonic())))
            if not done and not unwound and self._try_to(lambda: waits_for_lock(self._hook.native_id or 0)):
                self._threads.unwind()
                unwound = True
        if not done:
            self._failed.append(f"on_lease_lost did not return within {packets.ON_LEASE_LOST_S:g} s")
        self._try_to(lambda: self._ask_watchdog(packets.Held(done=True), time.monotonic() + DONE_S))
        for text in self._failed:
            say(f"[rlinf-actors] {text}\n")

    def _try_to(self, step: Callable[[], T]) -> T | None:
        """Return the result of *step*; if it fails, note that and return None: the robot must be made safe anyway."""
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - threads, memory, signals or descriptors may be used up
            self._failed.append(f"a step before on_lease_lost failed, and was skipped: {error!r}")
            return None

    def _ask_watchdog(self, packet: packets.Held, until: float) -> None:
        """Let the watchdog stop or kill the processes that this worker started. Wait for its answer until *until*."""
        self._send(packet)
        poll = select.poll()
        with contextlib.suppress(RemoteWireError, ValueError):  # user code has closed the connection
            poll.register(self._watchdog, select.POLLIN)
            while poll.poll(max(0.0, until - time.monotonic()) * 1000):
                if self._receive() in (packet, None):
                    return

    def _call_hook(self) -> None:
        """Wait until `_make_safe` has stopped user code, then call on_lease_lost.

        Runs on a thread made by the constructor.
        """
        self._hook_due.acquire()
        try:
            made = self._instance().on_lease_lost()
            if inspect.iscoroutine(made):  # of a plain def that returned what it called
                asyncio.run(made)
            elif inspect.isgenerator(made):
                for _ in made:
                    continue
        except BaseException:  # noqa: BLE001 - no caller; the process ends next
            say(traceback.format_exc())
        self._hook_done.release()


def _make_room() -> None:
    """Let on_lease_lost print although nobody reads the output, or a thread that is held has the lock of a stream."""
    sys.stdout, sys.stderr = (
        open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for fd in (1, 2)
    )
    for fd in (1, 2):
        with contextlib.suppress(OSError):  # no pipe, or pipes of this user have no more memory
            fcntl.fcntl(fd, F_SETPIPE_SZ, ROOM_BYTES)


def say(text: str) -> None:
    """Write *text* to stderr without blocking, and without the buffer, whose lock a stopped thread may hold."""
    data = text.encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and poll.poll(0):
            data = data[os.write(2, data[: select.PIPE_BUF]) :]
