"""The two hosts of the TCP benchmarks: joined, apart, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import can_unshare

CABLE = ("--net", "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.skipif(not can_unshare(*CABLE), reason="needs root and network namespaces"),
]

SCRIPT = """
import os, socket, subprocess
from benchmarks.hosts import TwoHosts

def network():
    return os.readlink("/proc/thread-self/ns/net")

before = network()
with TwoHosts() as hosts:
    here = network()
    there = subprocess.check_output([*hosts.prefix, "readlink", "/proc/self/ns/net"], text=True).strip()
    assert len({before, here, there}) == 3
    server = socket.create_server((hosts.here, 0))
    ask = f"import socket; print(socket.create_connection({server.getsockname()!r}).getsockname()[0])"
    said = subprocess.check_output([*hosts.prefix, "python3", "-c", ask], text=True).strip()
    assert said == server.accept()[1][0] == hosts.other
assert network() == before
print("apart")
"""


def test_they_talk_by_tcp_alone_and_leave_nothing(rlinf_leak_check: None) -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("apart\n", 0), done.stderr
