"""The cluster of a worker process: its agent started it, so there is nothing to choose."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlinf_actors.runtime.process import Runtime

TIMEOUT_S = 30.0


@dataclass
class WorkerJob:
    """What a worker process knows of its cluster; set by the worker's main before the user's code runs.

    Attributes:
        runtime: the worker's.
        head: the coordinator's endpoint.
        extras: what the owner sent along with the class.
        node_rank: where this worker runs.
        name: of the worker, ``group:rank``.
    """

    runtime: Runtime
    head: str
    extras: Callable[[], dict[str, Any]]
    node_rank: int = 0
    name: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _session: concurrent.futures.Future[Any] | None = None

    def connect(self) -> Runtime:
        """The worker's runtime, in session with the head; the first caller waits for that.

        Most workers never need the head, so none connects before it does.

        Raises:
            UsageError: this process is a fork of the worker.
        """
        self.runtime.check_usable()  # before a lock that another thread may have held when it was forked
        self._begin().result()
        return self.runtime

    async def connected(self) -> Runtime:
        """The same from the loop of the I/O thread."""
        await asyncio.shield(asyncio.wrap_future(self._begin()))
        return self.runtime

    def _begin(self) -> concurrent.futures.Future[Any]:
        with self._lock:
            session = self._session
            if session is None or (session.done() and session.exception() is not None):
                session = self._session = self.runtime.io.submit(self.runtime.connect(self.head, TIMEOUT_S))
            return session


_job: WorkerJob | None = None


def set_worker_job(job: WorkerJob) -> None:
    """Make this process's cluster that of the worker it is."""
    global _job
    _job = job


def worker_job() -> WorkerJob | None:
    """The job of this worker process, None in a driver."""
    return _job
