"""The commands against real nodes, groups and workers."""

from __future__ import annotations

import json
import os

import pytest
from cli_kit import tab
from terminal import terminal

from rlinf_actors import Channel, Worker
from rlinf_actors.cli import app

pytestmark = pytest.mark.live

THERE = {"ready", "suspect"}
"""States of a living node; it is suspect while its beats are late."""


class Pid(Worker):
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def local(local_cluster, monkeypatch):
    made = local_cluster(num_nodes=2, hardware={"accelerators": 2, "model": "A800"})
    for name, value in made.driver_env.items():
        monkeypatch.setenv(name, value)
    return made


def as_json(capsys, *arguments: str):
    assert app.run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_commands_show_plan_nodes_groups_and_workers_and_change_nothing(local, capsys, tmp_path, program):
    conf = tmp_path / "conf.yaml"
    conf.write_text("cluster: {num_nodes: 2, component_placement: {actor: 0-3}}")
    planned = as_json(capsys, "plan", str(conf))
    assert [worker["cluster_node_rank"] for worker in planned["components"][0]["workers"]] == [0, 0, 1, 1]
    assert as_json(capsys, "status")["clients"] == []  # a process that only asks is no client

    cluster = local.cluster()
    group = Pid.create_group().launch(cluster, name="pids")
    pids = group.pid().wait()

    nodes = as_json(capsys, "nodes")
    assert [(node["rank"], node["hostname"], node["hardware"]) for node in nodes] == [
        (0, "node0", {"NV_GPU": 2}),
        (1, "node1", {"NV_GPU": 2}),
    ]
    assert {node["state"] for node in nodes} <= THERE
    (shown,) = as_json(capsys, "groups")
    assert (shown["name"], shown["world_size"], shown["workers"]) == ("pids", 4, {"running": 4})
    workers = as_json(capsys, "workers", "pids")
    assert [worker["pid"] for worker in workers] == pids
    assert [worker["node_rank"] for worker in workers] == [0, 0, 1, 1]
    status = as_json(capsys, "status")
    assert (sum(status["nodes"].values()), status["workers"]) == (2, {"running": 4})
    assert status["nodes"].keys() <= THERE
    assert len(status["clients"]) == 1

    def completed(*words: str) -> list[str]:
        while not (found := tab("rlinf-actors", *words)):
            pass  # this machine was too slow for a shell's patience
        return found

    assert completed("worker", "show", "pi") == ["pids:0", "pids:1", "pids:2", "pids:3"]
    assert completed("logs", "pids", ":") == ["0", "1", "2", "3"]
    assert completed("job", "show", "") == [cluster.namespace]
    assert completed("node", "drain", "no") == ["node0", "node1"]


def test_worker_is_shown_and_killed_and_channels_are_listed(local, capsys):
    cluster = local.cluster()
    group = Pid.create_group().launch(cluster, name="pids")
    pids = group.pid().wait()
    channel = Channel.create("rollouts", maxsize=2)
    channel.put("a", key="k")
    shown = as_json(capsys, "worker", "show", "pids:1")
    assert (shown["pid"], shown["node"], shown["state"]) == (pids[1], "node0", "running")
    assert f"(pid {os.getpid()} on " in shown["owner"]
    assert app.run(["worker", "kill", "pids:1"]) == 64, "it asks, and there is no terminal"
    assert "--yes" in capsys.readouterr().err
    dead = as_json(capsys, "worker", "kill", "pids:1", "--yes", "--reason", "test")
    assert (dead["pid"], dead["dead"], dead["exit"]["kind"]) == (pids[1], True, "stopped")
    assert dead["exit"]["signal"] in (9, 15)
    (host,) = as_json(capsys, "channel", "list")
    assert (host["name"], host["items"], host["max_items"], host["fault"]) == ("rollouts", 1, 2, "")
    (row,) = as_json(capsys, "channel", "show", "rollouts")
    assert [(key["key"], key["items"], key["size"]) for key in row["by_key"]] == [("'k'", 1, row["size"])]
    assert app.run(["channel", "show", "other"]) == 64
    capsys.readouterr()
    ended = as_json(capsys, "group", "stop", "pids", "--yes")
    assert (ended["name"], ended["world_size"], ended["workers"]["gone"]) == ("pids", 4, 1)


def test_worker_is_killed_in_a_terminal_after_a_question(local):
    cluster = local.cluster(namespace="cell")
    group = Pid.create_group().launch(cluster, name="pids")
    pids = group.pid().wait()
    with terminal("worker", "show", "pids:1") as show:
        assert show.end() == 0
    assert "pids:1 of job cell" in show.shown
    assert f"process {pids[1]}" in show.shown
    for answer, code in (("n\n", 130), ("\x04", 130), ("y\n", 0)):
        with terminal("worker", "kill", "pids:1") as kill:
            kill.until("Kill it? [y/N]: ")
            kill.type(answer)
            assert kill.end() == code, kill.shown
        assert ("is dead" in kill.shown) == (code == 0)
    assert f"pids:1 of job cell: process {pids[1]} on node0" in kill.shown


def test_channels_are_shown_in_a_terminal_with_the_bytes_of_each_key(local):
    local.cluster()
    channel = Channel.create("rollouts")
    channel.put(b"x" * 3000, key="k")
    channel.put(b"x", key="\x1b[2J")
    with terminal("channel", "list") as every:
        assert every.end() == 0
    assert "rollouts" in every.shown
    with terminal("channel", "show", "rollouts") as one:
        assert one.end() == 0
    (row,) = [line for line in one.shown.splitlines() if line.strip().startswith("'k'")]
    assert "KiB" in row
    assert "\\x1b[2J" in one.shown
