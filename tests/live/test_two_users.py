"""Two users of one machine, with the defaults: the second neither sees, nor attaches to, nor stops the first one's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_actors import Cluster, Worker, procfs
from rlinf_actors.settings import KEY_DIR
from rlinf_actors.testing import LocalCluster

pytestmark = [pytest.mark.live, pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")]

HERE = Path(__file__).parent
OTHER = 61007
NAMESPACE = "first user's"


class Theirs(Worker):
    def pid(self) -> int:
        return os.getpid()


def sockets_of(pids: list[int]) -> tuple[list[str], set[tuple[str, int]]]:
    """The unix sockets with a name that these processes have, and where they listen by TCP."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
    unix = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = [words[7] for words in unix if len(words) == 8 and words[6] in inodes]
    listening = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[9] in inodes and words[3] == "0A":
            address, port = words[1].split(":")
            listening.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    assert not [line for line in Path("/proc/net/tcp6").read_text().splitlines()[1:] if line.split()[9] in inodes]
    return sorted(set(names)), listening


@pytest.fixture
def keys(monkeypatch) -> Iterator[Path]:
    """Of the first user, where the second can see the directory: `other_user.py` may hide home directories."""
    with tempfile.TemporaryDirectory(prefix="keys-") as path:
        monkeypatch.setenv(KEY_DIR, path)
        yield Path(path)


@pytest.fixture
def place() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="other-") as path:
        yield path


def test_a_private_cluster_listens_by_no_tcp_at_all():
    with Cluster(num_nodes=1) as cluster:
        Theirs.create_group().launch(cluster).pid().wait()
        agentd = cluster._daemon._process.pid
        names, listening = sockets_of(procfs.subtree(agentd))
        assert listening == set()
        assert names
        assert all(name.startswith(cluster._daemon.run_dir) for name in names), "an abstract one has no permissions"


@pytest.mark.timeout(60)
def test_another_user_comes_in_nowhere(place, keys):
    with LocalCluster(num_nodes=1) as local:
        cluster = local.cluster(namespace=NAMESPACE)
        group = Theirs.create_group().launch(cluster, name="theirs")
        before = group.pid().wait()
        node = local.nodes[0]
        pids = procfs.subtree(node.pid)
        names, listening = sockets_of(pids)
        assert listening == {("127.0.0.1", int(local.head.rpartition(":")[2]))}, "the head's one port"
        assert names
        assert all(name.startswith(node.run_dir) for name in names)
        facts = {
            "head": local.head, "run_dir": node.run_dir, "sockets": names, "pids": pids, "namespace": NAMESPACE,
            "key": str(keys / "local.key"),
        }  # fmt: skip
        assert (keys / "local.key").exists()
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
        assert text.startswith(f"ClusterTimeoutError: the head at tcp://{head} did not answer")
        assert "it is the head of another user or cluster" in text
    code, log = said["agentd"]
    assert code == 0, log
    assert "is registered" not in log
    assert said["mine"] == [OTHER]
    mine, groups = said["my groups"]
    assert (mine.startswith("ipc://"), groups) == (True, ["theirs"])
