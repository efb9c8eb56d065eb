"""Two users of one machine, with the defaults: the second cannot see, attach to or stop the cluster of the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from listening import listening
from namespaces import can_unshare

from rlinf_actors import Cluster, Worker, procfs
from rlinf_actors.testing import LocalCluster

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not can_unshare("--mount", "true"), reason="needs root and mount namespaces, to be another user"
    ),
]

HERE = Path(__file__).parent
OTHER = 61007
NAMESPACE = "first-user"


class Theirs(Worker):
    def pid(self) -> int:
        return os.getpid()


def sockets_of(pids: list[int]) -> tuple[list[str], set[tuple[str, int]]]:
    """Where these processes listen: the names of unix sockets, and addresses of TCP."""
    found = listening(pids)
    return sorted({one.path for one in found if one.path}), {(one.host, one.port) for one in found if not one.path}


@pytest.fixture
def place() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="other-") as path:
        yield path


def test_private_cluster_has_no_tcp_listener():
    with Cluster(num_nodes=1) as cluster:
        Theirs.create_group().launch(cluster).pid().wait()
        agentd = cluster._daemon._process.pid
        names, addresses = sockets_of(procfs.subtree(agentd))
        assert addresses == set()
        assert names
        assert all(name.startswith(cluster._daemon.run_dir) for name in names), "an abstract one has no permissions"


def test_another_user_is_rejected_at_every_socket(place):
    with LocalCluster(num_nodes=1) as local:
        cluster = local.cluster(namespace=NAMESPACE)
        group = Theirs.create_group().launch(cluster, name="theirs")
        before = group.pid().wait()
        node = local.nodes[0]
        pids = procfs.subtree(node.pid)
        names, addresses = sockets_of(pids)
        assert addresses == {("127.0.0.1", int(local.head.rpartition(":")[2]))}, "the head's one port"
        assert names
        assert all(name.startswith(node.run_dir) for name in names)
        facts = {
            "head": local.head, "run_dir": node.run_dir, "sockets": names, "pids": pids, "namespace": NAMESPACE,
            "key": f"{local.keys}/local.key",
        }  # fmt: skip
        assert os.path.exists(facts["key"])
        script = [str(HERE / "stranger_on_this_machine.py"), json.dumps(facts)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, str(HERE / "other_user.py"), str(OTHER), place, *script],
            capture_output=True, text=True, check=False, env=env,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        check(said, local.head)
        assert group.pid().wait() == before, "nothing was stopped"
        status = cluster.runtime.io.submit(cluster.runtime.status(None)).result()
        assert [state.report.hostname for state in status.nodes] == ["node0"]
        assert status.nodes[0].draining == ""
        assert status.stopped == []


def check(said: dict, head: str) -> None:
    assert said["uid"] == OTHER
    for what in ("sockets", "processes", "memory"):
        assert said[what]
        assert all(one.startswith("PermissionError") for one in said[what]), said[what]
    assert said["key"].startswith("PermissionError")
    assert "none of yours runs on this machine" in said["status"]
    assert "is a cluster of user 0, not of yours" in said["by directory"]
    assert len(said["by port"]) == 4
    for text in said["by port"]:
        assert text.startswith(f"WrongServerError: this is not the head, at tcp://{head}")
        assert "it is the head of another user or cluster" in text
    code, log = said["agentd"]
    assert code == 0, log
    assert "is registered" not in log
    assert said["mine"] == [OTHER]
    mine, groups = said["my groups"]
    assert (mine.startswith("ipc://"), groups) == (True, ["theirs"])
