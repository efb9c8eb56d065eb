"""A client that uses only docs/reference/wire.md, pyzmq and msgpack, without rlinf-actors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import live_workers as lw
import pace
import pytest

from rlinf_actors import Worker
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "wire_client.py"
ALONE = (
    "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); "
    "sys.exit(any(name.startswith(('rlinf_actors', 'agentd')) for name in sys.modules))"
)
"""It fails where the client has loaded a module of ours."""


class Plain(Worker):
    """What a client in another language can call."""

    def add(self, a, b=0):
        return a + b

    def large(self, size):
        return b"x" * size

    def length(self, text):
        return len(text)

    def nothing(self): ...

    def pickled(self):
        return {1, 2}

    def bad(self):
        raise ValueError("that was bad")


def client(*arguments: object) -> subprocess.CompletedProcess[str]:
    # isolated: whatever finds our modules in this process does not there
    command = [sys.executable, "-I", "-c", ALONE.replace("sys.argv[1]", repr(str(CLIENT))), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S)


def says(*arguments: object) -> object:
    done = client(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def local():
    with LocalCluster() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(local):
    return local.cluster()


@pytest.fixture(scope="module")
def head(local):
    return f"ipc://{local.nodes[0].run_dir}/head"


def test_wire_client_lists_and_calls_groups(cluster, head):
    job = cluster.namespace
    lw.many(cluster, Plain, 2, name="plain").wait_ready()
    assert says(head, job) == {"nodes": [[0, "node0", "ready"]], "groups": ["plain"]}
    assert says(head, job, "plain", 1, "add", 3, 4.5) == 7.5
    assert says(head, job, "plain", 0, "add", '"a"', '"b"') == "ab"
    assert says(head, job, "plain", 0, "nothing") is None
    assert says(head, job, "plain", 0, "length", json.dumps("y" * 100_000)) == 100_000
    assert says(head, job, "plain", 0, "large", 300_000) == {"bytes": 300_000}


def test_wire_client_gets_an_error_for_what_it_cannot_read(cluster, head):
    job = cluster.namespace
    lw.many(cluster, Plain, 1, name="told").wait_ready()
    for arguments, said in [
        (("nobody",), "not_found: no group named 'nobody'"),
        (("told", 0, "bad"), "bad() raised ValueError: that was bad"),
        (("told", 0, "pickled"), "the value is pickled: only Python can read it"),
        (("told", 0, "no_such"), "no_such() raised"),
    ]:
        done = client(head, job, *arguments, *([0, "x"] if len(arguments) == 1 else []))
        assert done.returncode != 0
        assert said in done.stderr


def test_wire_client_works_with_a_key_over_tcp(cluster, local):
    lw.many(cluster, Plain, 1, name="keyed").wait_ready()
    (key,) = Path(local.keys).glob("*.key")
    assert says(f"tcp://{local.head}", cluster.namespace, "keyed", 0, "add", 1, 2, "--key", key) == 3
