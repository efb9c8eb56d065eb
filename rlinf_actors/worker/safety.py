"""A robot worker's guard: the thread that makes its robots safe when its lease is over.

House rules:
* It decides by itself, from the deadline it was given: nobody has to reach it for the robot to stop.
* on_lease_lost runs once, or not at all where `_close` ran to its end; the process ends after it.
* Nothing here takes a lock that the user's threads may hold: they are standing still.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rlinf_actors.wire import spawn
from rlinf_actors.wire.values import WorkerSpec
from rlinf_actors.worker.control import Control
from rlinf_actors.worker.lease import Lease
from rlinf_actors.worker.parking import OURS, SIGNAL, Parking, waits_for_lock

UNWIND_S = 0.25
"""When on_lease_lost has waited for a lock that long, in seconds, the threads that stand still give theirs back."""


class Guard:
    """Watches one worker's lease. Made on the main thread before anything of the user's runs.

    Args:
        spec: of the worker; it has claims.
        place: where it runs, and how long its lease lasts as far as known.
        control: the socket to its template. Received from by the guard alone.
        instance: the worker's instance, None as long as there is none.
    """

    def __init__(
        self, spec: WorkerSpec, place: spawn.WorkerPlace, control: Control, instance: Callable[[], Any]
    ) -> None:
        self._spec = spec
        self._lease = Lease(place.lease_until, place.lease_s)
        self._control = control
        self._instance = instance
        self._closed = False
        self._robots = ", ".join(claim.title for claim in spec.claims)
        self._asked: list[str] = []
        self._parking = Parking()
        self._wakeup, signals = socket.socketpair()
        for end in (self._wakeup, signals):
            end.setblocking(False)
        self._signals = signals
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)  # tells us also while the main thread is in C
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._run, name=f"{OURS}guard", daemon=True).start()

    def closed(self) -> None:
        """`_close` ran to its end: the robots are in their owner's order. Any thread."""
        self._closed = True

    def lose(self, reason: str) -> None:
        """End the lease from inside. Any thread; returns at once."""
        self._asked.append(reason)
        with contextlib.suppress(BlockingIOError):  # full: it is awake
            self._signals.send(b"\0")

    def stay(self) -> None:
        """The main thread has ended: nothing of the user's runs there any more; the guard ends the process."""
        self.lose("its main thread ended")
        while True:
            with contextlib.suppress(BaseException):
                self._parking.stay()
            threading.Event().wait()

    def _on_terminate(self, *_: object) -> None:
        self.lose("it was sent SIGTERM")

    def _forget(self) -> None:
        """In a child process that the worker forked: signals to it are none of the guard's business."""
        signal.set_wakeup_fd(-1)
        for number, handler in ((signal.SIGTERM, self._on_terminate), (SIGNAL, self._parking.handler)):
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.SIG_DFL)

    # --- the guard's thread ---

    def _run(self) -> None:
        try:
            try:
                reason = self._wait()
            except Exception:  # noqa: BLE001 - a bug of ours: nothing guards the robots any more
                reason = f"its guard failed\n{traceback.format_exc()}"
            self._control.try_send(spawn.LeaseLost(self._spec.id, reason))
            if not self._closed:
                self._make_safe()
                _say(f"[rlinf-actors] {self._spec.group}:{self._spec.rank}: {reason}\n")
        finally:
            os._exit(spawn.LEASE_LOST_CODE)

    def _wait(self) -> str:
        """Wait for the end of the lease; returns why it is over."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            left = self._lease.left(time.monotonic())
            ready = poll.poll(left * 1000)  # what was renewed while we stood still is read before time counts
            if not ready and not left:
                silent = self._lease.silence(time.monotonic())
                return f"the lease of {self._robots} was lost: no word from the head for {silent:.1f} s"
            for fd, _ in ready:
                reason = self._heard() if fd == self._control.fileno() else self._woken()
                if reason:
                    return f"the lease of {self._robots} was lost: {reason}"

    def _heard(self) -> str:
        """Take a packet of the template's; returns why the lease is over, "" if it is not."""
        packet = self._control.receive()
        if packet is None:
            return "its template process ended"
        if isinstance(packet, spawn.Revoke):
            return packet.reason
        if isinstance(packet, spawn.Renew):
            self._lease.renew(packet.until)
        else:
            self._control.hand_over(packet)
        return ""

    def _woken(self) -> str:
        signals = self._wakeup.recv(4096)
        if self._asked:
            return self._asked[0]
        return "it was sent SIGTERM" if signal.SIGTERM in signals else ""

    def _make_safe(self) -> None:
        instance = self._instance()
        if instance is None:
            return
        still = self._parking.park()
        if not still:
            _say("[rlinf-actors] the main thread is in C code that does not return; on_lease_lost runs beside it\n")
        thread = threading.Thread(target=_call, args=(instance,), name=f"{OURS}on-lease-lost", daemon=True)
        end = time.monotonic() + spawn.ON_LEASE_LOST_S
        thread.start()
        thread.join(UNWIND_S)
        if thread.is_alive() and waits_for_lock(thread.native_id or 0):
            self._parking.let_go()
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            _say(f"[rlinf-actors] on_lease_lost did not return within {spawn.ON_LEASE_LOST_S:g} s\n")


def _call(instance: Any) -> None:
    try:
        instance.on_lease_lost()
    except BaseException:  # noqa: BLE001 - there is no caller; the process ends next
        _say(traceback.format_exc())


def _say(text: str) -> None:
    """To stderr, past its buffer, whose lock a thread that stands still may hold; never waits for who reads it."""
    data = text.encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and poll.poll(0):
            data = data[os.write(2, data[: select.PIPE_BUF]) :]
