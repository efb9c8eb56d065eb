"""`rlinf-actors logs`: the output of living and dead workers of any node, on a terminal and in a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pace
import pytest
from cli_kit import node
from msgspec.structs import replace

from agentd import log_reader
from rlinf_actors import NodePlacementStrategy, Worker, WorkerDiedError
from rlinf_actors.cli import app
from rlinf_actors.cli.log_reading import merge
from rlinf_actors.cli.log_sources import Part, Source, chosen
from rlinf_actors.cli.logs_command import _readings, _Shown, _Wanted
from rlinf_actors.model.log_lines import SlicedLines
from rlinf_actors.wire.log_values import MARK, MARKS, LogFile, LogMark, LogQuestion
from rlinf_actors.wire.node_questions import AskNode, NodeAnswered

OLD, NEW = "a" * 8, "b" * 8
EVIL = "a\x1b[2J\x9b1m\u202e"


class Talker(Worker):
    def say(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)

    def die(self) -> None:
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)


@pytest.mark.live
def test_output_of_living_and_dead_workers_is_shown(local_cluster, monkeypatch, capsys):
    local = local_cluster(num_nodes=2)
    began = time.time()
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)

    def logs(*arguments: str, code: int | None = 0) -> list[str]:
        found = app.run(["logs", *arguments])
        assert code in (found, None)
        return capsys.readouterr().out.splitlines()

    with local.cluster(namespace="cell", num_nodes=2) as cluster:
        group = Talker.create_group().launch(
            cluster, NodePlacementStrategy([0, 1]), name="env", disable_distributed_log=True
        )
        group.say("one", "two", EVIL).wait()
        said = ["one", "two", "a\\x1b[2J\\x9b1m\\u202e"]
        assert pace.again_like(lambda: logs("env:1"), said) == said  # the template writes it to the file
        assert logs("env:1", "-n", "1") == ["a\\x1b[2J\\x9b1m\\u202e"]
        followed = subprocess.Popen(
            [sys.executable, "-m", "rlinf_actors.cli.main", "logs", "-f", "env:0", "--json", "-n", "0"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        while not logs("env:0", "--json", "--lines", "all"):
            pass
        with pytest.raises(WorkerDiedError):
            group.execute_on(1).die().wait()
        said = threading.Event()
        lines: list[dict[str, Any]] = []

        def follow() -> None:
            assert followed.stdout is not None
            for line in followed.stdout:
                lines.append(json.loads(line))
                said.set()

        reader = threading.Thread(target=follow)
        reader.start()
        while not said.wait(0.05):  # until its question waits for output, which no process is told
            group.execute_on(0).say("three").wait()
        local.kill_agent(0)  # and the head, while the command waits for output
        local.restart_agent(0)
        group.execute_on(0).say("four").wait()
        while not (dead := logs("--job", "cell", "--stderr", "env:1", code=None)):
            pass  # its node is not back yet
        assert dead == ["last words"]
        (found,) = [json.loads(line) for line in logs("--job", "cell", "--stderr", "--json")]
        assert (found["job"], found["worker"], found["stream"], found["text"]) == ("cell", "env:1", "err", "last words")
        group.shutdown()
        reader.join()
        assert followed.wait() == 0
        assert followed.stdout is not None
        followed.stdout.close()
        assert {(one["worker"], one["stream"]) for one in lines} == {("env:0", "out")}
        said_last = [one["text"] for one in lines]
        assert said_last == ["three"] * (len(said_last) - 1) + ["four"]
    # the job has ended
    assert [line.partition("] ")[2] for line in logs("env", "--since", "1h")][:3] == [
        "one",
        "two",
        "a\\x1b[2J\\x9b1m\\u202e",
    ]
    assert app.run(["logs", "env", "--since", "2099-01-01T00:00"]) == 0
    assert capsys.readouterr() == ("", "there is no output of 'env' since that time\n")
    assert app.run(["logs", "--node", "1"]) == 0
    out, err = capsys.readouterr()
    assert ("last words" in out, "is registered" in out, err) == (True, True, "")
    os.unlink(os.path.join(local.nodes[1].run_dir, "agentd.log"))
    assert app.run(["logs", "--node", "1"]) == 0
    out, err = capsys.readouterr()
    assert "last words" in out
    assert "the agentd of node 1 has no log file: its log is in the journal" in err
    with local.cluster(namespace="cell", num_nodes=2) as cluster:  # another job of that name appends to the files
        group = Talker.create_group().launch(
            cluster, NodePlacementStrategy([0, 1]), name="env", disable_distributed_log=True
        )
        group.say("four").wait()
        for name in ("env:0", "env:1"):
            look = partial(logs, name, "--job-id", "last", code=None)
            assert pace.again_like(look, ["four"]) == ["four"]
        first, *_, last = (json.loads(line) for line in logs("env:1", "--json") if '"out"' in line)
        assert began <= first["at"] < last["at"] <= time.time()
        assert first["job_id"] != last["job_id"]
        assert logs("env:1", "--job-id", first["job_id"], "-n", "1") == ["[stderr] last words"]
        assert logs("env:1", "--job-id", "01234567", code=64) == []
        assert app.run(["logs", "env:1", "-n", "2"]) == 0
        shown, note = capsys.readouterr()
        heads = ("== env:1@", "[stderr] last words", "== env:1@", "four")
        assert all(line.startswith(head) for line, head in zip(shown.splitlines(), heads, strict=True)), shown
        ids = [line.partition(": job cell, id ")[2][:8] for line in shown.splitlines() if line.startswith("== ")]
        assert ids == [first["job_id"], last["job_id"]]
        assert "2 jobs 'cell' have written this output" in note
        following = subprocess.Popen(
            [sys.executable, "-m", "rlinf_actors.cli.main", "logs", "-f", "env", "-n", "2", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert following.stdout is not None
        shown = "".join(following.stdout.readline() for _ in range(4))
        assert [shown.count(text) for text in ("last words", "four")] == [1, 3]
        local.kill_node(1)
        group.execute_on(0).say("five").wait()
        assert '"five"' in following.stdout.readline()
    out, err = following.communicate()
    assert (following.returncode, out) == (1, "")
    assert "node node1 is lost, last seen " in err
    assert "not all log files were read: those of 1 node were not" in err
    for arguments, said in ((["env"], "four"), (["env:1"], ""), (["--node", "1"], "")):
        assert app.run(["logs", *arguments]) == 1
        out, err = capsys.readouterr()
        assert (said in out, "node1 (lost, last seen " in err) == (True, True), (out, err)
    assert logs("nope", code=1) == []
    assert logs("--node", "nope", code=64) == []


@pytest.mark.live
def test_output_is_shown_on_a_terminal(local_cluster, monkeypatch, capsys):
    local = local_cluster(num_nodes=1)
    env = {**os.environ, **local.driver_env, "TERM": "xterm"}
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    with local.cluster(namespace="cell") as cluster:
        group = Talker.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="env")
        group.say(EVIL).wait()

        def shown_lines() -> int:
            assert app.run(["logs", "env"]) == 0
            return len(capsys.readouterr().out.splitlines())

        assert pace.again_like(shown_lines, 2) == 2  # the template writes them to the files
        ours, theirs = os.openpty()
        done = subprocess.run(
            [sys.executable, "-m", "rlinf_actors.cli.main", "logs", "env"],
            stdin=theirs,
            stdout=theirs,
            env=env,
            check=False,
        )
        shown = os.read(ours, 4096).decode()
        os.close(theirs)
        os.close(ours)
        assert done.returncode == 0
        assert shown.count("a\\x1b[2J\\x9b1m\\u202e\r\n") == 2
        assert not {"\x1b", "\x9b", "\u202e"} & set(shown)


def test_lines_of_slices_are_whole_and_only_the_last_are_kept():
    shown: list[tuple[str, str | None]] = []
    lines: SlicedLines[str] = SlicedLines(lambda *line: shown.append(line), 3)
    for part, marks in (
        (b"a\nb", []),
        (b"b\nc\r\n10 %\r20", [(-9, "one"), (2, "two"), (5, "three")]),
        (b" %\ncut", [(-4, "three"), (3, "four")]),
    ):
        lines.feed(part, marks)
    assert shown == []
    lines.end()
    assert shown == [("c", "two"), ("20 %", "three"), ("cut", "four")]
    lines.feed(b"after\n")
    assert shown[-1] == ("after", None)


@pytest.mark.parametrize(
    ("id", "running", "spans"),
    [
        ("", False, [(0, 50, True), (0, 90, True)]),
        (OLD, False, [(20, 50, True), (0, 30, False)]),
        (NEW, False, [(50, 50, False), (30, 90, True)]),
        ("0" * 8, True, [(50, 50, True), (90, 90, True)]),  # it has written nothing yet
    ],
)
def test_the_output_of_one_job_is_found_in_both_parts_of_a_file(id, running, spans):
    parts = [
        Part(50, [LogMark(0, 1.0, "f" * 8), LogMark(20, 2.0, OLD)]),
        Part(90, [LogMark(0, 3.0, OLD), LogMark(30, 4.0, NEW)]),
    ]
    assert [part.span(id, running) for part in parts] == spans


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a group"),
        (["env", "--since", "7"], "'7' is neither an age"),
        (["env", "--since", "25:99"], "'25:99' is neither an age"),
        (["env", "-n", "many"], "'many' is neither a number nor 'all'"),
        (["env", "--job-id", "first"], "'first' is neither 'last' nor an id of eight digits"),
    ],
)
def test_wrong_options_are_named(shown, arguments, said):
    code, _, err = shown("logs", *arguments)
    assert (code, said in err) == (64, True)


class FilesOfNode:
    """Answers an observer's questions for the log files of a directory as the agentd of their node does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def request(self, body: AskNode, timeout: float) -> NodeAnswered:
        assert isinstance(body.question, LogQuestion)
        place = log_reader._Place("cell", str(self.path / body.question.name))
        return NodeAnswered(log_reader._read(place, body.question))


def written(path: Path, *lines: tuple[float, str]) -> Source:
    """Write a log file whose lines have marks, and return what the command reads."""
    offset = 0
    with path.open("w") as file, Path(f"{path}{MARKS}").open("wb") as marks:
        for at, line in lines:
            if at:
                marks.write(MARK.pack(at, offset, OLD.encode()))
            offset += file.write(f"{line}\n")
    rank, stream = int(path.stem.rpartition("-")[2]), path.suffix[1:]
    parts = {path.name: Part(offset, [LogMark(0, lines[0][0], OLD)])}
    return Source(node(rank), "cell", "env", str(rank), stream, parts, False)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("most", "limit", "last"),
    [(None, None, 11), (20, None, 11), (None, 3, 6), (20, 4, 8), (None, 0, 0)],
)
def test_lines_of_files_are_merged_by_time_and_the_last_of_each_worker_are_kept(tmp_path, most, limit, last):
    out = [(float(at), f"step {at}") for at in (1, 3, 5)]
    err = [(2.0, "err 2"), (4.0, "err 4"), (0.0, "Traceback"), (6.0, "err 6 " + 30 * "x")]
    other = [(2.0, "other 2"), (0.0, "other 2 again"), (4.5, "other 4.5" + 900 * "x"), (0.5, "clock was set back")]
    sources = [written(tmp_path / name, *lines) for name, lines in (
        ("env-0.out", out), ("env-0.err", err), ("env-1.out", other),
    )]  # fmt: skip
    found: list[str] = []

    async def read() -> None:
        files: Any = FilesOfNode(tmp_path)
        wanted = _Wanted(False, 0.0, limit, "", False, False)
        shown = _Shown(wanted, True, [])
        readings = await _readings(files, sources, wanted, shown)
        for reading in readings:
            reading._most = most or reading._most
        await merge(readings, lambda reading, line: found.append(line.text), shown.fails, finish=True)
        assert shown.failed == {}

    asyncio.run(read())
    every = [
        "step 1", "err 2", "other 2", "other 2 again", "step 3", "err 4", "Traceback", "other 4.5" + 900 * "x",
        "clock was set back", "step 5", "err 6 " + 30 * "x",
    ]  # fmt: skip
    theirs = [line for line in every if "other" in line or "clock" in line]
    mine = [line for line in every if line not in theirs]
    kept = every if limit is None else [*mine[len(mine) - limit :], *theirs[len(theirs) - limit :]]
    assert (found, len(found)) == ([line for line in every if line in kept], last)


def test_a_file_that_two_agentds_of_one_machine_name_is_shown_once():
    one, two = (replace(node(rank), report=replace(node(rank).report, hostname="lab")) for rank in (0, 1))
    old, new = LogFile("job", "env-0.out.1", 3, 1.0, inode=7), LogFile("job", "env-0.out", 3, 2.0, inode=8)
    other = LogFile("job", "env-1.out", 3, 1.0, inode=8)  # of a machine with the same name
    files = [(one, old), (one, new), (two, old), (two, replace(new, running=True)), (two, other)]
    found = [(source.worker, source.node.rank, list(source.parts)) for source in chosen(files, "env", False)]
    assert found == [("env:0", 1, ["env-0.out.1", "env-0.out"]), ("env:1", 1, ["env-1.out"])]
