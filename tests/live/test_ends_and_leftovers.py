"""Whatever ends, no process that a worker started is left: every kind of end, every way to hide."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import live_workers as lw
import pytest

from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import find

pytestmark = pytest.mark.live

DRIVER = """
import os, subprocess, sys
from multiprocessing import shared_memory
from rlinf_actors import Cluster, NodePlacementStrategy, Worker

SLEEP = "echo $$; exec sleep 1000"
WAYS = {
    "child": ["sh", "-c", SLEEP],
    "setsid": ["setsid", "sh", "-c", SLEEP],
    "nohup": ["nohup", "sh", "-c", SLEEP],
    "nohup and setsid": ["nohup", "setsid", "sh", "-c", SLEEP],
    "double fork": ["sh", "-c", f"(sh -c '{SLEEP}' &)"],
    "double fork and setsid": ["sh", "-c", f"(setsid sh -c '{SLEEP}' &)"],
    "hidden": ["env", "-i", "PATH=" + os.environ["PATH"], "sh", "-c", f"(setsid sh -c '{SLEEP}' &)"],
}

class Leaver(Worker):
    def leave(self, ways):
        found = {}
        for way in ways:
            started = subprocess.Popen(WAYS[way], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            found[way] = int(started.stdout.readline())
        self.big = bytes(1 << 20)
        return os.getpid(), os.getppid(), found, self.acquire_free_port()

if __name__ == "__main__":
    cluster = Cluster(num_nodes=1)
    groups = [Leaver.create_group().launch(cluster, NodePlacementStrategy([0]), name=n) for n in ("one", "other")]
    ((worker, template, found, port),) = groups[0].leave(sys.argv[1].split(",")).wait()
    groups[1].leave([]).wait()
    agentd = cluster._daemon._process.pid
    print(cluster._daemon.run_dir, worker, template, agentd, port, *found.values(), flush=True)
    for word in sys.stdin:
        if word == "shutdown\\n":
            groups[0].shutdown(0)
            print("done", flush=True)
        elif word == "end\\n":
            break
        elif word == "raise\\n":
            raise SystemExit(3)
"""

WAYS = ("child", "setsid", "nohup", "nohup and setsid", "double fork", "double fork and setsid", "hidden")
OF_THE_CLUSTER = ("agentd", "driver", "driver and agentd", "template and agentd", "end", "raise")
"""Ends after which nothing of the cluster goes on."""
ENDS = ("worker", "template", "shutdown", *OF_THE_CLUSTER)


@pytest.mark.parametrize("how", ENDS)
def test_no_process_of_a_worker_is_left_after_any_end(tmp_path, rlinf_leak_check, how):
    outlives = how == "template and agentd" or (not find().unified and how in ("worker", "shutdown", "template"))
    ways = [way for way in WAYS if way != "hidden" or not outlives]  # as docs/explanation/reliability.md says
    driver = subprocess.Popen(
        [sys.executable, str(lw.script(tmp_path, DRIVER)), ",".join(ways)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": lw.SCRIPT_ENV["PYTHONPATH"]},
    )  # fmt: skip
    assert driver.stdin is not None
    assert driver.stdout is not None
    run_dir, *words = driver.stdout.readline().split()
    worker, template, agentd, _, *left = map(int, words)
    assert len(left) == len(ways)
    watched = [os.pidfd_open(pid) for pid in (worker, *left)]
    every = [os.pidfd_open(pid) for pid in (template, agentd)]
    try:
        pids = {"worker": worker, "template": template, "agentd": agentd, "driver": driver.pid}
        if pids.keys().isdisjoint(how.split()):
            driver.stdin.write(f"{how}\n")
            driver.stdin.flush()
        for name in how.split(" and "):
            if name in pids:
                os.kill(pids[name], signal.SIGKILL)
        for pidfd in watched:
            lw.wait_for_end(pidfd)
        if how in OF_THE_CLUSTER:
            for pidfd in every:
                lw.wait_for_end(pidfd)
            every = []
    finally:
        for pidfd in every:
            os.close(pidfd)
        if how not in ("end", "raise", "driver", "driver and agentd"):  # a killed one may not have closed its end yet
            driver.stdin.write("end\n")
        driver.stdin.close()
        driver.stdout.close()
        driver.wait()
    assert [procfs.stat(pid) for pid in left if lw.running(pid)] == []
    if how == "driver and agentd":
        shutil.rmtree(run_dir)  # nobody was left who could: doctor names it
    assert not os.path.exists(run_dir)
