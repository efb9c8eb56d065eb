"""`rlinf-actors top` against a real cluster: in a terminal, which it gives back however it ends, and without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
from terminal import COMMAND, terminal

from rlinf_actors import Channel, Worker
from rlinf_actors.cli import app
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live


class Miner(Worker):
    def dig(self) -> int:
        Channel.connect("begun").put(self._rank)
        return Channel.connect("gold").get()


@pytest.fixture(scope="module")
def local():
    """A cluster of two nodes with the group "miners", of which each rank waits in dig(), and two channels."""
    with (
        LocalCluster(num_nodes=2, hardware={"accelerators": 1, "model": "A800"}) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in made.driver_env.items():
            patch.setenv(name, value)
        cluster = made.cluster()
        begun, channel = Channel.create("begun"), Channel.create("gold")
        group = Miner.create_group().launch(cluster, name="miners")
        waiting = group.dig()
        assert {begun.get(), begun.get()} == {0, 1}
        yield made
        for _ in range(2):
            channel.put(1)
        waiting.wait()


def test_one_table_or_json_without_a_terminal(local, capsys):
    assert app.run(["top", "--filter", "miners", "--sort", "cpu"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.split()[:4] == ["WORKER", "JOB", "NODE", "STATE"]
    assert len(rows) == 2
    assert all("dig" in row and "MiB" in row and "%" in row for row in rows)
    assert app.run(["top", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(one["hostname"], one["cpu"] is not None) for one in found["nodes"]} == {("node0", True), ("node1", True)}
    (miner, _) = [one for one in found["workers"] if one["group"] == "miners"]
    assert (miner["method"], miner["for_s"] > 0, miner["rss_bytes"] > 1 << 20) == ("dig", True, True)
    assert [(one["name"], one["items"], one["gets_waiting"]) for one in found["channels"]] == [
        ("begun", 0, 0),
        ("gold", 0, 2),
    ]
    assert app.run(["top", "--json", "--view", "nodes"]) == 64


@pytest.mark.parametrize("end", ["q", "\x03", signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_given_back(local, end):
    with terminal("top", "--view", "nodes") as top:
        before = top.attributes()
        top.until("node1")
        assert top.attributes() != before
        top.type(end) if isinstance(end, str) else top.process.send_signal(end)
        assert top.end() == 0, top.shown
        assert top.attributes() == before
    assert top.shown.rindex("\x1b[?1049l") > top.shown.rindex("\x1b[?1049h")
    assert top.shown.rindex("\x1b[?25h") > top.shown.rindex("\x1b[?25l")


def test_keys_and_a_new_size_change_what_is_shown(local):
    with terminal("top") as top:
        top.resize(150, 20)
        top.until("miners:1")
        top.type("c")
        top.until("by CPU")
        top.type("3")
        top.until("GETS WAIT")
        top.type("1/:1\r")
        assert "miners:0" not in top.until("/ :1").rpartition("\x1b[H")[2]
        top.type("\x1b")
        top.until("miners:0")
        top.until(f" of {os.cpu_count()} CPUs busy")  # both nodes are on this machine
        top.resize(60, 6)  # one row
        top.until("rows 1 to 1 of 4")
        top.type("\x1b[B")
        top.until("rows 2 to 2 of 4")
        top.type("q")
        assert top.end() == 0


def test_it_stops_and_goes_on_as_a_shell_asks(local):
    with terminal("top", "--view", "nodes") as top:
        before = top.attributes()
        top.until("node1")
        top.type("\x1a")
        os.waitid(os.P_PID, top.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert top.attributes() == before
        top.process.send_signal(signal.SIGCONT)
        top.until("\x1b[?1049h")
        top.until("node1")
        top.type("q")
        assert top.end() == 0


def test_a_head_that_does_not_answer_is_an_error_before_anything_is_drawn(monkeypatch):
    with terminal("top", "--head", "127.0.0.1:9") as top:
        assert top.end() == 69, top.shown
    assert "error: " in top.shown
    assert "\x1b[?1049h" not in top.shown


def test_a_key_that_only_looks_suffices_for_commands_that_only_ask(tmp_path, monkeypatch, capfd):
    """Real keys and a head of its own."""
    keys, viewer = tmp_path / "keys", tmp_path / "viewer"
    viewer.mkdir(mode=0o700)
    monkeypatch.setenv("RLINF_ACTORS_KEYS", str(keys))
    assert app.run(["keys", "init", "--name", "127.0.0.1"]) == 0
    command = [*COMMAND, "head", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as head:
        try:
            monkeypatch.setenv("RLINF_HEAD", head.stdout.readline().strip())
            assert app.run(["keys", "enroll", "wall", "--viewer", "--file", str(viewer / "viewer.key")]) == 0
            monkeypatch.setenv("RLINF_ACTORS_KEYS", str(viewer))
            capfd.readouterr()
            for verb in (["top", "--view", "nodes"], ["status"], ["events"]):
                assert app.run(verb) == 0, capfd.readouterr()
            assert "no node has registered" in capfd.readouterr().err
            assert app.run(["head", "stop", "--yes"]) == 77
        finally:
            head.kill()


@pytest.mark.slow
def test_a_lost_head_is_shown_and_the_last_figures_stay(local_cluster):
    made = local_cluster(num_nodes=1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.driver_env.items():
            patch.setenv(name, value)
        with terminal("top", "--view", "nodes", "--every", "1") as top:
            top.until("node0")
            made.stop()
            top.until("no answer for")
            top.until("node0")
            top.type("q")
            assert top.end() == 0
