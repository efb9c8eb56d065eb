"""`rlinf-actors logs`: the output of living and dead workers of any node, on a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from cli_kit import example_status, node
from msgspec.structs import replace

from rlinf_actors import NodePlacementStrategy, Worker, WorkerDiedError
from rlinf_actors.cli import app
from rlinf_actors.cli.logs_command import _chosen
from rlinf_actors.model.log_lines import SlicedLines
from rlinf_actors.wire.log_values import LogFile

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
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)

    def logs(*arguments: str, code: int = 0) -> list[str]:
        assert app.run(["logs", *arguments]) == code
        return capsys.readouterr().out.splitlines()

    with local.cluster(namespace="cell", num_nodes=2) as cluster:
        group = Talker.create_group().launch(
            cluster, NodePlacementStrategy([0, 1]), name="env", disable_distributed_log=True
        )
        group.say("one", "two", EVIL).wait()
        assert logs("env:1") == ["one", "two", "a\\x1b[2J\\x9b1m\\u202e"]
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
        dead = logs("--job", "cell", "--stderr", "env:1")
        assert dead == ["last words"]
        (found,) = [json.loads(line) for line in logs("--job", "cell", "--stderr", "--json")]
        assert (found["job"], found["worker"], found["stream"], found["text"]) == ("cell", "env:1", "err", "last words")
        group.shutdown()
        reader.join()
        assert followed.wait() == 0
        assert followed.stdout is not None
        followed.stdout.close()
        assert {(one["worker"], one["stream"], one["text"]) for one in lines} == {("env:0", "out", "three")}
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
    assert logs("nope", code=1) == []
    assert logs("--node", "nope", code=64) == []


@pytest.mark.live
def test_output_is_shown_on_a_terminal(local_cluster, monkeypatch):
    local = local_cluster(num_nodes=1)
    env = {**os.environ, **local.driver_env, "TERM": "xterm"}
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    with local.cluster(namespace="cell") as cluster:
        group = Talker.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="env")
        group.say(EVIL).wait()
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
    shown: list[str] = []
    lines = SlicedLines(shown.append, 2)
    for part in (b"a\nb", b"b\nc\r\n10 %\r20", b" %\ncut"):
        lines.feed(part)
    assert shown == []
    lines.end()
    assert shown == ["20 %", "cut"]
    lines.feed(b"after\n")
    assert shown[-1] == "after"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a group"),
        (["env", "--since", "7"], "'7' is neither an age"),
        (["env", "--since", "25:99"], "'25:99' is neither an age"),
        (["env", "-n", "many"], "'many' is neither a number nor 'all'"),
    ],
)
def test_wrong_options_are_named(shown, arguments, said):
    code, _, err = shown("logs", *arguments)
    assert (code, said in err) == (64, True)


def test_a_head_of_the_protocol_before_is_not_asked(shown):
    code, _, err = shown("logs", "env", status=replace(example_status(), protocol=6))
    assert (code, "reads no log files: upgrade it" in err) == (64, True)


def test_a_file_that_two_agentds_of_one_machine_name_is_shown_once():
    one, two = (replace(node(rank), report=replace(node(rank).report, hostname="lab")) for rank in (0, 1))
    old, new = LogFile("job", "env-0.out.1", 3, 1.0, inode=7), LogFile("job", "env-0.out", 3, 2.0, inode=8)
    other = LogFile("job", "env-1.out", 3, 1.0, inode=8)  # of a machine with the same name
    files = [(one, old), (one, new), (two, old), (two, replace(new, running=True)), (two, other)]
    found = [(source.worker, source.node.rank, source.sizes) for source in _chosen(files, "env", False)]
    assert found == [("env:0", 1, {"env-0.out.1": 3, "env-0.out": 3}), ("env:1", 1, {"env-1.out": 3})]
