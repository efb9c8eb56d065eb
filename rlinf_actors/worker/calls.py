"""The calls to a worker: each runs at most once, and waits until the user's class is constructed.

`worker.worker_server` hands in what arrives, and sends the answers. The methods may be called on any thread that reads
(`net.reading`), one at a time, unless they say otherwise.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence

import msgspec

from rlinf_actors.worker.executors import Activity, Executor
from rlinf_actors.worker.invocation import Invocation

REMEMBERED = 1024
"""Number of recent calls that are remembered to drop duplicates, which only injected faults send. Takes 150 KiB."""

Key = tuple[bytes, int]
"""Identity of the link, and number of the call."""


class Waited(msgspec.Struct, frozen=True):
    """What has waited for the construction: calls, and questions whether the class is constructed."""

    calls: list[Invocation]
    questions: list[Key]


class Calls:
    """The calls that have arrived and have no answer yet.

    Attributes:
        executor: runs the calls; None until the class is constructed.
        failure: the error of the construction; None if it has not failed.
        lost: links whose connections were lost. Their calls come late: they have failed at the caller, which may have
            sent them again.
    """

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self.failure: BaseException | None = None
        self.lost: set[bytes] = set()
        self._all: dict[Key, Invocation] = {}
        self._newest: dict[bytes, int] = {}
        self._recent: collections.deque[Key] = collections.deque(maxlen=REMEMBERED)
        self._constructing = 0.0
        self._waiting: list[Invocation] = []
        self._questions: list[Key] = []
        self._lock = threading.Lock()  # between the main thread, which constructs, and those that read

    def __len__(self) -> int:
        return len(self._all)

    # --- the construction; main thread ---

    def constructing(self) -> None:
        """Note that the user's constructor begins now, so that `activity` reports it."""
        self._constructing = time.perf_counter()

    def activity(self) -> Activity:
        """Return the call that runs now. Its method is ``__init__`` while the class is constructed. Any thread."""
        if self.executor is not None:
            return self.executor.activity()
        return Activity("__init__" if self._constructing else "", self._constructing, len(self._waiting))

    def open(self, executor: Executor) -> list[Key]:
        """Submit the calls that have waited, and every later call, to *executor*. Return the questions that waited."""
        with self._lock:
            for invocation in self._waiting:
                executor.submit(invocation)
            self.executor = executor
            return self._waited().questions

    def refuse(self, error: BaseException) -> Waited:
        """Fail every later call with *error*. Return what has waited, to be failed by the caller."""
        self._constructing = 0.0
        with self._lock:
            self.failure = error
            return self._waited()

    def _waited(self) -> Waited:
        waited, self._waiting, self._questions = Waited(self._waiting, self._questions), [], []
        return waited

    def keep(self, question: Key) -> bool:
        """Keep *question* until the construction has ended, and return True; return False if it has ended."""
        with self._lock:
            waits = self.executor is None and self.failure is None
            if waits:
                self._questions.append(question)
        return waits

    # --- calls ---

    def get(self, peer: bytes, id: int) -> Invocation | None:
        """Return a call that has no answer yet, None for another."""
        return self._all.get((peer, id))

    def submit(self, invocation: Invocation) -> bool:
        """Submit a call. Return False if it came before, so that it does not run twice."""
        key = (invocation.peer, invocation.id)
        if invocation.peer in self.lost:
            return True
        if invocation.id > self._newest.get(invocation.peer, 0):
            self._newest[invocation.peer] = invocation.id
        elif key in self._all or key in self._recent:  # threads of one process may send theirs out of order
            return False
        self._recent.append(key)
        self._all[key] = invocation
        if self.executor is None:
            with self._lock:
                if self.executor is None and self.failure is None:
                    self._waiting.append(invocation)
                    return True
        if self.executor is not None:
            self.executor.submit(invocation)
        elif self.failure is not None:
            invocation.fail(self.failure)
        return True

    def submit_all(self, peer: bytes, invocations: Sequence[Invocation]) -> bool:
        """Submit several calls of one method and one link at once, and return True.

        Return False, and do nothing, if each must be submitted alone: before the construction, or out of order.
        """
        executor, newest = self.executor, self._newest.get(peer, 0)
        if executor is None or peer in self.lost or not invocations:
            return False
        for invocation in invocations:
            if invocation.id <= newest:
                return False
            newest = invocation.id
        self._newest[peer] = newest
        keys = [(peer, invocation.id) for invocation in invocations]
        self._recent.extend(keys)
        self._all.update(zip(keys, invocations, strict=True))
        executor.submit_all(invocations)
        return True

    def answered(self, peer: bytes, id: int) -> Invocation | None:
        """Remove a call, which has its answer or needs none, and return it if it is there. Any thread."""
        return self._all.pop((peer, id), None)

    def cancel(self, peer: bytes, id: int) -> None:
        """Stop a call, whose caller waits no longer. Ignored if it has its answer."""
        invocation = self.answered(peer, id)
        if invocation is not None:
            invocation.cancel()

    def cancel_streams(self, peer: bytes) -> None:
        """Cancel the streams to *peer*, which has ended: they would wait for credit. A call runs to its end."""
        for (caller, id), invocation in list(self._all.items()):
            if caller == peer and invocation.window:
                self.cancel(peer, id)

    def forget(self, peer: bytes) -> None:
        """Forget the link *peer*, by which nothing arrives any more."""
        self._newest.pop(peer, None)
        self.lost.discard(peer)
