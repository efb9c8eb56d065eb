"""Thousands of schedules of the threads that read the data sockets (`net.reading`): none loses a wake-up.

The code itself runs, one thread at a time: before each of its lines the schedule may let another thread run. The two
epolls are modelled (`Kernel`), with the order in which Linux asks them.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pace
import pytest

from rlinf_actors.net import reading, reading_queues
from rlinf_actors.net.reading_queues import WaitingQueue
from rlinf_actors.runtime import future
from rlinf_actors.runtime.future import Promise

pytestmark = pytest.mark.model

TRACED = {reading.__file__, reading_queues.__file__, future.__file__}
BELL = -1
SCHEDULES = 50 * pace.rounds


class Schedule:
    """Runs functions as threads, one at a time, in a random order that *seed* determines."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._threads: list[threading.Thread] = []
        self._go: list[threading.Semaphore] = []
        self._until: list[Callable[[], object] | None] = []
        self._ended: list[bool] = []
        self._errors: list[BaseException] = []
        self._control = threading.Semaphore(0)
        self._now = -1

    def add(self, function: Callable[[], object]) -> None:
        me = len(self._threads)

        def run() -> None:
            self._go[me].acquire()
            sys.settrace(self._trace)
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                self._errors.append(error)
            sys.settrace(None)
            self._ended[me] = True
            self._control.release()

        self._go.append(threading.Semaphore(0))
        self._until.append(None)
        self._ended.append(False)
        self._threads.append(threading.Thread(target=run, daemon=True))

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            self.block(None)
        return self._trace

    def block(self, until: Callable[[], object] | None) -> None:
        """Let others run; go on when *until* is true."""
        me = self._now
        self._until[me] = until
        self._control.release()
        self._go[me].acquire()

    def pause(self) -> None:
        """Let others run for a while."""
        for _ in range(self._random.randrange(40)):
            self.block(None)

    def run(self) -> list[int]:
        """Run until no thread can go on. Return the numbers of those that have not ended."""
        for thread in self._threads:
            thread.start()
        while True:
            can = [n for n, until in enumerate(self._until) if not self._ended[n] and (until is None or until())]
            if not can or self._errors:
                break
            if self._now not in can or self._random.random() < 0.3:
                self._now = self._random.choice(can)
            self._go[self._now].release()
            self._control.acquire()
        if self._errors:
            raise self._errors[0]
        return [n for n, ended in enumerate(self._ended) if not ended]


class Gate:
    """A lock that blocks in the schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._held and not blocking:
            return False
        while self._held:
            self._schedule.block(lambda: not self._held)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Kernel:
    """The sockets and the two epolls. Each edge goes to W if a thread polls it, else to both."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.arrived: dict[int, list[int]] = {0: [], 1: []}
        self._w: set[int] = set()
        self._o: set[int] = set()
        self._polls = False
        self.callbacks: list[tuple[Any, ...]] = []
        self.over = False

    def arrive(self, fd: int, number: int) -> None:
        self.arrived[fd].append(number)
        self._w.add(fd)
        if self._polls:
            self._polls = False  # woken: a further edge finds no thread
        else:
            self._o.add(fd)

    def ring(self, fd: int, value: int) -> None:
        self._w.add(BELL)
        self._polls = False

    def _take(self, edges: set[int]) -> list[tuple[int, int]]:
        found = [(fd, 1) for fd in edges if fd == BELL or self.arrived[fd]]
        edges.clear()
        return found

    def poll_w(self, timeout: float, events: int) -> list[tuple[int, int]]:
        while True:
            found = self._take(self._w)
            if found:
                return found
            self._polls = True
            self._schedule.block(lambda: self._w)

    def poll(self, timeout: float, events: int) -> list[tuple[int, int]]:
        return self._take(self._o)

    # --- the I/O thread's loop ---

    def call_soon_threadsafe(self, function: Callable[..., object], *args: object) -> None:
        self.callbacks.append((function, *args))

    call_soon = call_soon_threadsafe

    def add_reader(self, *_: object) -> None: ...

    def run_loop(self, ready: Callable[[], object]) -> None:
        while True:
            self._schedule.block(lambda: self._o or self.callbacks or self.over)
            if self.callbacks:
                function, *args = self.callbacks.pop(0)
                function(*args)
            elif self._o:
                ready()
            else:
                return


class World:
    """A Reading whose sources resolve promises: message *n* resolves promise *n*."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, kind: type[reading.Reading]) -> None:
        self.schedule = Schedule(seed)
        self.kernel = Kernel(self.schedule)
        monkeypatch.setattr(reading, "active", None)
        self.reading = kind(self.kernel)  # type: ignore[arg-type]
        self.reading._poll = self.kernel.poll_w  # type: ignore[method-assign, assignment]
        self.reading._loops.close()
        self.reading._loops = self.kernel  # type: ignore[assignment]
        monkeypatch.setattr(reading.os, "eventfd_write", self.kernel.ring)
        clocked = type("threading", (), {"Lock": lambda: Gate(self.schedule), "TIMEOUT_MAX": 1e9})
        monkeypatch.setattr(future, "threading", clocked)
        self.seen: dict[int, list[int]] = {0: [], 1: []}
        self.promises: list[Promise[int]] = [Promise("it") for _ in range(4)]
        for fd in (0, 1):
            self.reading._sources[fd] = lambda on_loop, fd=fd: self._read(fd)
        self.schedule.add(lambda: self.kernel.run_loop(self.reading._loop_ready))
        self._running = 0

    def _read(self, fd: int) -> bool:
        if self.kernel.arrived[fd]:
            number = self.kernel.arrived[fd].pop(0)
            self.seen[fd].append(number)
            self.handle(number)
        return bool(self.kernel.arrived[fd])

    def handle(self, number: int) -> None:
        self.promises[number].resolve(number)

    def add(self, function: Callable[[], object]) -> None:
        def run() -> None:
            function()
            self._running -= 1
            self.kernel.over = not self._running

        self._running += 1
        self.schedule.add(run)

    def run(self) -> list[int]:
        """Run the schedule, and close what it leaves open. Return the numbers of the threads that have not ended."""
        try:
            return self.schedule.run()
        finally:
            self.reading._waiting.close()
            os.close(self.reading._bell)

    def check(self) -> None:
        assert not self.run()
        assert not any(self.kernel.arrived.values())
        assert not self.reading._handling.locked()
        assert not self.reading.taken


def _waiters(world: World) -> None:
    """Three threads wait for results: two come by the sockets, one from elsewhere; another thread only sends."""

    def arrivals() -> None:
        for fd, number in ((0, 0), (1, 3), (0, 1)):
            world.schedule.pause()
            world.kernel.arrive(fd, number)

    for n in range(3):
        world.add(lambda n=n: world.promises[n]._block_until_done(None))  # type: ignore[misc]
    world.add(arrivals)
    world.add(lambda: world.promises[2].resolve(2))


@pytest.mark.parametrize("block", range(4))
def test_no_schedule_loses_a_wake_up(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(block * SCHEDULES, (block + 1) * SCHEDULES):
        world = World(seed, monkeypatch, reading.Reading)
        _waiters(world)
        world.check()
        assert world.seen == {0: [0, 1], 1: [3]}, f"out of order with seed {seed}"


class Forgetful(reading.Reading):
    """Does not look again after it has handled messages."""

    pause: Callable[[], None]

    def _handle(self, events: Any, on_loop: bool) -> None:
        self._due.extend(self._sources[fd] for fd, _ in events if fd in self._sources)
        if self._handling.acquire(False):
            while self._due:
                source = self._due.popleft()
                if source(on_loop):
                    self._due.append(source)
            self.pause()  # so that others find the lock held
            self._handling.release()


class Silent(reading.Reading):
    """Rings for nobody while the loop handles messages."""

    def _ring(self) -> None:
        if not self._handling.locked():
            super()._ring()


@pytest.mark.parametrize("kind", [Forgetful, Silent])
def test_the_schedules_find_a_lost_wake_up(kind: type[reading.Reading], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(600):
        world = World(seed, monkeypatch, kind)
        monkeypatch.setattr(kind, "pause", lambda _, world=world: world.schedule.pause(), raising=False)
        _waiters(world)
        if world.run():
            return
    pytest.fail("not found")


@pytest.mark.parametrize("block", range(2))
def test_every_item_of_a_queue_finds_a_thread(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads serve calls; the first call ends only when the second has begun."""
    for seed in range(block * SCHEDULES, (block + 1) * SCHEDULES):
        world = World(seed, monkeypatch, reading.Reading)
        monkeypatch.setattr(WaitingQueue, "_gate", lambda self, world=world: _closed(world.schedule))
        queue: WaitingQueue[int] = WaitingQueue(world.reading)
        monkeypatch.setattr(world, "handle", queue.put)
        begun: set[int] = set()

        def serve(queue: WaitingQueue[int] = queue, world: World = world, begun: set[int] = begun) -> None:
            begun.add(queue.get())
            world.schedule.block(lambda: len(begun) == 2)

        def arrivals(world: World = world, fd: int = seed % 2) -> None:
            world.kernel.arrive(0, 0)
            world.schedule.pause()
            world.kernel.arrive(fd, 1)

        world.add(serve)
        world.add(serve)
        world.add(arrivals)
        world.check()


def _closed(schedule: Schedule) -> Gate:
    gate = Gate(schedule)
    gate.acquire()
    return gate
