"""The lock over a worker's accelerators, shared by all workers of its node."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable

from rlinf_actors.errors import UsageError
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.protocol import deadline


class DeviceLock:
    """Exclusive use of a worker's accelerators, among all workers of the node that were placed on one of them.

    Groups and jobs do not matter, nor which accelerators a worker sees beside its own; a worker that was placed on
    its node rather than on accelerators asks for all of them. Use it as ``with`` or ``async with``, or by
    `acquire` and `release`. Workers get it in the order in which they ask, all their accelerators at once.

    The process holds it: while it does, further acquisitions, from any thread or task of it, count up and return
    at once, and it is free after as many releases. It is free too when the process ends, however it does.
    A worker without accelerators holds nothing and never waits. It keeps nobody from using the device who does
    not ask, and does not reach beyond one agentd: not to programs outside, nor to another cluster on this machine.

    Args:
        worker_id, name: the worker.
        has_devices: whether it has accelerators.
        send: to its agentd.
        log: for the one line that a wait of 30 s writes.
    """

    def __init__(
        self,
        worker_id: str,
        name: str,
        has_devices: bool,
        send: Callable[[template_protocol.LockDevices | template_protocol.UnlockDevices], None],
        log: logging.Logger,
    ) -> None:
        self._worker_id = worker_id
        self._name = name
        self._has_devices = has_devices
        self._send = send
        self._log = log
        self._mutex = threading.Lock()
        self._count = 0
        self._request = 0  # the number of the last one
        self._waiting: set[concurrent.futures.Future[None]] = set()

    # --- for users ---

    def acquire(self, timeout: float | None = None) -> bool:
        """Take the lock. Blocks this thread; messages, heartbeats and other threads go on.

        On an event loop use ``async with`` or `acquire_async`: this would block the loop.

        Args:
            timeout: seconds to wait at most, None for no limit. Agentd is asked, which takes some 0.2 ms.

        Returns:
            Whether it was taken; False when the time was over first.

        Raises:
            ValueError: *timeout* is not above 0.
        """
        timeout = None if timeout is None else deadline(timeout)
        waiting = self._enter()
        if waiting is None:
            return True
        try:
            concurrent.futures.wait([waiting], timeout)
        except BaseException:  # Ctrl-C, or an exception that another thread raises in this one
            self._abandon(waiting)
            raise
        return not self._give_up(waiting)

    async def acquire_async(self, timeout: float | None = None) -> bool:
        """Take the lock without blocking the event loop; see `acquire`.

        Cancelling gives up the wait; what was granted in that moment is given back.
        """
        timeout = None if timeout is None else deadline(timeout)
        waiting = self._enter()
        if waiting is None:
            return True
        try:
            await asyncio.wait([asyncio.wrap_future(waiting)], timeout=timeout)
        except BaseException:
            self._abandon(waiting)
            raise
        return not self._give_up(waiting)

    def release(self) -> None:
        """Give the lock back, or count down. Any thread; does not wait.

        Raises:
            UsageError: (a RuntimeError) this process does not hold it.
        """
        with self._mutex:
            if not self._count:
                raise UsageError(f"{self._name} released its device_lock without holding it: acquire() it first")
            self._count -= 1
            if not self._count:
                self._tell(template_protocol.UnlockDevices(self._worker_id, self._request))

    def locked(self) -> bool:
        """Whether this process holds it."""
        return self._count > 0

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    async def __aenter__(self) -> DeviceLock:
        await self.acquire_async()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.release()

    # --- what agentd says; I/O thread ---

    def granted(self, packet: template_protocol.DevicesLocked) -> None:
        """The accelerators are ours."""
        with self._mutex:
            if packet.request != self._request or not self._waiting:
                return  # everybody gave up meanwhile, and agentd was told
            waiting, self._waiting = self._waiting, set()
            self._count += len(waiting)
        for one in waiting:
            one.set_result(None)

    def busy(self, packet: template_protocol.DevicesBusy) -> None:
        """We have waited for long."""
        if packet.request == self._request and self._waiting:
            self._log.warning(
                "%s has waited %.0f s for its device_lock: its accelerators are %s",
                self._name,
                packet.waited_s,
                packet.text,
            )

    # --- inside ---

    def _enter(self) -> concurrent.futures.Future[None] | None:
        """None if the lock is ours already, else what will be done when it is."""
        with self._mutex:
            if self._count or not self._has_devices:
                self._count += 1
                return None
            first = not self._waiting
            waiting: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._waiting.add(waiting)
            if first:
                self._request += 1
                self._tell(template_protocol.LockDevices(self._worker_id, self._request))
            return waiting

    def _give_up(self, waiting: concurrent.futures.Future[None]) -> bool:
        """Leave the queue if we are still in it; returns whether we were."""
        with self._mutex:
            if waiting not in self._waiting:
                return False
            self._waiting.remove(waiting)
            if not self._waiting:
                self._tell(template_protocol.UnlockDevices(self._worker_id, self._request))
        waiting.cancel()
        return True

    def _abandon(self, waiting: concurrent.futures.Future[None]) -> None:
        if not self._give_up(waiting):
            self.release()

    def _tell(self, packet: template_protocol.LockDevices | template_protocol.UnlockDevices) -> None:
        if self._has_devices:
            self._send(packet)
