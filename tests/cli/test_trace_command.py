"""`rlinf-actors trace start|stop|fetch`: a timeline of a job that runs, whose program knows nothing of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_actors import Channel, NodePlacementStrategy, Worker
from rlinf_actors.cli import app
from rlinf_actors.cli.trace_command import switch_dict
from rlinf_actors.cluster.trace_files import Traced
from rlinf_actors.wire.trace_values import SwitchedWorkers
from tests.tracing.chrome import check

pytestmark = pytest.mark.live


class Env(Worker):
    """Hands observations to the next rank, through a channel and by send()."""

    def step(self, number: int, channel: Channel[int]) -> int:
        if self._rank == 0:
            channel.put(number)
            self.send({"obs": number}, self._group_name, 1)
            return number
        assert channel.get() == number
        return int(self.recv(self._group_name, 0)["obs"])

    def rest(self) -> None:
        """The span of the step before it has ended when this begins."""


class Cell:
    """A cluster of one node, and the command line of another process of its user."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def trace(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        assert app.run(["trace", *arguments, "--json"]) == code
        out = self._capsys.readouterr().out
        return json.loads(out) if out else {}


def read(path: Path) -> tuple[set[tuple[str, str]], set[tuple[str, str, int]]]:
    """The spans of the trace as (process, name), and how many arrows go from one process to another."""
    events = json.loads(path.read_text())["traceEvents"]
    check(events)
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    spans = {(names[one["pid"]], one["name"]) for one in events if one["ph"] == "X"}
    starts = {one["id"]: names[one["pid"]] for one in events if one["ph"] == "s"}
    pairs = [(starts[one["id"]], names[one["pid"]]) for one in events if one["ph"] == "f"]
    return spans, {(*pair, pairs.count(pair)) for pair in pairs}


def test_running_job_is_traced_from_start_to_stop_and_again(local_cluster, monkeypatch, capsys, tmp_path):
    local = local_cluster(num_nodes=2)
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    cell, place = Cell(capsys), NodePlacementStrategy([0, 1])
    with local.cluster(namespace="cell", num_nodes=2) as cluster:
        channel: Channel[int] = Channel.create("items")
        env = Env.create_group().launch(cluster, place, name="env")
        assert env.step(1, channel).wait() == [1, 1]  # before the trace: the receiver counts from another message on
        began = cell.trace("start", "--job", "cell")
        assert (began["workers"], began["drivers"]) == (3, 1)  # two ranks, and the channel's host
        assert cell.trace("start", "--job", "cell", "--events", "5000")["workers"] == 3
        for number in (2, 3):
            assert env.step(number, channel).wait() == [number, number]
        later = Env.create_group().launch(cluster, place, name="later")
        assert later.step(4, channel).wait() == [4, 4]
        for group in (env, later):
            group.rest().wait()
        stopped = cell.trace("stop", "--job", "cell")
        assert (stopped["workers"], stopped["recording"], stopped["faults"]) == (5, False, [])
        assert env.step(5, channel).wait() == [5, 5]
        found = cell.trace("fetch", "--job", "cell", "-o", "first.json")
        assert (found["processes"], found["missing"], found["fallen_out"]) == (6, [], {})
        spans, arrows = read(tmp_path / "first.json")
        assert spans >= {
            ("env:0", "step()"), ("env:0", "send to env:1"), ("env:1", "recv from env:0"),
            ("env:0", "put into channel 'items'"), ("later:1", "step()"),
            ("driver", "env.step()"), ("driver", "wait for step"),
        }  # fmt: skip
        assert {("driver", "env:0", 3), ("driver", "env:1", 3), ("driver", "later:1", 2)} <= arrows
        assert ("env:0", "env:1", 2) in arrows  # of messages 2 and 3
        assert ("later:0", "later:1", 1) in arrows

        # again: a new trace, without the first one's events
        assert cell.trace("start")["workers"] == 5  # the only job
        assert env.step(6, channel).wait() == [6, 6]
        assert cell.trace("stop")["workers"] == 5
        assert cell.trace("fetch")["fallen_out"] == {}
        _, arrows = read(tmp_path / "trace.json")
        assert {one for one in arrows if one[0] == "env:0" and one[1] == "env:1"} == {("env:0", "env:1", 1)}

        assert app.run(["trace", "fetch", "--job", "nope"]) == 64
        assert "there is no job 'nope'; there are: cell" in capsys.readouterr().err
        assert app.run(["trace", "fetch", "-o", "no/trace.json"]) == 64
        assert f"there is no directory {tmp_path}/no" in capsys.readouterr().err
    for name in ("start", "fetch"):
        assert app.run(["trace", name]) == 64
        assert "name the job (--job NAME); there are: none at all" in capsys.readouterr().err


def test_job_that_records_nothing_is_said_to(local_cluster, monkeypatch, capsys, tmp_path):
    local = local_cluster(num_nodes=1)
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    with local.cluster(namespace="cell"):
        assert app.run(["trace", "fetch", "-o", str(tmp_path / "trace.json")]) == 1
    assert "run `rlinf-actors trace start --job cell` first" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_answers_of_nodes_of_one_name_are_all_counted():
    first, second = Traced("a", "node vm", "h"), Traced("b", "node vm", "h")
    answers = [(first, SwitchedWorkers(workers=3)), (second, SwitchedWorkers(workers=2, failed=1, faults=["late"]))]
    found = switch_dict("cell", 1, answers)
    assert (found["workers"], found["failed"], found["faults"]) == (5, 1, ["node vm: late"])
