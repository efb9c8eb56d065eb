"""Questions for log files: what is read, what is waited for, and what is no log file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentd.log_reader import LogReader
from rlinf_actors.template.log_pump import LogPump
from rlinf_actors.wire.log_values import (
    MARK,
    MARKS,
    MAX_LOG_FILES,
    MAX_LOG_JOBS,
    MAX_LOG_MARKS,
    LogMark,
    LogQuestion,
    LogSlice,
    file_name,
    job_id,
)
from rlinf_actors.wire.template_protocol import Read

FIRST, SECOND = job_id("a token"), job_id("another")


class Scene:
    """A node with log files of the job "job/1" below *place*; the worker "w-0" of its group "env" runs."""

    def __init__(self, place: Path) -> None:
        self.logs = place / "logs"
        self.job = self.logs / file_name("job/1")
        self.job.mkdir(parents=True)
        self.place = place
        users = SimpleNamespace(all=list)
        site = SimpleNamespace(run_dir=place, rules=SimpleNamespace(log_dir=str(self.logs)), users=users)
        self.workers: dict[str, Any] = {}
        self.told: list[object] = []  # packets for templates
        self.reader = LogReader(asyncio.get_running_loop(), site, self.workers)  # type: ignore[arg-type]
        self.run("w-0", "env-0")
        self._number = 0

    def run(self, id: str, name: str, forward_logs: bool = True) -> None:
        plan = SimpleNamespace(out_path=str(self.job / f"{name}.out"), err_path=str(self.job / f"{name}.err"))
        spec = SimpleNamespace(id=id, namespace="job/1", forward_logs=forward_logs)
        template = SimpleNamespace(send=self.told.append)
        self.workers[id] = SimpleNamespace(spec=spec, plan=plan, user=None, template=template)

    def end(self, id: str) -> None:
        del self.workers[id]
        self.reader.worker_ended(id)

    def write(self, name: str, data: bytes) -> None:
        with open(self.job / name, "ab") as file:
            file.write(data)

    def rotate(self, name: str, data: bytes) -> None:
        """Begin a new file with *data*, before the older part goes, as templates do: its inode is not used again."""
        self.write(f"{name}.new", data)
        os.rename(self.job / name, self.job / f"{name}.1")
        os.rename(self.job / f"{name}.new", self.job / name)

    def ask(self, name: str = "", job: str | None = "job/1", **more: Any) -> asyncio.Future[LogSlice]:
        self._number += 1
        answer: asyncio.Future[LogSlice] = asyncio.get_running_loop().create_future()
        self.reader.ask(str(self._number), LogQuestion(job, name, **more), answer.set_result)
        return answer


@pytest.fixture
async def scene(tmp_path):
    scene = Scene(tmp_path)
    yield scene
    scene.reader.close()


async def test_files_of_living_and_ended_workers_are_listed(scene):
    for name in ("env-0.out", "env-0.out.1", "old-3.err", "env-0.out.marks", "passwd", ".x.out"):
        scene.write(name, b"1234")
    found = (await scene.ask()).files
    assert [(one.namespace, one.name, one.size, one.running) for one in found] == [
        (file_name("job/1"), "env-0.out", 4, True),
        (file_name("job/1"), "env-0.out.1", 4, False),
        (file_name("job/1"), "old-3.err", 4, False),
    ]
    assert (await scene.ask(job="other")).files == []
    (scene.place / "agentd.log").write_bytes(b"daemon\n")
    assert [one.name for one in (await scene.ask(job=None)).files] == [
        "agentd.log", "env-0.out", "env-0.out.1", "old-3.err",
    ]  # fmt: skip
    assert (await scene.ask("agentd.log", None)).data == b"daemon\n"


async def test_a_job_reads_neither_other_jobs_nor_other_files(scene, tmp_path):
    (tmp_path / "secret.out").write_bytes(b"x")
    scene.write("env-0.out", b"x")
    (scene.job / "link-0.out").symlink_to(tmp_path / "secret.out")
    os.mkfifo(scene.job / "fifo-0.out")
    for name in ("../secret.out", "/etc/passwd", "passwd", "agentd.log", "", "link-0.out", "fifo-0.out", ".x.out"):
        if name:
            answer = await scene.ask(name)
            assert (answer.data, bool(answer.fault)) == (b"", True), name
    assert (await scene.ask("env-0.out", "other")).fault == "there is no log file 'env-0.out' of job 'other'"
    assert (await scene.ask("env-0.out", None)).fault


async def test_a_file_is_read_in_slices_to_its_end(scene):
    content = os.urandom(200_000)
    scene.write("old-0.out", content)
    got, answer = b"", LogSlice()
    while not answer.ended:
        answer = await scene.ask("old-0.out", offset=answer.offset, inode=answer.inode)
        got += answer.data
    assert got == content


async def test_a_question_waits_for_output_and_for_the_end_of_the_worker(scene):
    scene.write("env-0.out", b"first\n")
    answer = await scene.ask("env-0.out", wait_s=20.0)
    assert answer.data == b"first\n"
    waits = scene.ask("env-0.out", offset=answer.offset, inode=answer.inode, wait_s=20.0)
    other = scene.ask("env-0.err", wait_s=20.0)  # does not exist yet
    assert "No such file" in (await other).fault
    scene.write("env-0.out", b"second\n")
    scene.reader.grew(["w-0"])
    answer = await waits
    assert answer.data == b"second\n"
    waits = scene.ask("env-0.out", offset=answer.offset, inode=answer.inode, wait_s=20.0)
    scene.end("w-0")
    answer = await waits
    assert (answer.data, answer.ended) == (b"", True)
    assert scene.told == []


async def test_a_template_is_asked_for_the_growth_of_files_that_no_driver_gets(scene):
    scene.run("w-1", "env-1", forward_logs=False)
    scene.write("env-1.out", b"")
    waits = scene.ask("env-1.out", wait_s=20.0)
    await scene.ask("env-1.out")
    assert scene.told == [Read("w-1", (0, 0), (0, 0))]
    scene.write("env-1.out", b"now\n")
    scene.reader.grew(["w-1"])
    assert (await waits).data == b"now\n"


async def test_output_while_the_file_is_read_is_not_waited_for(scene):
    scene.write("env-0.out", b"")
    waits = scene.ask("env-0.out", wait_s=20.0)
    await asyncio.sleep(0)  # it is being read, and does not wait yet
    scene.write("env-0.out", b"now\n")
    scene.reader.grew(["w-0"])
    assert (await waits).data == b"now\n"


async def test_a_question_that_waits_too_long_gets_an_empty_answer(scene):
    scene.write("env-0.out", b"x")
    answer = await scene.ask("env-0.out", offset=1, wait_s=0.01)
    assert (answer.data, answer.ended, answer.offset) == (b"", False, 1)


async def test_a_cancelled_question_is_not_answered(scene):
    scene.write("env-0.out", b"")
    waits = scene.ask("env-0.out", wait_s=20.0)
    other = scene.ask("env-0.out", wait_s=0.01)
    await other  # it was read after the first, which waits now
    scene.reader.cancel("1")
    scene.write("env-0.out", b"x")
    scene.reader.grew(["w-0"])
    assert scene.reader._waiting == {}
    assert not waits.done()


async def test_reading_goes_on_over_a_renaming(scene):
    scene.write("env-0.out", b"one\n")
    answer = await scene.ask("env-0.out")
    scene.write("env-0.out", b"two\n")
    scene.rotate("env-0.out", b"three\n")
    got = []
    for _ in range(2):
        answer = await scene.ask("env-0.out", offset=answer.offset, inode=answer.inode)
        got.append((answer.data, answer.lost))
    assert got == [(b"two\n", False), (b"three\n", False)]
    for _ in range(2):
        scene.rotate("env-0.out", b"later\n")
    answer = await scene.ask("env-0.out", offset=answer.offset, inode=answer.inode)
    assert (answer.data, answer.lost) == (b"later\n", True)


async def test_output_since_a_time_is_found_with_its_times_and_jobs(scene, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("rlinf_actors.template.log_pump.time", SimpleNamespace(time=lambda: now[0]))

    def say(job: str, *texts: bytes, limit: int = 0) -> None:
        pump = LogPump(str(scene.job / "old-0.out"), limit, job=job)
        for text in texts:
            os.write(pump.writer, text)
            pump.pump()
            now[0] += 0.6 if text == b"late\n" else 60.0
        pump.close_writer()
        pump.close()

    say(FIRST, b"early\n", b"late\n", b"later\n")
    marks = (scene.job / f"old-0.out{MARKS}").read_bytes()
    assert [at for _, at, _ in MARK.iter_unpack(marks)] == [0, 6]  # at most one for each second
    assert (await scene.ask("old-0.out", since=1030.0)).data == b"late\nlater\n"
    assert (await scene.ask("old-0.out", since=1060.5)).data == b"late\nlater\n"  # one of them may be of 1060.9
    assert (await scene.ask("old-0.out", since=500.0)).data == b"early\nlate\nlater\n"
    os.utime(scene.job / "old-0.out", (2000.0, 2000.0))
    assert (await scene.ask("old-0.out", since=3000.0)).data == b""
    scene.write("plain-0.out", b"without marks\n")
    answer = await scene.ask("plain-0.out", since=1.0)
    assert (answer.data, answer.marks) == (b"without marks\n", [])

    say(SECOND, b"again\n", b"and again\n")
    one, two, three = LogMark(0, 1000.0, FIRST), LogMark(6, 1060.0, FIRST), LogMark(17, 1120.6, SECOND)
    four = LogMark(23, 1180.6, SECOND)
    assert (await scene.ask("old-0.out")).marks == [one, two, three, four]
    assert (await scene.ask("old-0.out", offset=8)).marks == [two, three, four]
    (listed,) = [file for file in (await scene.ask()).files if file.name == "old-0.out"]
    assert listed.jobs == [one, three]
    scene.write(f"old-0.out{MARKS}", MARK.pack(float("nan"), 2**64 - 1, b"\xff") + b"half")  # its user can do that
    assert (await scene.ask("old-0.out")).marks == [one, two, three, four]
    scene.write("odd-0.out", b"all of it\n")
    scene.write(f"odd-0.out{MARKS}", MARK.pack(1e300, 0, FIRST.encode()) + bytes(MARK.size * (MAX_LOG_MARKS + 1)))
    assert (await scene.ask("odd-0.out")).data == b"all of it\n"
    answer = await scene.ask("old-0.out", offset=3)
    say(SECOND, b"rotates\n", limit=10)
    assert (await scene.ask("old-0.out", offset=answer.offset, inode=answer.inode)).data == b"rotates\n"
    assert (await scene.ask("old-0.out", offset=8, inode=answer.inode)).marks[:3] == [two, three, four]
    (rotated,) = (await scene.ask("old-0.out")).marks
    assert rotated == LogMark(0, 1240.6, SECOND)
    (scene.job / "old-0.out").write_bytes(b"")  # marks of what is gone go with it
    say(FIRST, b"new\n")
    assert [mark.at for mark in (await scene.ask("old-0.out")).marks] == [1300.6]


async def test_marks_of_a_long_life_are_found_and_few_are_in_a_message(scene):
    lines = 40_000  # a line each second, for 11 hours
    scene.write("old-0.out", b"%05d\n" * lines % tuple(range(lines)))
    scene.write(f"old-0.out{MARKS}", b"".join(MARK.pack(1000.0 + n, 6 * n, b"%08x" % (n // 900)) for n in range(lines)))
    answer = await scene.ask("old-0.out", since=1000.0 + lines - 10)
    assert answer.data.split()[:2] == [b"39990", b"39991"]
    assert len(answer.marks) == 10
    answer = await scene.ask("old-0.out")
    assert (len(answer.marks), len(answer.data)) == (MAX_LOG_MARKS, 6 * MAX_LOG_MARKS)
    (listed,) = [file for file in (await scene.ask()).files if file.name == "old-0.out"]
    assert [mark.job for mark in listed.jobs] == [f"{n:08x}" for n in range(45 - MAX_LOG_JOBS, 45)]
    assert listed.jobs[-1].at == 1000.0 + 44 * 900


async def test_the_newest_of_very_many_files_are_listed(scene):
    for number in range(MAX_LOG_FILES + 3):
        (scene.job / f"g-{number}.out").touch()
    answer = await scene.ask()
    assert (len(answer.files), answer.more) == (MAX_LOG_FILES, 3)
