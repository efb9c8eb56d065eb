"""The traces of this node's workers: files in the run directory that the workers write and agentd sends on request.

A worker records from its start if its driver's configuration says so, or if its job is switched on; others from a
TraceSwitch on. Its file stays after its end, also after kill -9, until the driver has collected it (a TraceQuestion
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentd.launch_plan import file_name
from agentd.logs import opened
from agentd.users import User, as_user, remove_tree
from rlinf_actors.exhaustion import explain
from rlinf_actors.tracing.clocks import Sample
from rlinf_actors.wire.trace_values import (
    MAX_FAULTS,
    MAX_TRACE_FILES,
    MAX_TRACE_SLICE,
    SwitchedWorkers,
    TraceQuestion,
    TraceSlice,
    TraceSwitch,
)
from rlinf_actors.wire.values import WorkerSpec
from rlinf_actors.wire.worker_questions import RecordTrace, TraceRecorded

if TYPE_CHECKING:
    from agentd.worker_process import WorkerProcess
    from agentd.worker_questions import WorkerQuestions

log = logging.getLogger(__name__)

KEPT_S = 600.0
"""Seconds for which the traces of a job are kept after the end of the job's last worker on this node."""


class _Recording(msgspec.Struct):
    """A job that a TraceSwitch has switched on."""

    events: int
    number: int  # of all switches; part of the names of its files


class TraceFiles:
    """The trace files of this node's workers, by job.

    Args:
        loop: loop of agentd.
        run_dir: the run directory.
        workers: the running workers, by id.
        questions: asks workers to record, or no longer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        run_dir: Path,
        workers: Mapping[str, WorkerProcess],
        questions: WorkerQuestions,
    ) -> None:
        self._loop = loop
        self._root = run_dir / "trace"
        self._workers = workers
        self._questions = questions
        self._users: dict[str, User] = {}  # by job: as whom its workers run, if not as agentd's own user
        self._living: dict[str, set[str]] = {}  # by job: its running workers
        self._traced: set[str] = set()  # jobs that may have files
        self._recordings: dict[str, _Recording] = {}
        self._new = itertools.count(1).__next__
        self._expiry: dict[str, asyncio.TimerHandle] = {}

    def of_new_worker(self, spec: WorkerSpec, user: User | None = None) -> RecordTrace:
        """Return what a new worker, which runs as *user*, is to record from its start."""
        self.started(spec, user)
        return self._recording(spec, user)

    def _recording(self, spec: WorkerSpec, user: User | None) -> RecordTrace:
        if spec.trace_events:
            path, events = self._new_file(spec, spec.id, user), spec.trace_events
        elif (on := self._recordings.get(spec.namespace)) is not None:
            path, events = self._new_file(spec, f"{spec.id}_t{on.number}", user), on.events
        else:
            return RecordTrace()
        return RecordTrace(path, events)

    def _new_file(self, spec: WorkerSpec, name: str, user: User | None) -> str:
        directory = self._directory(spec.namespace)
        try:
            with as_user(user):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            log.warning("%s:%d records no trace: %s: %s", spec.group, spec.rank, directory, explain(error))
            return ""
        self._traced.add(spec.namespace)
        return str(directory / name)

    def started(self, spec: WorkerSpec, user: User | None = None) -> None:
        """Note that a worker runs as *user*, so that the traces of its job are kept."""
        if user is not None:
            self._users[spec.namespace] = user
        self._living.setdefault(spec.namespace, set()).add(spec.id)
        timer = self._expiry.pop(spec.namespace, None)
        if timer is not None:
            timer.cancel()

    def ended(self, spec: WorkerSpec) -> None:
        """Note that a worker has ended. Without another worker of its job, its traces are kept for KEPT_S more."""
        namespace, living = spec.namespace, self._living.get(spec.namespace)
        if living is None:
            return
        living.discard(spec.id)
        if living or namespace in self._expiry:
            return
        del self._living[namespace]
        if namespace in self._traced or namespace in self._recordings:
            self._expiry[namespace] = self._loop.call_later(KEPT_S, self._drop, namespace)
        else:
            self._users.pop(namespace, None)

    def switch(self, asked: TraceSwitch, send: Callable[[SwitchedWorkers], object]) -> None:
        """Have the workers of a job record from now on, or no longer. Workers that start later follow. Call *send* when
        the running ones have answered. To switch on what is on changes nothing.
        """
        namespace = asked.namespace
        if not asked.events:
            self._recordings.pop(namespace, None)
        elif namespace not in self._recordings:
            self._drop_recorded(namespace)
            self._recordings[namespace] = _Recording(asked.events, self._new())
        mine = [one for one in self._workers.values() if one.spec.namespace == namespace and one.up]
        self._ask(mine, lambda found: send(self._summary(found)))

    def worker_up(self, worker: WorkerProcess) -> None:
        """Have a new worker follow what was switched since it was ordered."""
        spec = worker.spec
        if not spec.trace_events and (spec.namespace in self._traced or spec.namespace in self._recordings):
            self._ask([worker], self._log_faults)

    def _ask(self, workers: Iterable[WorkerProcess], send: Callable[[list[TraceRecorded]], object]) -> None:
        asked: dict[str, RecordTrace] = {}
        namespace = ""
        for worker in workers:
            spec, namespace = worker.spec, worker.spec.namespace
            asked[spec.id] = RecordTrace() if spec.trace_events else self._recording(spec, worker.user)
        self._questions.ask(TraceRecorded, namespace, list(asked), asked.__getitem__, send)

    def _summary(self, found: Sequence[TraceRecorded]) -> SwitchedWorkers:
        faults = [text for one in found if (text := self._fault(one))]
        return SwitchedWorkers(len(found) - len(faults), len(faults), faults[:MAX_FAULTS])

    def _log_faults(self, found: Sequence[TraceRecorded]) -> None:
        for one in found:
            if text := self._fault(one):
                log.warning("no trace of %s", text)

    def _fault(self, answer: TraceRecorded) -> str:
        worker = self._workers.get(answer.id)
        name = f"{worker.spec.group}:{worker.spec.rank}" if worker is not None else answer.id
        return f"{name}: {answer.fault}" if answer.fault else ""

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
        numbers = [0]
        for namespace in self._living:
            with as_user(self._users.get(namespace)), contextlib.suppress(OSError):
                names = _names(self._directory(namespace))
                if names:
                    self._traced.add(namespace)
                numbers += map(_number, names)
        self._new = itertools.count(max(numbers) + 1).__next__  # a worker may still record in a file with such a number

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
        living = self._living.get(namespace, set())
        # "WORKER_CHILD" is that of a child of the worker, "WORKER_tNUMBER" of a switch
        self._remove(namespace, lambda name: name.partition("_")[0] not in living)
        if not living:
            with as_user(self._users.get(namespace)), contextlib.suppress(OSError):
                self._directory(namespace).rmdir()
            self._users.pop(namespace, None)
            self._traced.discard(namespace)
            self._recordings.pop(namespace, None)

    def _drop_recorded(self, namespace: str) -> None:
        """Remove what an earlier switch has recorded."""
        self._remove(namespace, lambda name: "_t" in name)

    def _remove(self, namespace: str, chosen: Callable[[str], bool]) -> None:
        directory = self._directory(namespace)
        with as_user(self._users.get(namespace)), contextlib.suppress(OSError):  # a user may put anything there
            for name in filter(chosen, _names(directory)):
                with contextlib.suppress(OSError):
                    os.unlink(directory / name)


def _number(name: str) -> int:
    """Return the number of the switch that the file *name* is of, 0 for none."""
    number = name.rpartition("_t")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else 0  # a user may name a file with more digits


def _names(directory: Path) -> list[str]:
    """Return the names in *directory*, some of them if there are very many: it may be a user's. Raise OSError."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in itertools.islice(entries, MAX_TRACE_FILES)]
