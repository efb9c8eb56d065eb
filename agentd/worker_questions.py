"""Questions to this node's workers: agentd asks their I/O threads on request of the head. Loop thread only.

The template passes a question on to the worker, and the answer back. agentd does not interpret answers. It answers for
a worker that does not, and says why.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rlinf_actors.wire.debug_values import MAX_DEBUG_WAIT_S, DebugAnswer, DebugQuestion
from rlinf_actors.wire.figure_values import WorkerFigures
from rlinf_actors.wire.stack_values import IO_THREAD, StackAnswer, StackQuestion, WorkerStacks
from rlinf_actors.wire.worker_questions import (
    AskWorker,
    ShowFigures,
    ShowStacks,
    TraceRecorded,
    WorkerAnswered,
    WorkerQuestion,
)

if TYPE_CHECKING:
    from agentd.templates import TemplateProcess
    from agentd.worker_process import WorkerProcess

ANSWER_S = 3.0
"""Seconds that the workers have to answer."""
OUTSIDE_S = 50.0
"""Seconds that the templates have to take stacks from outside: several runs of py-spy, each up to 20 s."""

Answer = TypeVar("Answer", WorkerStacks, WorkerFigures, TraceRecorded, DebugAnswer)


class _Question(msgspec.Struct, eq=False):
    kind: type[Any]  # of the answers
    ids: Sequence[str]
    send: Callable[[list[Any]], object]
    found: dict[str, Any]
    waits: set[str]  # ids of the workers that have not answered
    timer: asyncio.TimerHandle | None = None


class WorkerQuestions:
    """The questions that the workers of this node have not all answered.

    Args:
        workers: the running workers, by id.
        why_silent: returns why a worker, given by its id, does not answer, for people.
        say_holders: tells a worker, given by its id, who holds its accelerators, if it waits for them.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers: Mapping[str, WorkerProcess],
        why_silent: Callable[[str], str],
        say_holders: Callable[[str], object] = lambda id: None,
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._why_silent = why_silent
        self._say_holders = say_holders
        self._new = itertools.count(1).__next__
        self._questions: dict[int, _Question] = {}

    def ask_stacks(self, asked: StackQuestion, send: Callable[[StackAnswer], object]) -> None:
        """Ask workers for their stacks, and call *send* with the answer."""
        limit_s = ANSWER_S if asked.level == IO_THREAD else OUTSIDE_S

        def ask(id: str) -> ShowStacks:
            self._say_holders(id)  # which the worker reads before the question
            return ShowStacks(asked.level)

        self.ask(WorkerStacks, asked.namespace, asked.ids, ask, lambda found: send(StackAnswer(found)), limit_s)

    def ask_figures(self, ids: Sequence[str], send: Callable[[list[WorkerFigures]], object]) -> None:
        """Ask for the figures of the workers *ids* of any jobs, and call *send* with the answer."""
        self.ask(WorkerFigures, None, ids, lambda id: ShowFigures(time.monotonic()), send)

    def ask_debugger(self, asked: DebugQuestion, send: Callable[[DebugAnswer], object]) -> None:
        """Pass a question on to a worker's debugger, and call *send* with the answer, which may take the time that the
        question allows.
        """
        limit_s = ANSWER_S + min(asked.wait_s, MAX_DEBUG_WAIT_S)
        one = [asked.worker]
        self.ask(DebugAnswer, asked.namespace, one, lambda id: asked, lambda found: send(found[0]), limit_s)

    def ask(
        self,
        kind: type[Answer],
        namespace: str | None,
        ids: Sequence[str],
        question: Callable[[str], WorkerQuestion],
        send: Callable[[list[Answer]], object],
        limit_s: float | None = None,
    ) -> None:
        """Ask the workers *ids* of the job *namespace*, None for any job. Call *send* with their answers, each a
        *kind*, in the order of *ids*, once all have answered, or after *limit_s* seconds (None: ANSWER_S). *question*
        makes the question for a worker, of its id.
        """
        number = self._new()
        asked = self._questions[number] = _Question(kind, ids, send, {}, set())
        for id in ids:
            worker = self._workers.get(id)
            if worker is None or namespace not in (None, worker.spec.namespace):
                asked.found[id] = kind(id, fault="it has ended")
            elif not worker.up:
                asked.found[id] = kind(id, fault="it is starting: its process does not listen yet")
            else:
                asked.waits.add(id)
                worker.template.send(AskWorker(id, number, question(id)))
        asked.timer = self._loop.call_later(ANSWER_S if limit_s is None else limit_s, self._end, number)
        self._end_if_complete(number)

    def answered(self, template: TemplateProcess, packet: WorkerAnswered) -> None:
        """Take the answer of a worker of *template*. Answers that no question waits for are ignored."""
        asked, worker = self._questions.get(packet.request), self._workers.get(packet.id)
        if asked is None or packet.id not in asked.waits or type(packet.answer) is not asked.kind:
            return
        if worker is not None and worker.template is template:
            self._take(packet.request, msgspec.structs.replace(packet.answer, id=packet.id))

    def worker_ended(self, id: str) -> None:
        for number, asked in list(self._questions.items()):
            if id in asked.waits:
                self._take(number, asked.kind(id, fault="it has ended"))

    def close(self) -> None:
        """Drop all questions. May be called again."""
        for asked in self._questions.values():
            if asked.timer is not None:
                asked.timer.cancel()
        self._questions.clear()

    def _take(self, number: int, answer: Any) -> None:
        asked = self._questions[number]
        asked.waits.discard(answer.id)
        asked.found[answer.id] = answer
        self._end_if_complete(number)

    def _end_if_complete(self, number: int) -> None:
        if not self._questions[number].waits:
            self._end(number)

    def _end(self, number: int) -> None:
        asked = self._questions.pop(number)
        if asked.timer is not None:
            asked.timer.cancel()
        asked.found.update({id: asked.kind(id, fault=self._why_silent(id)) for id in asked.waits})
        asked.send([asked.found[id] for id in asked.ids])
