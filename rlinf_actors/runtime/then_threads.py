"""ThenThreads: the threads that run the functions given to `AsyncWork.then`."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from rlinf_actors import exhaustion, forks

THEN_THREADS = 8
"""Maximum number of functions given to `AsyncWork.then` that run at a time in this process."""


class ThenThreads:
    """A pool of at most THEN_THREADS threads, which run the functions given to `AsyncWork.then`.

    A thread ends when no function is queued.
    """

    def __init__(self) -> None:
        self.note_fork()
        forks.watch(self)

    def note_fork(self) -> None:
        """Forget all threads and queued functions; called in a forked child, because the parent process runs them."""
        self._lock = threading.Lock()
        self._due: collections.deque[Callable[[], None]] = collections.deque()
        self._running = 0

    def submit(self, function: Callable[[], None]) -> None:
        """Run *function* on the next free thread of the pool. Raises RuntimeError if no thread can be started."""
        with self._lock:
            self._due.append(function)
            if self._running == THEN_THREADS:
                return
            self._running += 1
        try:
            exhaustion.start(threading.Thread(target=self._run, name="rlinf-actors-then", daemon=True))
        except RuntimeError:
            with self._lock:
                self._running -= 1
                if self._running or function not in self._due:
                    return  # a running thread takes it
                self._due.remove(function)
            raise

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._running -= 1
                    return
                function = self._due.popleft()
            function()


then_threads = ThenThreads()
"""The ThenThreads of this process."""
