"""DeviceLock: the lock over a worker's accelerators, shared by all workers of its node. agentd grants it.

agentd's packets come by the I/O thread. The public methods run on any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from rlinf_actors.errors import CallTimeoutError, UsageError
from rlinf_actors.runtime.future import Promise
from rlinf_actors.wire import template_protocol as packets
from rlinf_actors.wire.protocol import deadline


class _Wait(Promise[None]):
    """The wait of one thread or task for the lock. The I/O thread ends it."""

    _by_loop = True

    def __init__(self, lock: DeviceLock) -> None:
        super().__init__("device_lock")
        self._device_lock = lock

    def _waited_for(self) -> tuple[str, Sequence[str]]:
        text, holders = self._device_lock._holders
        return f"device_lock, {text}" if text else "device_lock", holders


class DeviceLock:
    """Exclusive use of a worker's accelerators among the workers of its node.

    Workers of all groups and jobs compete, each for the accelerators that it was placed on, not for all that it sees.
    A worker that was placed on its node, not on accelerators, asks for all accelerators of the node. Use the lock as
    ``with`` or ``async with``, or by `acquire` and `release`. Workers get the lock in the order of their requests, each
    for all its accelerators at once.

    The process holds the lock. While it does, each `acquire` of any of its threads or tasks returns at once and counts
    up; after as many releases the lock is free. The end of the process frees the lock too. A worker whose
    accelerator_type is NO_ACCEL never waits.

    The lock is advisory: code that does not acquire it can use the device. Only workers of this agentd share it: not
    other programs, nor another cluster on this machine.
    """

    def __init__(
        self,
        worker_id: str,
        name: str,
        has_devices: bool,
        send: Callable[[packets.LockDevices | packets.UnlockDevices], None],
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
        self._waiting: set[_Wait] = set()
        self._holders: tuple[str, Sequence[str]] = ("", ())  # text, and names of workers of this job

    # --- for users ---

    def acquire(self, timeout: float | None = None) -> bool:
        """Acquire the lock. Blocks this thread; messages, heartbeats and other threads continue.

        On an event loop use ``async with`` or `acquire_async`, since this method blocks the loop. Acquiring a free lock
        takes a round trip to agentd, about 0.2 ms.

        Args:
            timeout: seconds to wait at most, None for no limit.

        Returns:
            True if the lock was acquired, False after *timeout*.

        Raises:
            ValueError: *timeout* is not above 0.
        """
        timeout = None if timeout is None else deadline(timeout)
        waiting = self._enter()
        if waiting is None:
            return True
        try:
            with contextlib.suppress(CallTimeoutError):
                waiting.wait(timeout)
        except BaseException:  # Ctrl-C, or an exception that another thread raises here
            self._abandon(waiting)
            raise
        return not self._give_up(waiting)

    async def acquire_async(self, timeout: float | None = None) -> bool:
        """Acquire the lock without blocking the event loop. Arguments, result and errors are those of `acquire`.

        If the wait is cancelled and the lock was granted meanwhile, the lock is released.
        """
        timeout = None if timeout is None else deadline(timeout)
        waiting = self._enter()
        if waiting is None:
            return True
        try:
            if timeout is None:
                await waiting
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(waiting, timeout)
        except BaseException:
            self._abandon(waiting)
            raise
        return not self._give_up(waiting)

    def release(self) -> None:
        """Undo one `acquire`. The last release frees the lock. Any thread; does not wait.

        Raises:
            UsageError: (a RuntimeError) this process does not hold the lock.
        """
        with self._mutex:
            if not self._count:
                raise UsageError(f"{self._name} released its device_lock without holding it: acquire() it first")
            self._count -= 1
            if not self._count:
                self._tell(packets.UnlockDevices(self._worker_id, self._request))

    def locked(self) -> bool:
        """True if this process holds the lock."""
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

    def granted(self, packet: packets.DevicesLocked) -> None:
        """Handle agentd's grant of the lock: wake all waiting threads and tasks, which then hold the lock.

        Runs on the I/O thread.
        """
        with self._mutex:
            if packet.request != self._request or not self._waiting:
                return  # all waits were given up meanwhile, and agentd knows
            waiting, self._waiting = self._waiting, set()
            self._count += len(waiting)
        for one in waiting:
            one.resolve(None)

    def busy(self, packet: packets.DevicesBusy) -> None:
        """Keep which workers hold the lock, as agentd says. Log them if this request has waited long.

        Runs on the I/O thread.
        """
        if packet.request != self._request or not self._waiting:
            return
        self._holders = packet.text, packet.holders
        if not packet.quiet:
            self._log.warning(
                "%s has waited %.0f s for its device_lock: its accelerators are %s",
                self._name,
                packet.waited_s,
                packet.text,
            )

    def _enter(self) -> _Wait | None:
        """Begin an `acquire`. Return None if the lock is held at once, else a future that is done at agentd's grant."""
        with self._mutex:
            if self._count or not self._has_devices:
                self._count += 1
                return None
            first = not self._waiting
            waiting = _Wait(self)
            self._waiting.add(waiting)
            if first:
                self._request += 1
                self._holders = "", ()
                self._tell(packets.LockDevices(self._worker_id, self._request))
            return waiting

    def _give_up(self, waiting: _Wait) -> bool:
        """Stop waiting for the lock. Return True, or False if the lock was granted already and must be released."""
        with self._mutex:
            if waiting not in self._waiting:
                return False
            self._waiting.remove(waiting)
            if not self._waiting:
                self._tell(packets.UnlockDevices(self._worker_id, self._request))
        return True

    def _abandon(self, waiting: _Wait) -> None:
        if not self._give_up(waiting):
            self.release()

    def _tell(self, packet: packets.LockDevices | packets.UnlockDevices) -> None:
        if self._has_devices:
            self._send(packet)
