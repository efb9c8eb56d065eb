"""device_lock in a worker: counting, waiting, giving up, and what was granted in the moment of giving up."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading

import pytest

from rlinf_actors import UsageError
from rlinf_actors.wire.template_protocol import DevicesBusy, DevicesLocked, LockDevices, UnlockDevices
from rlinf_actors.worker.device_lock import DeviceLock


class Agent:
    """What the worker says; `grant` answers as agentd would."""

    def __init__(self, devices: bool = True) -> None:
        self.said: queue.SimpleQueue[LockDevices | UnlockDevices] = queue.SimpleQueue()
        self.lock = DeviceLock("w", "g:0", devices, self.said.put, logging.getLogger("rlinf_actors.test"))

    def heard(self) -> LockDevices | UnlockDevices:
        return self.said.get(timeout=10)

    def grant(self, request: int) -> None:
        self.lock.granted(DevicesLocked("w", request))


def start(work):
    """*work* in a thread; the queue gets its result."""
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=lambda: done.put(work()), daemon=True).start()
    return done


def test_lock_is_requested_once_counted_and_released_once():
    agent = Agent()
    done = start(agent.lock.acquire)
    assert agent.heard() == LockDevices("w", 1)
    agent.grant(1)
    assert done.get(timeout=10) is True
    with agent.lock:
        assert start(agent.lock.acquire).get(timeout=10) is True
    agent.lock.release()
    assert agent.lock.locked()
    agent.lock.release()
    assert agent.heard() == UnlockDevices("w", 1)
    assert not agent.lock.locked()
    assert agent.said.empty()


def test_waiting_threads_share_one_request():
    agent = Agent()
    done = [start(agent.lock.acquire)]
    assert agent.heard() == LockDevices("w", 1)
    entered = threading.Barrier(3)

    def late():
        entered.wait(10)
        return agent.lock.acquire()

    done += [start(late), start(late)]
    entered.wait(10)
    agent.grant(1)
    for one in done:
        assert one.get(timeout=10) is True
    for _ in range(3):
        agent.lock.release()
    assert agent.heard() == UnlockDevices("w", 1)


def test_release_without_holding_is_an_error():
    agent = Agent()
    with pytest.raises(UsageError, match="g:0 released its device_lock without holding it"):
        agent.lock.release()
    assert agent.said.empty()


def test_abandoned_wait_leaves_the_queue_and_a_late_grant_is_ignored():
    agent = Agent()
    assert agent.lock.acquire(timeout=0.01) is False
    assert [agent.heard(), agent.heard()] == [LockDevices("w", 1), UnlockDevices("w", 1)]
    agent.grant(1)
    assert not agent.lock.locked()
    done = start(agent.lock.acquire)
    assert agent.heard() == LockDevices("w", 2)
    agent.grant(1)
    assert not agent.lock.locked()
    agent.grant(2)
    assert done.get(timeout=10) is True


def test_abandoned_wait_leaves_the_request_of_another_thread():
    agent = Agent()
    done = start(agent.lock.acquire)
    assert agent.heard() == LockDevices("w", 1)
    assert agent.lock.acquire(timeout=0.01) is False
    assert agent.said.empty()
    agent.grant(1)
    assert done.get(timeout=10) is True
    agent.lock.release()
    assert agent.heard() == UnlockDevices("w", 1)


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_must_be_above_zero(timeout):
    agent = Agent()
    with pytest.raises(ValueError, match="must be a number of seconds above 0"):
        agent.lock.acquire(timeout)
    assert agent.said.empty()


def test_worker_without_accelerators_requests_nothing_and_never_waits():
    agent = Agent(devices=False)
    with agent.lock, agent.lock:
        assert agent.lock.locked()
    assert agent.said.empty()
    with pytest.raises(UsageError):
        agent.lock.release()


def test_only_a_wait_that_goes_on_is_logged(caplog):
    agent = Agent()
    done = start(agent.lock.acquire)
    agent.heard()
    agent.lock.busy(DevicesBusy("w", 1, 30.0, "held by other:3 (job 'ns')"))
    agent.lock.busy(DevicesBusy("w", 1, 31.0, "held by other:3", ["other:3"], quiet=True))
    (waiting,) = agent.lock._waiting
    assert waiting._waited_for() == ("device_lock, held by other:3", ["other:3"])
    agent.grant(1)
    assert done.get(timeout=10) is True
    agent.lock.busy(DevicesBusy("w", 1, 30.0, "held by nobody"))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["g:0 has waited 30 s for its device_lock: its accelerators are held by other:3 (job 'ns')"]


# --- on an event loop ---


async def test_async_with_waits_without_blocking_the_loop():
    agent = Agent()

    async def use():
        async with agent.lock:
            return agent.lock.locked()

    using = asyncio.ensure_future(use())
    await asyncio.sleep(0)
    assert agent.heard() == LockDevices("w", 1)
    agent.grant(1)
    assert await using is True
    assert agent.heard() == UnlockDevices("w", 1)


async def test_an_async_wait_ends_at_its_time():
    agent = Agent()
    assert await agent.lock.acquire_async(timeout=0.01) is False
    assert [agent.heard(), agent.heard()] == [LockDevices("w", 1), UnlockDevices("w", 1)]


async def test_a_cancelled_wait_leaves_the_queue():
    agent = Agent()
    waiting = asyncio.ensure_future(agent.lock.acquire_async())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [agent.heard(), agent.heard()] == [LockDevices("w", 1), UnlockDevices("w", 1)]
    agent.grant(1)
    assert not agent.lock.locked()


async def test_lock_granted_during_a_cancellation_is_released():
    agent = Agent()
    waiting = asyncio.ensure_future(agent.lock.acquire_async())
    await asyncio.sleep(0)
    agent.grant(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [agent.heard(), agent.heard()] == [LockDevices("w", 1), UnlockDevices("w", 1)]
    assert not agent.lock.locked()
