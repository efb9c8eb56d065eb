"""Executors run the calls of a worker. Code of the user never runs on the I/O thread.

* A class without ``async def`` runs its calls one at a time, in order of arrival, on the main thread, where robot SDKs
  and CUDA expect to be called; with ``max_concurrency``, on that many threads.
* A class with any ``async def`` runs everything on one event loop of the main thread, so its state needs no lock.
* Methods marked ``@Worker.concurrent`` have threads of their own in both cases.

The server submits calls, on the I/O thread or on a thread of an executor, which reads the sockets itself while it is
idle (`net.reading`): a call then passes no other thread. `worker.main` chooses the executor and gives it the main
thread.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import inspect
import os
import queue
import select
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rlinf_actors import exhaustion, forks
from rlinf_actors.errors import UsageError
from rlinf_actors.net import reading
from rlinf_actors.net.loop import call_soon, new_event_loop
from rlinf_actors.net.loop_reader import LoopReader
from rlinf_actors.net.reading_queues import WaitingQueue
from rlinf_actors.worker.invocation import Invocation, own_steps
from rlinf_actors.worker.standstill import Unwound

STOPPED = (
    "user code stopped the event loop that runs this worker's calls, by loop.stop(), while {} was under way: no call "
    "can be served any more. Return from the method, or cancel tasks of your own, instead"
)
CONSTRUCTOR = "the constructor (or on_restart)"


class Activity(NamedTuple):
    """What a worker is doing, for agentd and for callers that ask: its longest-running call, and how many calls wait.

    `method` is "" while no call runs. `since` is the start of the call, in seconds of CLOCK_MONOTONIC.
    """

    method: str = ""
    since: float = 0.0
    waiting: int = 0


def _longest(running: Iterable[Invocation | None], waiting: int) -> Activity:
    began = [(one.began, one.method) for one in running if one is not None and one.began]
    since, method = min(began, default=(0.0, ""))
    return Activity(method, since, waiting)


class Executor(Protocol):
    def submit(self, invocation: Invocation) -> None:
        """Queue a call to run when its turn comes. Any thread, one at a time."""

    def submit_all(self, invocations: Sequence[Invocation]) -> None:
        """Queue several calls of one method, in order."""

    def waiting(self) -> int:
        """Return the number of queued calls. Any thread."""

    def begin(self, make: Callable[[], Any]) -> Any:
        """Call *make*, await the result if it is a coroutine, and return the result. Main thread, before `serve`.

        *make* constructs the user's instance, or runs its `on_restart`.
        """

    def serve(self, instance: Any) -> None:
        """Run the queued calls on *instance*, on the main thread.

        Return only if user code has stopped the event loop.
        """

    def activity(self) -> Activity:
        """Return the longest-running call and the number of waiting calls. Any thread; takes no lock."""


def uses_event_loop(cls: type, base: type) -> bool:
    """Return True if *cls* has an ``async def`` method that it does not inherit from *base*."""
    for klass in cls.__mro__:
        if klass in base.__mro__:
            continue
        for member in vars(klass).values():
            plain = getattr(member, "__func__", member)  # of a static or class method
            function = inspect.unwrap(plain) if callable(plain) else plain
            if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                return True
    return False


class SerialExecutor:
    """Runs one call at a time, in order of arrival, on the main thread."""

    def __init__(self) -> None:
        active = reading.active
        # SimpleQueue has no lock that a stopped thread of a robot worker could keep
        self._queue: queue.SimpleQueue[Invocation] | WaitingQueue[Invocation] = (
            queue.SimpleQueue() if active is None else WaitingQueue(active)
        )
        self._running: list[list[Invocation | None]] = []  # a slot for each thread, which alone writes it
        self.submit: Callable[[Invocation], None] = self._queue.put
        self.waiting: Callable[[], int] = self._queue.qsize

    def submit_all(self, invocations: Sequence[Invocation]) -> None:
        if isinstance(self._queue, WaitingQueue):
            self._queue.put(*invocations)
        else:
            for invocation in invocations:
                self._queue.put(invocation)

    def begin(self, make: Callable[[], Any]) -> Any:
        return forks.guarded(CONSTRUCTOR, make)

    def serve(self, instance: Any) -> None:
        get = self._queue.get
        slot: list[Invocation | None] = [None]
        self._running.append(slot)
        while True:
            invocation = slot[0] = get()
            invocation.run(instance)
            del invocation
            slot[0] = None

    def activity(self) -> Activity:
        return _longest([slot[0] for slot in self._running], self.waiting())


class ThreadsExecutor(SerialExecutor):
    """Runs up to *threads* calls at a time, each on a thread of its own.

    After an internal error in one of these threads, the executor calls *failed*, which ends the process.
    """

    def __init__(self, threads: int, failed: Callable[[], object]) -> None:
        super().__init__()
        self._threads = threads
        self._failed = failed

    def serve(self, instance: Any) -> None:
        all_there = threading.Barrier(self._threads)  # no call starts before all threads run

        def serve() -> None:
            all_there.wait()
            SerialExecutor.serve(self, instance)

        for n in range(self._threads - 1):
            _start_serving(serve, f"worker-call-{n + 1}", self._failed)
        serve()


def _start_serving(serve: Callable[[], object], name: str, failed: Callable[[], object]) -> None:
    """Run *serve* on a new thread. If *serve* raises, call *failed*, which ends the process."""

    def run() -> None:
        try:
            serve()
        except Unwound:
            raise
        except BaseException:  # noqa: BLE001 - an internal error: errors of user code are answers
            failed()

    exhaustion.start(threading.Thread(target=run, name=name, daemon=True))


class BesideExecutor:
    """Runs the calls of some methods on threads of their own, and passes all other calls to *main*.

    *threads* has the names of these methods, each with its number of threads. After an internal error in one of
    these threads, the executor calls *failed*, which ends the process.
    """

    def __init__(self, main: Executor, threads: Mapping[str, int], failed: Callable[[], object]) -> None:
        self.main = main
        self._threads = threads
        self._failed = failed
        self._beside = {method: SerialExecutor() for method in threads}

    def submit(self, invocation: Invocation) -> None:
        self._beside.get(invocation.method, self.main).submit(invocation)

    def submit_all(self, invocations: Sequence[Invocation]) -> None:
        self._beside.get(invocations[0].method, self.main).submit_all(invocations)

    def waiting(self) -> int:
        return self.main.waiting() + sum(beside.waiting() for beside in self._beside.values())

    def begin(self, make: Callable[[], Any]) -> Any:
        return self.main.begin(make)

    def serve(self, instance: Any) -> None:
        for method, beside in self._beside.items():
            for n in range(self._threads[method]):
                _start_serving(functools.partial(beside.serve, instance), f"worker-{method}-{n + 1}", self._failed)
        self.main.serve(instance)

    def activity(self) -> Activity:
        """Return the call that *main* runs, and the number of all waiting calls.

        If *main* runs no call, return the longest-running call of the other threads.
        """
        main, *others = [executor.activity() for executor in (self.main, *self._beside.values())]
        since, method = min(((doing.since, doing.method) for doing in others if doing.method), default=(0.0, ""))
        waiting = main.waiting + sum(doing.waiting for doing in others)
        return main._replace(waiting=waiting) if main.method else Activity(method, since, waiting)


class LoopExecutor:
    """Runs all calls on one event loop of the main thread. Calls start in order and overlap where they await.

    At most *limit* coroutines run at a time, 0 for any number. Whenever the loop begins to run, it calls
    *on_loop_start* (`OrderlyExit.take_wakeup_fd`).
    """

    def __init__(self, limit: int = 0, on_loop_start: Callable[[], object] = lambda: None) -> None:
        self._queue: collections.deque[Invocation] = collections.deque()
        self.waiting: Callable[[], int] = self._queue.__len__
        self._loop = new_event_loop()
        self._due = threading.Lock()
        self._limit = limit
        self._running: dict[asyncio.Task[None], Invocation] = {}
        self._plain: Invocation | None = None
        self._instance: Any = None
        self._thread = 0
        self._on_loop_start = on_loop_start
        self._made_in = forks.generation
        self._loop.call_soon(on_loop_start)
        forks.watch(self)

    def submit(self, invocation: Invocation) -> None:
        self._queue.append(invocation)
        if self._due.acquire(blocking=False):  # one wake-up for all calls that arrive before it is served
            call_soon(self._loop, self._pump)

    def submit_all(self, invocations: Sequence[Invocation]) -> None:
        self._queue.extend(invocations)
        if self._due.acquire(blocking=False):
            call_soon(self._loop, self._pump)

    def serve(self, instance: Any) -> None:
        self._instance = instance
        asyncio.set_event_loop(self._loop)
        self._thread = threading.get_ident()
        self._loop.call_soon(self._read)
        forks.guarded("a task or callback of user code", self._loop.run_forever)

    def _read(self) -> None:
        """Let the loop read the calls itself."""
        reader = LoopReader.of(self._loop)  # None if the I/O thread alone reads
        if reader is not None:
            reader.awaited += 1

    def note_fork(self) -> None:
        """Stop the event loop in a process that user code has just forked, before the loop's next turn.

        uvloop polls once more before it stops. The forked process shares the loop's epoll descriptor with its parent.
        So this poll would take a wake-up from the parent, and a call in the parent would wait for ever. This method
        therefore replaces the descriptor by an empty epoll first.
        """
        if threading.get_ident() == self._thread and self._loop.is_running():
            self._loop.stop()
            polled_by: Callable[[], int] | None = getattr(self._loop, "_get_backend_id", None)  # uvloop's alone
            if polled_by is not None:
                with select.epoll() as none:
                    os.dup2(none.fileno(), polled_by(), inheritable=False)

    def begin(self, make: Callable[[], Any]) -> Any:
        """Call *make* inside the running event loop, and return its result.

        A user's constructor may create tasks and futures there.
        """

        async def call() -> Any:
            made = make()
            return await made if inspect.iscoroutine(made) else made

        async def guarded() -> Any:
            return await own_steps(call(), CONSTRUCTOR)

        asyncio.set_event_loop(self._loop)
        self._thread = threading.get_ident()
        task = self._loop.create_task(guarded(), name=CONSTRUCTOR)
        try:
            return self._loop.run_until_complete(task)
        except RuntimeError:
            if task.done():
                raise
            raise UsageError(STOPPED.format(CONSTRUCTOR)) from None
        finally:
            self._loop.call_soon(self._on_loop_start)  # before calls arrive

    def _pump(self) -> None:
        if forks.generation != self._made_in:
            return  # a forked child: the calls are the parent's
        self._due.release()
        began = False  # a coroutine of this batch has not taken its first step: no call may overtake it
        while self._queue and not (self._limit and len(self._running) >= self._limit):
            invocation = self._queue.popleft()
            if invocation.cancelled:
                continue
            if not began and self._is_plain(invocation):
                self._plain = invocation
                invocation.run(self._instance)
                self._plain = None
                continue
            task = self._loop.create_task(invocation.run_async(self._instance), name=invocation.method)
            began = True
            self._running[task] = invocation
            invocation.stop = lambda task=task: call_soon(self._loop, task.cancel)
            if invocation.cancelled:  # since the check above
                task.cancel()
            task.add_done_callback(self._ended)

    def activity(self) -> Activity:
        running = self._running.copy()  # atomic: the thread of the loop goes on
        return _longest([self._plain, *running.values()], len(self._queue))

    def _is_plain(self, invocation: Invocation) -> bool:
        if invocation.window:
            return False
        function = inspect.unwrap(getattr(type(self._instance), invocation.method, None) or (lambda: None))
        return not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]  # an internal error: run_async answers for all others
        if self._limit and self._queue and self._due.acquire(blocking=False):
            self._loop.call_soon(self._pump)
