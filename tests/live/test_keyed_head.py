"""A head with keys is killed, and the next one has them: members, jobs and their keys are as before."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pace
import pytest
from keyed_cluster import keyed_cluster

pytestmark = pytest.mark.live


def test_members_and_the_keys_of_jobs_outlive_the_head():
    with keyed_cluster() as cluster:
        cluster.node("n1")
        script = str(Path(__file__).with_name("keyed_restart_driver.py"))
        driver = subprocess.Popen(
            [sys.executable, script], env=cluster.env("head"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with driver:
            try:
                assert driver.stdout is not None
                assert driver.stdin is not None
                pid = int(driver.stdout.readline())
                cluster.head.process.send_signal(signal.SIGKILL)
                cluster.head.process.wait()
                again = cluster.agentd("head", "--head", "--listen", cluster.address)
                assert "node_id" in again.said
                driver.stdin.write("go on\n")
                driver.stdin.flush()
                same, by_after, newer = map(int, driver.stdout.readline().split())
                assert same == by_after == pid
                assert newer != pid
                assert driver.wait(pace.PATIENCE_S) == 0
            finally:
                driver.kill()
        for name in ("head", "n1"):
            assert "refused" not in (cluster.place / f"{name}.log").read_text()
