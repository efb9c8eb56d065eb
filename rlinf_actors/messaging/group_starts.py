"""GroupStarts: start operations on a group, in order, as soon as its world size is known."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from rlinf_actors.messaging.directory import WorkerDirectory
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.remote_group import RemoteGroup

Start = Callable[[int], None]
Failed = Callable[[Exception], object]


class GroupStarts:
    """Starts operations that need the world size of a group. Any thread may use it; nothing here blocks."""

    def __init__(self, directory: WorkerDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._waiting: dict[str, collections.deque[tuple[Start, Failed]]] = {}

    def run(self, name: str, start: Start, failed: Failed) -> None:
        """Call *start* with the world size of the group *name*, after all earlier starts for that group.

        If the group is known, *start* runs at once on this thread, and its error is raised here. Otherwise it runs
        later on a thread of its own, because it pickles, and *failed* is called with its error or with the reason why
        there is no such group.
        """
        with self._lock:
            waiting = self._waiting.get(name)
            group = self._directory.known(name) if waiting is None else None
            if waiting is not None:
                waiting.append((start, failed))
            elif group is None:
                self._waiting[name] = collections.deque([(start, failed)])
        if group is not None:
            start(len(group.peers))
        elif waiting is None:
            self._directory.group(name, lambda found: self._found(name, found))

    def _found(self, name: str, found: RemoteGroup | Exception) -> None:
        AsyncWork.on_thread(lambda: self._run_waiting(name, found), f"the first messages to group {name!r}")

    def _run_waiting(self, name: str, found: RemoteGroup | Exception) -> None:
        while True:
            with self._lock:
                waiting = self._waiting[name]
                if not waiting:
                    del self._waiting[name]
                    return
                start, failed = waiting.popleft()
            try:
                if isinstance(found, Exception):
                    raise found
                start(len(found.peers))
            except Exception as error:  # noqa: BLE001 - whatever it is, it reaches the waiter
                failed(error)
