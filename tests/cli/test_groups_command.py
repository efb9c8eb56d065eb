"""`rlinf-actors groups`: detached groups in the listing, and ending a group by its name."""

from __future__ import annotations

import json
import os

import pytest
from cli_kit import example_status
from msgspec.structs import replace
from terminal import terminal

from rlinf_actors import GroupClosedError, NodePlacementStrategy, Worker, WorkerGroup
from rlinf_actors.cli import app
from rlinf_actors.wire.program import DriverState, Program


class Pid(Worker):
    def pid(self) -> int:
        return os.getpid()


def with_groups(*groups, **more):
    status = example_status()
    made = [replace(status.groups[0], namespace=namespace, name=name) for namespace, name in groups]
    return replace(status, groups=made, **more)


def test_detached_group_is_shown_as_detached(shown):
    status = example_status()
    status = replace(status, groups=[replace(status.groups[0], owner="", detached=True)])
    _, out, _ = shown("groups", status=status)
    assert "running, detached" in out
    _, out, _ = shown("groups", "--json", status=status)
    assert json.loads(out)[0]["detached"] is True
    _, out, _ = shown("node", "show", "0", status=status)
    assert "none: the group is detached" in out
    _, out, _ = shown("status", status=status)
    assert "1 running (1 detached)" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing",), "there is no group 'nothing'; there are: a (one), a (two), b (one)"),
        (("b", "--job", "two"), "there is no group 'b' in job 'two'"),
        (("b", "--job", "two"), "`rlinf-actors events --group b` says how it ended"),
        (("a",), "2 groups are called 'a': say which by --job (one, two)"),
    ],
)
def test_a_group_is_found_by_name_and_namespace(shown, arguments, said):
    code, _, err = shown("groups", "stop", *arguments, status=with_groups(("one", "a"), ("two", "a"), ("one", "b")))
    assert (code, said in err) == (64, True)


def test_a_group_is_ended_only_if_a_person_confirms_it(shown):
    driver = DriverState("driver-1", "one", 7, 0, Program("ann", "gpu-1", "/home/ann/train.py", 1000.0))
    status = with_groups(("one", "b"), drivers=[driver], at=1080.0)
    what = "group b of job one: 1 worker on node 0, of ann's train.py (pid 7 on gpu-1, started 80 s ago)"
    code, _, err = shown("group", "stop", "b", status=status)
    assert (code, err) == (64, f"{what}\nerror: this ends {what}: confirm it by --yes\n")
    code, _, err = shown("job", "stop", "one", status=status)
    assert (code, err) == (64, f"{what}\nerror: this ends 1 group of job one (above): confirm it by --yes\n")


@pytest.mark.live
def test_a_group_is_ended_by_its_name(local_cluster, monkeypatch, capsys):
    local = local_cluster(num_nodes=1)
    for name, value in local.driver_env.items():
        monkeypatch.setenv(name, value)
    with local.cluster(namespace="standing") as cluster:
        Pid.create_group().launch(cluster, NodePlacementStrategy([0]), name="left", detached=True)
        group = WorkerGroup.from_group_name(Pid, "left")
        with terminal("groups", "stop", "left", "--reason", "not needed") as asked:
            assert "group left of job standing: 1 worker on node 0, of no driver (detached)" in asked.until("End it? ")
            asked.type("n\n")
            assert asked.end() == 130
        assert len(group.pid().wait()) == 1
        with terminal("groups", "stop", "left", "--reason", "not needed") as asked:
            asked.until("End it? ")
            asked.type("y\n")
            assert asked.end() == 0
        assert "group left of job standing has ended" in asked.shown
        with pytest.raises(GroupClosedError, match="ended it: not needed"):
            group.pid().wait()
    assert app.run(["groups", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert app.run(["groups", "stop", "left"]) == 64


def test_a_worker_that_has_ended_is_shown_while_its_group_runs(shown):
    name = example_status().groups[0].name
    code, out, err = shown("worker", "show", f"{name}:1", status=example_status())
    assert code == 0, err
    assert "gone" in out
    assert "signal 9" in out
    code, out, _ = shown("worker", "show", f"{name}:1", "--json", status=example_status())
    assert (code, json.loads(out)["exit"]["signal"]) == (0, 9)
    code, _, err = shown("worker", "show", f"{name}:7", status=example_status())
    assert (code, "has no running rank '7'; there are: 0; ended: 1\n" in err) == (64, True)
