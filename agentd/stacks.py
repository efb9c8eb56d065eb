"""The stacks of this node's workers: agentd asks their I/O threads on request of the head. Loop thread only.

agentd passes the answers on as they are, and says for a worker without an answer why there is none.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors.wire.agent_messages import SendStacks, StacksSent
from rlinf_actors.wire.stack_values import WorkerStacks
from rlinf_actors.wire.template_protocol import ShowStacks, StacksShown

if TYPE_CHECKING:
    from agentd.templates import TemplateProcess
    from agentd.worker_process import WorkerProcess

ANSWER_S = 3.0
"""Seconds that the workers have to answer."""


class _Question(msgspec.Struct, eq=False):
    order: SendStacks
    send: Callable[[StacksSent], object]
    found: dict[str, WorkerStacks]
    waits: set[str]  # ids of the workers that have not answered
    timer: asyncio.TimerHandle | None = None


class StackQuestions:
    """The questions for stacks that the workers of this node have not all answered.

    Args:
        workers: the running workers, by id.
        why_silent: returns why a worker, given by its id, does not answer, for people.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        workers: Mapping[str, WorkerProcess],
        why_silent: Callable[[str], str],
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._why_silent = why_silent
        self._new = itertools.count(1).__next__
        self._questions: dict[int, _Question] = {}

    def ask(self, order: SendStacks, send: Callable[[StacksSent], object]) -> None:
        """Ask the workers in *order*, and call *send* with the answer once all have answered, or after ANSWER_S."""
        number, asked = self._new(), order.question
        question = self._questions[number] = _Question(order, send, {}, set())
        for id in asked.ids:
            worker = self._workers.get(id)
            if worker is None or worker.spec.namespace != asked.namespace:
                question.found[id] = WorkerStacks(id, fault="it has ended")
            elif not worker.up:
                question.found[id] = WorkerStacks(id, fault="it is starting: its process does not listen yet")
            else:
                question.waits.add(id)
                worker.template.send(ShowStacks(id, number))
        question.timer = self._loop.call_later(ANSWER_S, self._end, number)
        self._end_if_complete(number)

    def shown(self, template: TemplateProcess, packet: StacksShown) -> None:
        """Take the answer of a worker of *template*. Answers that no question waits for are ignored."""
        question, worker = self._questions.get(packet.request), self._workers.get(packet.id)
        if question is None or packet.id not in question.waits or worker is None or worker.template is not template:
            return
        question.waits.discard(packet.id)
        question.found[packet.id] = msgspec.structs.replace(packet.stacks, id=packet.id)
        self._end_if_complete(packet.request)

    def worker_ended(self, id: str) -> None:
        for number, question in list(self._questions.items()):
            if id in question.waits:
                question.waits.discard(id)
                question.found[id] = WorkerStacks(id, fault="it has ended")
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
        found.update({id: WorkerStacks(id, fault=self._why_silent(id)) for id in question.waits})
        question.send(StacksSent(question.order.id, [found[id] for id in question.order.question.ids]))
