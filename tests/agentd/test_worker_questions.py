"""Questions to workers, for stacks: each has one answer, with an entry for each worker; silent workers are named."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from agentd import worker_questions
from agentd.health import NO_ANSWER, NO_TEMPLATE, HealthTable
from agentd.worker_questions import WorkerQuestions
from rlinf_actors.wire.stack_values import StackQuestion, WorkerStacks
from rlinf_actors.wire.worker_questions import AskWorker, TraceRecorded, WorkerAnswered


class Template:
    def __init__(self) -> None:
        self.sent: list[AskWorker] = []
        self.send = self.sent.append


class Scene:
    """The questions for workers "a" and "b" of job "job", "c" of another job, and "d", which is starting."""

    def __init__(self) -> None:
        self.template = Template()
        self.health = HealthTable()
        self.workers = {id: self.worker() for id in "ab"}
        self.workers["c"] = self.worker(namespace="other")
        self.workers["d"] = self.worker(up=False)
        self.questions = WorkerQuestions(asyncio.get_running_loop(), self.workers, self.health.why_silent)
        self.answers: asyncio.Queue = asyncio.Queue()

    def worker(self, namespace: str = "job", up: bool = True) -> SimpleNamespace:
        return SimpleNamespace(spec=SimpleNamespace(namespace=namespace), up=up, template=self.template)

    def ask(self, ids: str) -> None:
        self.questions.ask_stacks(StackQuestion("job", list(ids)), self.answers.put_nowait)

    def shown(self, id: str, template: Template | None = None) -> None:
        request = self.template.sent[-1].request
        answer = WorkerAnswered(id, request, WorkerStacks("lie", f"in_{id}"))
        self.questions.answered(template or self.template, answer)


@pytest.fixture
async def scene():
    scene = Scene()
    yield scene
    scene.questions.close()


async def test_the_answer_has_each_worker_in_the_order_of_the_question(scene):
    scene.ask("ba")
    assert [packet.id for packet in scene.template.sent] == ["b", "a"]
    scene.shown("a")
    assert scene.answers.empty()
    scene.shown("b")
    answer = scene.answers.get_nowait()
    assert [(one.id, one.method) for one in answer.workers] == [("b", "in_b"), ("a", "in_a")]
    scene.shown("a")  # once more
    assert scene.answers.empty()


async def test_workers_of_other_jobs_and_ended_or_starting_ones_are_not_asked(scene):
    scene.ask("cdx")
    assert scene.template.sent == []
    faults = {one.id: one.fault for one in scene.answers.get_nowait().workers}
    assert (faults["c"], faults["x"]) == ("it has ended", "it has ended")
    assert faults["d"].startswith("it is starting")


async def test_another_template_has_no_say_about_a_worker(scene):
    scene.ask("a")
    scene.shown("a", Template())
    assert scene.answers.empty()


async def test_an_answer_to_another_question_is_ignored(scene):
    scene.ask("a")
    scene.questions.answered(scene.template, WorkerAnswered("a", scene.template.sent[-1].request, TraceRecorded("a")))
    assert scene.answers.empty()


async def test_worker_that_ends_while_it_is_asked_is_said_to_have_ended(scene):
    scene.ask("ab")
    scene.shown("b")
    scene.questions.worker_ended("a")
    assert [one.fault for one in scene.answers.get_nowait().workers] == ["it has ended", ""]


async def test_silent_workers_are_named_with_the_reason(scene, monkeypatch):
    monkeypatch.setattr(worker_questions, "ANSWER_S", 0.0)
    scene.health.worker_up("b", 7, 0.0)
    scene.health.to_probe(1.0)
    scene.health.changes(100.0)  # its template is silent
    scene.ask("ab")
    answer = await scene.answers.get()
    assert [one.fault for one in answer.workers] == [NO_ANSWER, NO_TEMPLATE]
