"""Figures of a node: collected once for all who ask, complete although a worker or a file system is silent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentd import figures, worker_questions
from agentd.figures import FigureCollector, process_figures
from agentd.worker_questions import WorkerQuestions
from rlinf_actors.wire.figure_values import DiskFigures, FigureQuestion, NodeFigures, WorkerFigures
from rlinf_actors.wire.values import ResourceReport
from rlinf_actors.wire.worker_questions import AskWorker, WorkerAnswered


class Scene:
    """A node with worker "a" of job "ann", whose process is this one, and "b" of job "bob", which never ran."""

    def __init__(self, place: Path, resources=()) -> None:
        loop = asyncio.get_running_loop()
        self.asked: list[AskWorker] = []
        self.template = SimpleNamespace(send=self.asked.append)
        self.pidfd = os.pidfd_open(os.getpid())
        self.workers = {"a": self.worker("ann", os.getpid(), self.pidfd), "b": self.worker("bob")}
        self.questions = WorkerQuestions(loop, self.workers, lambda id: "it is silent")
        self.site = SimpleNamespace(
            run_dir=place, rules=SimpleNamespace(log_dir=str(place)), resources=resources, environment=dict
        )
        self.figures = FigureCollector(loop, self.workers, self.questions, self.site)
        self.answers: asyncio.Queue[NodeFigures] = asyncio.Queue()

    def worker(self, namespace: str, pid: int = 0, pidfd: int = -1) -> SimpleNamespace:
        spec = SimpleNamespace(namespace=namespace)
        return SimpleNamespace(spec=spec, up=True, template=self.template, pid=pid, pidfd=pidfd)

    async def ask(self, namespace: str | None = None, answering: str = "ab") -> NodeFigures:
        self.figures.ask(FigureQuestion(namespace), self.answers.put_nowait)
        await asyncio.sleep(0)
        for packet in self.asked:
            if packet.id in answering:
                shown = WorkerAnswered(packet.id, packet.request, WorkerFigures("lie", queued=7))
                self.questions.answered(self.template, shown)
        return await self.answers.get()

    def close(self) -> None:
        self.figures.close()
        self.questions.close()
        os.close(self.pidfd)


@pytest.fixture
async def scene(tmp_path):
    scene = Scene(tmp_path)
    yield scene
    scene.close()


async def test_answer_has_the_node_its_disks_and_each_worker(scene):
    found = await scene.ask()
    assert [(one.id, one.queued) for one in found.workers] == [("a", 7), ("b", 7)]
    own, never = (one.process for one in found.workers)
    assert own.rss_bytes > 1 << 20
    assert own.threads >= 1
    assert own.descriptors > 3
    assert never is None
    assert found.agentd.cpu_s > 0
    assert 0 < found.memory_free_bytes < found.memory_bytes
    assert found.cpu_s > 0
    assert {disk.purpose for disk in found.disks} == {"run", "logs", "memory"}
    assert all(0 <= disk.free_bytes <= disk.total_bytes for disk in found.disks)


async def test_all_who_ask_share_one_collection_and_see_their_job_only(scene):
    (every, of_ann), packets = [await scene.ask(), await scene.ask("ann")], list(scene.asked)
    assert [one.id for one in every.workers] == ["a", "b"]
    assert [one.id for one in of_ann.workers] == ["a"]
    assert len(packets) == 2  # one for each worker


async def test_a_silent_worker_is_named_and_the_others_are_shown(scene, monkeypatch):
    monkeypatch.setattr(worker_questions, "ANSWER_S", 0.0)
    found = await scene.ask(answering="a")
    assert [(one.queued, one.fault) for one in found.workers] == [(7, ""), (0, "it is silent")]


async def test_a_file_system_that_hangs_delays_no_answer_and_is_asked_once(scene, monkeypatch):
    monkeypatch.setattr(figures, "READ_S", 0.01)
    monkeypatch.setattr(figures, "COLLECT_S", 0.0)
    hangs, asked = threading.Event(), []

    def disks(places):
        asked.append(places)
        hangs.wait(30)
        return [DiskFigures("run", "/run")]

    monkeypatch.setattr(figures, "_disks", disks)
    try:
        assert [(await scene.ask()).disks for _ in range(2)] == [[], []]
        assert len(asked) == 1
    finally:
        hangs.set()


def test_memory_of_accelerators_is_that_of_all_processes_of_a_worker(tmp_path):
    env = {**os.environ, "RLINF_ACTORS_WORKER": "b"}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        child.stdin.write(b"up\n")
        child.stdin.flush()
        child.stdout.readline()  # from here on its environment can be read
        held = {os.getpid(): 5, child.pid: 7, 1: 100}
        assert figures._of_workers(held, {"a": (os.getpid(), -1), "b": (0, -1)}) == {"a": 5, "b": 7}
        assert figures._of_workers(held, {"c": (0, -1)}) == {}, "unknown"


async def test_accelerators_are_measured_by_a_child_of_the_probe(tmp_path):
    """Without a GPU the vendor's library is missing: the child says so, and the node has no figures of devices."""
    scene = Scene(tmp_path, [ResourceReport("NV_GPU", []), ResourceReport("Franka", [])])
    try:
        assert (await scene.ask()).devices == []
        reading = scene.figures._reading
        assert reading is not None
        await reading
        assert list(scene.figures._devices) == ["NV_GPU"]
    finally:
        scene.close()


def test_an_ended_process_has_no_figures():
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert process_figures(pid) is None
