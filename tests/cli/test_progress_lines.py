"""What a terminal shows of waits: for nodes, for workers that start, and for a drain. Nothing of it stays."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec

import pytest
from terminal import terminal

from rlinf_actors import Worker

pytestmark = pytest.mark.live

DRIVER = """
import os
import sys
from rlinf_actors import Cluster, Worker
from rlinf_actors.group import provision
from rlinf_actors.runtime import progress

progress.MISSING_S = 0.0
read = provision._SliceReader.next

def read_when_told(reader):
    if reader._open is not None:  # in the midst of the large file
        open(sys.argv[2]).close()  # blocks until the test opens it too
    return read(reader)

provision._SliceReader.next = read_when_told

class Gate:
    def __init__(self, gate, library):
        self.gate, self.library = gate, library

    def find_spec(self, name, path, target=None):
        if name.startswith(self.library + "."):
            open(self.gate).close()
            raise ImportError("enough")

class Patient(Worker):
    def __init__(self, gate, library):
        super().__init__()
        sys.meta_path.insert(0, Gate(gate, library))
        try:
            __import__(library)
        except ImportError:
            sys.meta_path.pop(0)

    def greet(self):
        return "hello"

code = {"working_dir": os.path.dirname(__file__), "excludes": ["gates/"]}
cluster = Cluster(cluster_cfg={"num_nodes": int(sys.argv[3]), "runtime": code}, timeout=60)
group = Patient.create_group(sys.argv[1], sys.argv[4]).launch(cluster, name="patient")
print(group.greet().wait())
cluster.shutdown()
"""


class Idle(Worker):
    def idle(self) -> None:
        pass


@pytest.fixture
def made(local_cluster, monkeypatch):
    """Return a function that starts a cluster, which the driver and the commands of the test find."""

    def make(num_nodes: int):
        local = local_cluster(num_nodes=num_nodes)
        for name, value in local.driver_env.items():
            monkeypatch.setenv(name, value)
        return local

    return make


@pytest.fixture
def local(made):
    return made(1)


def test_a_driver_shows_which_nodes_code_and_workers_it_waits_for(local, tmp_path):
    script, gate, code_gate = tmp_path / "driver.py", tmp_path / "gates" / "worker", tmp_path / "gates" / "code"
    script.write_text(DRIVER)
    (tmp_path / "large").write_bytes(bytes(3 << 19))
    gate.parent.mkdir()
    os.mkfifo(gate)
    os.mkfifo(code_gate)
    library = "torch" if find_spec("torch") else "numpy"
    with terminal(str(gate), str(code_gate), "1", library, command=[sys.executable, str(script)]) as driver:
        driver.resize(200, 50)
        driver.until("\x1b[2Ksending code to node 0 (node0): 1.0 MiB of 1.5 MiB, ")
        driver.until("s; node 0 (node0) has 1.0 MiB of 1.5 MiB")
        code_gate.open("w").close()
        driver.until("\x1b[2K0 of 1 worker of patient up, ")
        driver.until(f"s; patient:0 on node0 imports {library}")
        gate.open("w").close()
        assert driver.end() == 0, driver.shown
    assert "\r\x1b[2K['hello']\n" in driver.shown
    with terminal(str(gate), str(code_gate), "2", library, command=[sys.executable, str(script)]) as driver:
        driver.until("waiting for nodes: 1 of 2 (node0), ")


def test_a_command_shows_who_does_not_answer(made):
    local = made(2)
    for rank, words, waits in (
        (0, ("nodes",), "waiting for the head at tcp://127.0.0.1:"),
        (1, ("logs", "--node", "node1"), "waiting for the answer of node1, "),
    ):
        process = local.nodes[rank].process
        process.send_signal(signal.SIGSTOP)
        with terminal(*words) as command:
            command.until(f"\r\x1b[2K{waits}")
            process.send_signal(signal.SIGCONT)
            assert command.end() == 0, command.shown
        assert "\r\x1b[2K" in command.shown.rpartition(waits)[2]


def test_a_drain_shows_what_still_runs(local):
    cluster = local.cluster(namespace="cell")
    group = Idle.create_group().launch(cluster, name="idlers")
    group.idle().wait()
    with terminal("node", "drain", "node0", "--wait", "60") as drain:
        drain.until("draining node0: idlers:0 of cell still there, ")
        group.shutdown()
        assert drain.end() == 0, drain.shown
    assert drain.shown.endswith("\r\x1b[2Knode node0 is drained: ready for maintenance\n")


@pytest.mark.slow
def test_a_setting_switches_the_lines_off(local, monkeypatch):
    monkeypatch.setenv("RLINF_ACTORS_PROGRESS", "0")
    cluster = local.cluster(namespace="cell")
    Idle.create_group().launch(cluster, name="idlers").idle().wait()
    with terminal("node", "drain", "node0", "--wait", "2.5") as drain:
        assert drain.end() == 69
    assert "\x1b[2K" not in drain.shown
