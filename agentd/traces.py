"""The traces of this node's workers: files in the run directory that the workers write and agentd sends on request.

A worker's file stays after the worker's end, also after kill -9, until the driver has collected it (a TraceQuestion
with `drop`), KEPT_S after the last worker of the job has ended, or the end of agentd. Loop thread only. agentd never
interprets the contents.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from agentd.launch_plan import file_name
from agentd.logs import opened
from agentd.users import User, as_user, remove_tree
from rlinf_actors.exhaustion import explain
from rlinf_actors.tracing.clocks import Sample
from rlinf_actors.wire.trace_values import MAX_TRACE_FILES, MAX_TRACE_SLICE, TraceQuestion, TraceSlice
from rlinf_actors.wire.values import WorkerSpec

log = logging.getLogger(__name__)

KEPT_S = 600.0
"""Seconds for which the traces of a job are kept after the end of the job's last worker on this node."""


class TraceFiles:
    """The trace files of this node's workers, by job.

    Args:
        loop: loop of agentd.
        run_dir: the run directory.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, run_dir: Path) -> None:
        self._loop = loop
        self._root = run_dir / "trace"
        self._users: dict[str, User] = {}  # by job: as whom its workers run, if not as agentd's own user
        self._living: dict[str, set[str]] = {}  # by job: its running workers that may write a trace
        self._expiry: dict[str, asyncio.TimerHandle] = {}

    def path_for(self, spec: WorkerSpec, user: User | None = None) -> str:
        """Return the path of the file that a new worker, which runs as *user*, makes for its trace; "" if it is to
        record none.
        """
        if not spec.trace_events:
            return ""
        self.started(spec, user)
        directory = self._directory(spec.namespace)
        try:
            with as_user(user):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            log.warning("%s:%d records no trace: %s: %s", spec.group, spec.rank, directory, explain(error))
            return ""
        return str(directory / spec.id)

    def started(self, spec: WorkerSpec, user: User | None = None) -> None:
        """Note that a worker runs as *user*, so that the traces of its job are kept."""
        if spec.trace_events:
            if user is not None:
                self._users[spec.namespace] = user
            self._living.setdefault(spec.namespace, set()).add(spec.id)
            timer = self._expiry.pop(spec.namespace, None)
            if timer is not None:
                timer.cancel()

    def ended(self, spec: WorkerSpec) -> None:
        """Note that a worker has ended. Without another worker of its job, its traces are kept for KEPT_S more."""
        living = self._living.get(spec.namespace)
        if living is None:
            return
        living.discard(spec.id)
        if not living and spec.namespace not in self._expiry:
            del self._living[spec.namespace]
            self._expiry[spec.namespace] = self._loop.call_later(KEPT_S, self._drop, spec.namespace)

    def adopted(self, users: Sequence[User] = ()) -> None:
        """Remove the traces of earlier jobs of which no worker runs, also those of *users*. Called after `started` for
        all running workers.
        """
        kept = {file_name(namespace) for namespace in self._living}
        for user in (None, *users):
            root = self._root if user is None else Path(user.run_dir, "trace")
            with as_user(user), contextlib.suppress(OSError):
                for name in _names(root):
                    if name not in kept:
                        remove_tree(str(root / name))

    def answer(self, question: TraceQuestion, clock: Sequence[Sample]) -> TraceSlice:
        """Return the names of a job's traces, or a part of one, or remove those of ended workers. *clock* says how
        far the head's clock is ahead of this node's.
        """
        with as_user(self._users.get(question.namespace)):
            return self._answer(question, clock)

    def _answer(self, question: TraceQuestion, clock: Sequence[Sample]) -> TraceSlice:
        directory = self._directory(question.namespace)
        measured = [(one.at, one.offset, one.error) for one in clock]
        if question.drop:
            self._drop(question.namespace)
            return TraceSlice(now=time.monotonic())
        try:
            names = sorted(filter(str.isascii, _names(directory)))  # no id of a worker has bytes that are not UTF-8
            if not question.name:
                return TraceSlice(names, now=time.monotonic(), clock=measured)
            if question.name not in names:  # so it is no path either
                return TraceSlice(fault=f"there is no trace {question.name!r}")
            with open(directory / question.name, "rb", opener=opened) as file:
                file.seek(question.offset)
                return TraceSlice(data=file.read(MAX_TRACE_SLICE))
        except FileNotFoundError:
            return TraceSlice(now=time.monotonic(), clock=measured)
        except OSError as error:
            return TraceSlice(fault=f"{directory}: {explain(error)}")

    def close(self) -> None:
        """Remove all traces, because agentd ends with all workers."""
        self.release()
        shutil.rmtree(self._root, ignore_errors=True)

    def release(self) -> None:
        """Cancel the timers, because agentd ends and leaves the workers to the next one."""
        for timer in self._expiry.values():
            timer.cancel()
        self._expiry.clear()

    def _directory(self, namespace: str) -> Path:
        user = self._users.get(namespace)
        return (self._root if user is None else Path(user.run_dir, "trace")) / file_name(namespace)

    def _drop(self, namespace: str) -> None:
        timer = self._expiry.pop(namespace, None)
        if timer is not None:
            timer.cancel()
        directory, living = self._directory(namespace), self._living.get(namespace, set())
        with as_user(self._users.get(namespace)), contextlib.suppress(OSError):  # a user may put anything there
            for name in _names(directory):
                if name.partition("_")[0] not in living:  # "WORKER_CHILD" is that of a child of the worker
                    with contextlib.suppress(OSError):
                        os.unlink(directory / name)
            if not living:
                directory.rmdir()
        if not living:
            self._users.pop(namespace, None)


def _names(directory: Path) -> list[str]:
    """Return the names in *directory*, some of them if there are very many: it may be a user's. Raise OSError."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in itertools.islice(entries, MAX_TRACE_FILES)]
