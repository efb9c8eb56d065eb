"""Questions to this node's workers: agentd asks their I/O threads on request of the head. Loop thread only.

The template passes a question on to the worker, and the answer back. agentd does not interpret answers. It answers for
a worker that does not, and says why.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from rlinf_actors.wire.debug_values import MAX_DEBUG_WAIT_S, DebugAnswer, DebugQuestion, FromDebugger, ToDebugger
from rlinf_actors.wire.figure_values import WorkerFigures
from rlinf_actors.wire.stack_values import IO_THREAD, StackAnswer, StackQuestion, WorkerStacks
from rlinf_actors.wire.template_protocol import (
    FiguresShown,
    ShowFigures,
    ShowStacks,
    TraceRecorded,
    WorkerAnswer,
)

if TYPE_CHECKING:
    from agentd.templates import TemplateProcess
    from agentd.worker_process import WorkerProcess
    from rlinf_actors.wire.template_protocol import WorkerQuestion

ANSWER_S = 3.0
"""Seconds that the workers have to answer."""
OUTSIDE_S = 50.0
"""Seconds that the templates have to take stacks from outside: several runs of py-spy, each up to 20 s."""

Answer = TypeVar("Answer")


class WorkerQuestions:
    """All questions to the workers of this node.

    Args:
        workers: the running workers, by id.
        why_silent: returns why a worker, given by its id, does not answer, for people.
        say_holders: tells a worker, given by its id, who holds its accelerators, if it waits for them.

    Attributes:
        traces: the questions that switch traces.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers: Mapping[str, WorkerProcess],
        why_silent: Callable[[str], str],
        say_holders: Callable[[str], object] = lambda id: None,
    ) -> None:
        self._say_holders = say_holders
        self._stacks = QuestionsOfKind(loop, workers, why_silent, lambda id, why: WorkerStacks(id, fault=why))
        self._figures = QuestionsOfKind(loop, workers, why_silent, lambda id, why: WorkerFigures(id, fault=why))
        self._debuggers = QuestionsOfKind(loop, workers, why_silent, lambda id, why: DebugAnswer(id, fault=why))
        self.traces = QuestionsOfKind(loop, workers, why_silent, lambda id, why: TraceRecorded(id, 0, why))
        self._kinds: tuple[QuestionsOfKind[Any], ...] = (self._stacks, self._figures, self._debuggers, self.traces)

    def ask_stacks(self, asked: StackQuestion, send: Callable[[StackAnswer], object]) -> None:
        """Ask workers for their stacks, and call *send* with the answer."""
        limit_s = ANSWER_S if asked.level == IO_THREAD else OUTSIDE_S

        def ask(id: str, number: int) -> ShowStacks:
            self._say_holders(id)  # which the worker reads before the question
            return ShowStacks(id, number, asked.level)

        self._stacks.ask(asked.namespace, asked.ids, ask, lambda found: send(StackAnswer(found)), limit_s)

    def ask_figures(self, ids: Sequence[str], send: Callable[[list[WorkerFigures]], object]) -> None:
        """Ask for the figures of the workers *ids* of any jobs, and call *send* with the answer."""
        self._figures.ask(None, ids, lambda id, number: ShowFigures(id, number, time.monotonic()), send)

    def ask_debugger(self, asked: DebugQuestion, send: Callable[[DebugAnswer], object]) -> None:
        """Pass a question on to a worker's debugger, and call *send* with the answer, which may take the time that the
        question allows.
        """
        self._debuggers.ask(
            asked.namespace,
            [asked.worker],
            lambda id, number: ToDebugger(id, number, asked),
            lambda found: send(found[0]),
            ANSWER_S + min(asked.wait_s, MAX_DEBUG_WAIT_S),
        )

    def answered(self, template: TemplateProcess, packet: WorkerAnswer) -> None:
        """Take the answer of a worker of *template*."""
        if isinstance(packet, FiguresShown):
            figures = msgspec.structs.replace(packet.figures, id=packet.id)
            self._figures.answered(template, packet.id, packet.request, figures)
        elif isinstance(packet, FromDebugger):
            answer = msgspec.structs.replace(packet.answer, id=packet.id)
            self._debuggers.answered(template, packet.id, packet.request, answer)
        elif isinstance(packet, TraceRecorded):
            self.traces.answered(template, packet.id, packet.request, packet)
        else:
            stacks = msgspec.structs.replace(packet.stacks, id=packet.id)
            self._stacks.answered(template, packet.id, packet.request, stacks)

    def worker_ended(self, id: str) -> None:
        for kind in self._kinds:
            kind.worker_ended(id)

    def close(self) -> None:
        """Drop all questions. May be called again."""
        for kind in self._kinds:
            kind.close()


class _Question(msgspec.Struct, Generic[Answer], eq=False):
    ids: Sequence[str]
    send: Callable[[list[Answer]], object]
    found: dict[str, Answer]
    waits: set[str]  # ids of the workers that have not answered
    timer: asyncio.TimerHandle | None = None


class QuestionsOfKind(Generic[Answer]):
    """The questions of one kind, such as those for stacks, that the workers of this node have not all answered.

    Args:
        workers: the running workers, by id.
        why_silent: returns why a worker, given by its id, does not answer, for people.
        no_answer: makes the answer for a worker that gives none, of its id and the reason.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers: Mapping[str, WorkerProcess],
        why_silent: Callable[[str], str],
        no_answer: Callable[[str, str], Answer],
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._why_silent = why_silent
        self._no_answer = no_answer
        self._new = itertools.count(1).__next__
        self._questions: dict[int, _Question[Answer]] = {}

    def ask(
        self,
        namespace: str | None,
        ids: Sequence[str],
        packet: Callable[[str, int], WorkerQuestion],
        send: Callable[[list[Answer]], object],
        limit_s: float | None = None,
    ) -> None:
        """Ask the workers *ids* of the job *namespace*, None for any job. Call *send* with their answers, in the order
        of *ids*, once all have answered, or after *limit_s* seconds (None: ANSWER_S). *packet* makes the question for a
        worker, of its id and the question's number.
        """
        number = self._new()
        question = self._questions[number] = _Question(ids, send, {}, set())
        for id in ids:
            worker = self._workers.get(id)
            if worker is None or namespace not in (None, worker.spec.namespace):
                question.found[id] = self._no_answer(id, "it has ended")
            elif not worker.up:
                question.found[id] = self._no_answer(id, "it is starting: its process does not listen yet")
            else:
                question.waits.add(id)
                worker.template.send(packet(id, number))
        question.timer = self._loop.call_later(ANSWER_S if limit_s is None else limit_s, self._end, number)
        self._end_if_complete(number)

    def answered(self, template: TemplateProcess, id: str, number: int, answer: Answer) -> None:
        """Take the answer of a worker of *template*. Answers that no question waits for are ignored."""
        question, worker = self._questions.get(number), self._workers.get(id)
        if question is None or id not in question.waits or worker is None or worker.template is not template:
            return
        question.waits.discard(id)
        question.found[id] = answer
        self._end_if_complete(number)

    def worker_ended(self, id: str) -> None:
        for number, question in list(self._questions.items()):
            if id in question.waits:
                question.waits.discard(id)
                question.found[id] = self._no_answer(id, "it has ended")
                self._end_if_complete(number)

    def close(self) -> None:
        """Drop all questions. May be called again."""
        for question in self._questions.values():
            if question.timer is not None:
                question.timer.cancel()
        self._questions.clear()

    def _end_if_complete(self, number: int) -> None:
        if not self._questions[number].waits:
            self._end(number)

    def _end(self, number: int) -> None:
        question = self._questions.pop(number)
        if question.timer is not None:
            question.timer.cancel()
        found = question.found
        found.update({id: self._no_answer(id, self._why_silent(id)) for id in question.waits})
        question.send([found[id] for id in question.ids])
