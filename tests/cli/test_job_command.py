"""`rlinf-actors job list|show|stop`, and what a driver says of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from cli_kit import example_status
from msgspec.structs import replace
from terminal import terminal

from rlinf_actors import GroupClosedError, NodePlacementStrategy, Worker, WorkerGroup
from rlinf_actors.cli import app
from rlinf_actors.wire.program import DriverState, Program

DRIVER = DriverState("d1", "job-1", 7, 0, Program("ann", "gpu-1", "/home/ann/train.py", 1000.0), "ann")


class Pid(Worker):
    def pid(self) -> int:
        return os.getpid()


def status_with(*drivers: DriverState, **more):
    return replace(example_status(), drivers=list(drivers), at=1000.0 + 3 * 3600, **more)


def test_jobs_are_listed_with_who_runs_what(shown):
    code, out, _ = shown("job", "list", status=status_with(DRIVER))
    assert code == 0
    assert out.split("\n")[1].split("  ")[0] == "job-1"
    for text in ("ann's train.py", "gpu-1", "3 h", "1 gone, 1 running"):
        assert text in out


def test_a_job_without_a_driver_and_one_without_a_group_are_listed(shown):
    other = replace(DRIVER, namespace="job-2", program=Program())
    _, out, _ = shown("job", "list", "--json", status=status_with(other))
    jobs = {job["name"]: job for job in json.loads(out)}
    assert (jobs["job-1"]["drivers"], [group["name"] for group in jobs["job-1"]["groups"]]) == ([], ["greeters"])
    assert (jobs["job-2"]["groups"], jobs["job-2"]["drivers"][0]["started"]) == ([], None)
    _, out, _ = shown("job", "list", status=status_with(other))
    assert "none (detached)" in out
    assert "a driver" in out


def test_a_job_is_shown_with_drivers_groups_and_robots(shown):
    _, out, _ = shown("job", "show", "job-1", status=status_with(DRIVER))
    assert "ann's train.py (pid 7 on gpu-1, started 3 h ago), key ann: /home/ann/train.py" in out
    assert "greeters: hello:Greeter, running, 1 gone, 1 running" in out
    assert "Arm 1: group arms, 5 min" in out
    assert "Arm 2" not in out  # another job's


def test_an_unknown_job_is_refused_with_the_names_that_there_are(shown):
    code, _, err = shown("job", "show", "nope", status=status_with(DRIVER))
    assert (code, "there is no job 'nope'; there are: job-1; what it left" in err) == (64, True)
    assert "`rlinf-actors events --job nope`, `rlinf-actors logs --job nope`" in err.replace("\n", " ")


def test_status_shows_drivers_and_counts_the_other_clients(shown):
    clients = ["driver d1 ...", "worker w0 ...", "worker w1 ..."]
    _, out, _ = shown("status", status=status_with(DRIVER, clients=clients))
    assert "drivers   ann's train.py (pid 7 on gpu-1, started 3 h ago): job job-1" in out
    assert "2 workers and children of workers" in out


def test_text_of_a_hostile_driver_is_shown_harmless(shown):
    hostile = replace(DRIVER, program=Program("a\x1b[2J", "h\x9b1m", "/x\r\n/t\u202e.py", 1.0))
    for words in (["job", "list"], ["job", "show", "job-1"], ["status"]):
        _, out, _ = shown(*words, status=status_with(hostile))
        assert not {"\x1b", "\x9b", "\r", "\u202e"} & set(out), words


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("/a/train.py", "ann's train.py"),
        ("-m pkg.train", "ann's python -m pkg.train"),
        ("-c", "ann's python -c"),
        ("", "ann's python"),
    ],
)
def test_a_program_is_named_after_its_user_and_script(script, text):
    assert str(Program("ann", "gpu-1", script)) == text
    assert str(Program()) == ""


@pytest.mark.parametrize(
    ("arguments", "script"),
    [(["train.py"], "{here}/train.py"), (["-m", "train"], "-m train"), (["-c", "import train; train.say()"], "-c")],
)
def test_a_process_knows_its_script(tmp_path, arguments, script):
    (tmp_path / "train.py").write_text(
        "from rlinf_actors.runtime.this_program import this_program\n"
        "def say(): one = this_program(); print(one.script, one.user, one.started, sep='|')\n"
        "if __name__ == '__main__': say()\n"
    )
    done = subprocess.run(
        [sys.executable, *arguments, "--secret"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    said, user, started = done.stdout.strip().split("|")
    assert said == script.format(here=tmp_path)
    me = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    assert user == me
    assert (tmp_path / "train.py").stat().st_mtime - 1 <= float(started)


@pytest.mark.live
def test_a_job_is_shown_and_ended_while_its_driver_goes_on(local_cluster, monkeypatch, capsys):
    local = local_cluster(num_nodes=1)
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    with local.cluster(namespace="cell") as cluster:
        Pid.create_group().launch(cluster, NodePlacementStrategy([0]), name="left")
        Pid.create_group().launch(cluster, NodePlacementStrategy([0]), name="right")
        group = WorkerGroup.from_group_name(Pid, "left")
        assert app.run(["job", "show", "cell", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [group["name"] for group in found["groups"]] == ["left", "right"]
        (driver,) = found["drivers"]
        assert (driver["pid"], driver["node_rank"]) == (os.getpid(), 0)
        assert app.run(["events"]) == 0
        assert f"({driver['text']} on {driver['hostname']}), process {os.getpid()}" in capsys.readouterr().out
        capsys.readouterr()
        with terminal("job", "stop", "cell") as asked:
            asked.until("End 2 groups of job cell? [y/N]: ")
            asked.type("n\n")
            assert asked.end() == 130, asked.shown
        assert app.run(["job", "stop", "cell", "--yes", "--reason", "lunch", "--json"]) == 0
        out, said = capsys.readouterr()
        stopped = json.loads(out)
        assert ([group["name"] for group in stopped["job"]["groups"]], stopped["failed"]) == (["left", "right"], {})
        assert "group left of job cell has ended" in said
        assert "group right of job cell has ended" in said
        assert f"its driver goes on, and may launch again: {driver['text']}" in said
        with pytest.raises(GroupClosedError, match="ended it: lunch"):
            group.pid().wait()
        Pid.create_group().launch(cluster, NodePlacementStrategy([0]), name="left").pid().wait()
