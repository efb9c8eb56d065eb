"""The traces of a node's workers: kept after their ends, sent in slices, and removed at last."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentd import traces
from agentd.traces import TraceFiles
from agentd.users import User, as_user
from agentd.worker_questions import WorkerQuestions
from rlinf_actors.tracing.clocks import Sample
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.node_questions import AgentAnswered
from rlinf_actors.wire.trace_values import MAX_TRACE_SLICE, SwitchedWorkers, TraceQuestion, TraceSwitch
from rlinf_actors.wire.values import WorkerSpec
from rlinf_actors.wire.worker_questions import AskWorker, RecordTrace, TraceRecorded, WorkerAnswered


def spec(id: str, namespace: str = "job", events: int = 1024) -> WorkerSpec:
    return WorkerSpec(id, "g", namespace, 0, 1, 0, {}, trace_events=events)


class Template:
    """Takes the packets for its workers. `answer` has the workers answer all that were not answered before."""

    def __init__(self) -> None:
        self.sent: list[AskWorker] = []
        self.send = self.sent.append


class Scene:
    """The traces of workers that one template has forked."""

    def __init__(self, loop: asyncio.AbstractEventLoop, run_dir: Path) -> None:
        self.template = Template()
        self.workers: dict[str, Any] = {}
        self.questions = WorkerQuestions(loop, self.workers, lambda id: "it is silent")
        self.files = TraceFiles(loop, run_dir, self.workers, self.questions)
        self.answers: list[SwitchedWorkers] = []

    def start(self, id: str, namespace: str = "job", events: int = 0, up: bool = True) -> Any:
        worker = SimpleNamespace(spec=spec(id, namespace, events), up=up, template=self.template, user=None)
        worker.begins = self.files.of_new_worker(worker.spec)
        self.workers[id] = worker
        return worker

    def switch(self, events: int, namespace: str = "job") -> None:
        self.files.switch(TraceSwitch(namespace, events), self.answers.append)

    def answer(self, fault: str = "") -> list[tuple[str, RecordTrace]]:
        asked = [(packet, cast("RecordTrace", packet.question)) for packet in self.template.sent]
        self.template.sent.clear()
        for packet, question in asked:
            if question.path and not Path(question.path).exists():
                write(question.path)
            answer = WorkerAnswered(packet.id, packet.request, TraceRecorded(packet.id, fault))
            self.questions.answered(cast("Any", self.template), answer)
        return [(packet.id, question) for packet, question in asked]


def made(loop: asyncio.AbstractEventLoop, run_dir: Path) -> TraceFiles:
    return Scene(loop, run_dir).files


@pytest.fixture
def scene(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(loop, tmp_path)
    yield scene
    scene.questions.close()
    scene.files.close()


def write(path: str) -> None:
    Path(path).write_bytes(b"x")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def files(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> TraceFiles:
    return made(loop, tmp_path)


def test_worker_that_is_not_traced_gets_no_file(files: TraceFiles, tmp_path: Path) -> None:
    assert files.of_new_worker(spec("w-0", events=0)).path == ""
    assert list(tmp_path.iterdir()) == []


def test_trace_of_an_ended_worker_is_sent_in_slices_with_the_clock(files: TraceFiles) -> None:
    content = b"x" * (MAX_TRACE_SLICE + 10)
    Path(files.of_new_worker(spec("w-0")).path).write_bytes(content)
    files.ended(spec("w-0"))
    listing = files.answer(TraceQuestion("job"), [Sample(1.0, 2.0, 0.5)])
    assert (listing.names, listing.clock) == (["w-0"], [(1.0, 2.0, 0.5)])
    got = b""
    while part := files.answer(TraceQuestion("job", "w-0", len(got)), []).data:
        got += part
    assert got == content


@pytest.mark.parametrize("name", ["../../etc/passwd", "w-9", ".", "/etc/passwd"])
def test_only_names_of_traces_are_read(files: TraceFiles, name: str) -> None:
    Path(files.of_new_worker(spec("w-0")).path).write_bytes(b"x")
    answer = files.answer(TraceQuestion("job", name), [])
    assert answer.data == b""
    assert "there is no trace" in answer.fault


@pytest.mark.timeout(20)
def test_what_is_no_file_in_a_traces_place_does_not_hold_agentd(files: TraceFiles, tmp_path: Path) -> None:
    """A worker can put a FIFO there, whose reader would wait for ever, or a link."""
    trace = Path(files.of_new_worker(spec("w-0")).path)
    (tmp_path / "secret").write_text("of agentd's user")
    os.mkfifo(trace)
    trace.with_name("w-1").symlink_to(tmp_path / "secret")
    for name in ("w-0", "w-1"):
        answer = files.answer(TraceQuestion("job", name), [])
        assert (answer.data, bool(answer.fault)) == (b"", True)


def test_what_a_user_puts_beside_its_traces_does_not_end_agentd(files: TraceFiles, tmp_path: Path) -> None:
    """An exception in a callback ends agentd, and so the robots of all users."""
    trace = Path(files.of_new_worker(spec("w-0")).path)
    (trace.parent / "directory" / "in it").mkdir(parents=True)
    os.close(os.open(os.fsencode(trace.parent) + b"/\xff", os.O_CREAT))
    write(str(trace))
    listing = files.answer(TraceQuestion("job"), [])
    assert listing.names == ["directory", "w-0"]
    control_codec.encode(control_codec.Notice(AgentAnswered("1", listing)))
    assert files.answer(TraceQuestion("job", "directory"), []).fault
    files.ended(spec("w-0"))
    files.answer(TraceQuestion("job", drop=True), [])
    assert [path.name for path in trace.parent.iterdir()] == ["directory"]
    trace.parent.joinpath("directory", "in it").rmdir()
    trace.parent.joinpath("directory").rmdir()
    trace.parent.rmdir()
    trace.parent.symlink_to(trace.parent)
    files.answer(TraceQuestion("job", drop=True), [])


def test_job_sees_only_its_own_traces(files: TraceFiles) -> None:
    Path(files.of_new_worker(spec("w-0", "one")).path).write_bytes(b"x")
    assert files.answer(TraceQuestion("two"), []).names == []
    assert files.answer(TraceQuestion("../trace/one"), []).names == []


def test_drop_removes_the_traces_of_ended_workers_only(files: TraceFiles, tmp_path: Path) -> None:
    for id in ("w-0", "w-1"):
        Path(files.of_new_worker(spec(id)).path).write_bytes(b"x")
        Path(files.of_new_worker(spec(id)).path + "_0").write_bytes(b"of a child")
    files.ended(spec("w-0"))
    files.answer(TraceQuestion("job", drop=True), [])
    assert files.answer(TraceQuestion("job"), []).names == ["w-1", "w-1_0"]
    files.ended(spec("w-1"))
    files.answer(TraceQuestion("job", drop=True), [])
    assert list((tmp_path / "trace").iterdir()) == []


def test_traces_that_nobody_collects_are_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "KEPT_S", 0.0)

    async def run() -> None:
        files = made(asyncio.get_running_loop(), tmp_path)
        write(files.of_new_worker(spec("w-0")).path)
        files.ended(spec("w-0"))
        await asyncio.sleep(0)
        files.started(spec("w-1"))  # another worker of the job came in time
        await asyncio.sleep(0.01)
        assert files.answer(TraceQuestion("job"), []).names == ["w-0"]
        files.ended(spec("w-1"))
        await asyncio.sleep(0.01)
        assert files.answer(TraceQuestion("job"), []).names == []

    asyncio.run(run())


def test_next_agentd_keeps_the_traces_of_running_workers_only(
    files: TraceFiles, loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    for job in ("old", "runs"):
        Path(files.of_new_worker(spec("w-0", job)).path).write_bytes(b"x")
    later = made(loop, tmp_path)
    later.started(spec("w-0", "runs"))
    later.adopted()
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["runs"]
    later.close()
    assert not (tmp_path / "trace").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_next_agentd_removes_the_traces_of_a_users_earlier_jobs(loop: asyncio.AbstractEventLoop) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o711)
        run_dir = Path(place, "lab")
        run_dir.mkdir(mode=0o700)
        os.chown(run_dir, 61021, 61030)
        user = User("lab", 61021, 61030, (61030,), "/", "/bin/sh", str(run_dir), "/")
        files = made(loop, Path(place))
        for job in ("old", "runs"):
            with as_user(user):
                write(files.of_new_worker(spec("w-0", job), user).path)
        later = made(loop, Path(place))
        later.started(spec("w-0", "runs"), user)
        later.adopted([user])
        assert os.listdir(run_dir / "trace") == ["runs"]
        later.release()


# --- traces of running jobs ---


def test_switch_reaches_the_workers_of_the_job_and_is_confirmed_by_them(scene: Scene) -> None:
    scene.start("w-0")
    scene.start("w-1")
    scene.start("other", "another job")
    scene.switch(2048)
    assert scene.answers == []
    assert [(id, one.events) for id, one in scene.answer()] == [("w-0", 2048), ("w-1", 2048)]
    assert scene.answers == [SwitchedWorkers(2)]
    assert scene.files.answer(TraceQuestion("job"), []).names == ["w-0_t1", "w-1_t1"]
    scene.switch(0)
    assert [one.path for _, one in scene.answer()] == ["", ""]


def test_worker_that_cannot_record_is_named(scene: Scene) -> None:
    scene.start("w-0")
    scene.switch(1024)
    scene.answer("No space left on device")
    assert scene.answers == [SwitchedWorkers(0, 1, ["g:0: No space left on device"])]


def test_worker_that_starts_later_records_from_its_start_until_the_job_is_switched_off(scene: Scene) -> None:
    scene.switch(1024)
    worker = scene.start("w-0", up=False)
    assert (worker.begins.path.rpartition("/")[2], worker.begins.events) == ("w-0_t1", 1024)
    scene.switch(0)  # while its process does not listen yet
    worker.up = True
    scene.files.worker_up(worker)
    assert [one.path for _, one in scene.answer()] == [""]
    assert scene.start("w-1").begins == RecordTrace()


def test_worker_that_starts_while_the_job_is_switched_on_records_too(scene: Scene) -> None:
    scene.start("w-0", up=False)  # its process does not listen yet
    scene.switch(1024)
    assert scene.answers == [SwitchedWorkers()]
    scene.workers["w-0"].up = True
    scene.files.worker_up(scene.workers["w-0"])
    ((id, asked),) = scene.answer()
    assert (id, asked.events, bool(asked.path)) == ("w-0", 1024, True)


def test_new_switch_begins_new_files_and_a_repeated_one_changes_nothing(scene: Scene) -> None:
    scene.start("w-0")
    scene.switch(1024)
    scene.answer()
    scene.switch(1024)
    assert [one.path.rpartition("/")[2] for _, one in scene.answer()] == ["w-0_t1"]
    scene.switch(0)
    scene.answer()
    assert scene.files.answer(TraceQuestion("job"), []).names == ["w-0_t1"]  # to be fetched
    scene.switch(1024)
    scene.answer()
    assert scene.files.answer(TraceQuestion("job"), []).names == ["w-0_t2"]


def test_worker_that_records_for_its_driver_goes_on_as_it_is(scene: Scene) -> None:
    worker = scene.start("w-0", events=1024)
    write(scene.files.of_new_worker(worker.spec).path)
    for events in (2048, 0, 2048):
        scene.switch(events)
        assert [one.path for _, one in scene.answer()] == [""]
    assert scene.files.answer(TraceQuestion("job"), []).names == ["w-0"]


def test_recording_of_a_job_ends_with_its_files(scene: Scene, loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    worker = scene.start("w-0")
    scene.switch(1024)
    scene.answer()
    del scene.workers["w-0"]
    scene.files.ended(worker.spec)
    assert scene.files.answer(TraceQuestion("job"), []).names == ["w-0_t1"]
    scene.files.answer(TraceQuestion("job", drop=True), [])
    assert list((tmp_path / "trace").iterdir()) == []
    scene.files.worker_up(scene.start("w-1"))
    assert scene.template.sent == []


def test_next_agentd_keeps_the_files_of_a_switched_job(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    earlier = Scene(loop, tmp_path)
    worker = earlier.start("w-0")
    earlier.switch(1024)
    earlier.answer()
    earlier.questions.close()
    later = Scene(loop, tmp_path)
    later.files.started(worker.spec)
    later.files.adopted()
    assert later.files.answer(TraceQuestion("job"), []).names == ["w-0_t1"]
    later.files.ended(worker.spec)
    later.files.answer(TraceQuestion("job", drop=True), [])
    assert list((tmp_path / "trace").iterdir()) == []


def test_next_agentd_gives_a_switched_worker_a_file_of_another_name(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    """It still records in the one that the next switch removes."""
    earlier = Scene(loop, tmp_path)
    earlier.start("w-0")
    earlier.switch(1024)
    earlier.answer()
    earlier.questions.close()
    (tmp_path / "trace" / "job" / f"w-0_t{'9' * 200}").touch()  # by a user
    later = Scene(loop, tmp_path)
    later.start("w-0")
    later.files.adopted()
    later.switch(1024)
    assert [one.path.rpartition("/")[2] for _, one in later.answer()] == ["w-0_t2"]
