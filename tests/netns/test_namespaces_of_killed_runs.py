"""A run of tests that was killed leaves its network namespaces: the next one removes them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import netns_kit
import pace
import pytest

from rlinf_actors import procfs

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and network namespaces"),
]

KILLED = """
import os, signal, subprocess, netns_kit
with netns_kit.hosts(1) as (host,):
    inside = subprocess.Popen(host.command(["sleep", "1000"]), stdout=subprocess.DEVNULL)
    while inside.pid not in map(int, subprocess.check_output(["ip", "netns", "pids", host.namespace]).split()):
        pass
    print(host.namespace, inside.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_namespaces_of_a_killed_run_are_removed_and_those_of_others_stay():
    path = os.pathsep.join([str(netns_kit.PROJECT), str(Path(__file__).parent)])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    namespace, pid = killed.stdout.split()
    inside = procfs.pidfd_of(int(pid))
    assert namespace in os.listdir(netns_kit.NAMED)
    with netns_kit.hosts(1) as (ours,):
        assert namespace not in os.listdir(netns_kit.NAMED), "begun after the kill"
        assert select.select([inside], [], [], pace.PATIENCE_S)[0]
        os.close(inside)
        netns_kit.sweep()
        assert ours.namespace in os.listdir(netns_kit.NAMED)
