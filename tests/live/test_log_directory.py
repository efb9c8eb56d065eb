"""distributed_log_dir: every line of every worker is in ``<group>/rank_<rank>.log``, whatever ends or stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import live_workers as lw
import pace
import pytest
from log_workers import Talker

from rlinf_actors import NodePlacementStrategy, WorkerDiedError
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live


def check(path: Path, lines: int) -> None:
    text = path.read_text()
    assert [line for line in text.splitlines() if line.startswith("line")] == [f"line {n}" for n in range(lines)]
    for other in ("to stderr", "from a child", "長" * 50_000, "last words"):
        assert text.count(f"{other}\n") == 1, other


def test_driver_has_all_output_of_groups_on_every_node(rlinf_leak_check, tmp_path):
    logs = tmp_path / "logs"
    with LocalCluster(2) as local:
        cluster = local.cluster(distributed_log_dir=logs)
        strategy = NodePlacementStrategy([0, 1])
        group = Talker.create_group().launch(cluster, strategy, name="env")
        quiet = Talker.create_group().launch(cluster, name="quiet", disable_distributed_log=True)
        group.say(20_000).wait()
        quiet.say(1).wait()
        results = [group.execute_on(rank).last_words() for rank in (0, 1)]
        for result in results:
            with pytest.raises(WorkerDiedError):
                result.wait()
        cluster.shutdown()
    for rank in (0, 1):
        check(logs / "env" / f"rank_{rank}.log", 20_000)
    assert [path.name for path in logs.iterdir()] == ["env"]
    assert not list(tmp_path.rglob("*.out")), "the nodes' own files are elsewhere"


SLOW = """
import os, signal
from rlinf_actors import Cluster, WorkerDiedError
from log_workers import Talker

cluster = Cluster(num_nodes=1, distributed_log_dir={logs!r})
group = Talker.create_group().launch(cluster, name="env")
group.wait_ready()
group.say(60_000)
try:
    group.last_words().wait()
except WorkerDiedError:
    os.write(2, b"standing still\\n")
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_terminal_that_is_not_read_and_a_stopped_driver_lose_nothing(rlinf_leak_check, tmp_path):
    logs = tmp_path / "logs"
    path = lw.script(tmp_path, SLOW.format(logs=str(logs)))
    env = {**lw.SCRIPT_ENV, "PYTHONPATH": f"{Path(__file__).parent}:{lw.SCRIPT_ENV.get('PYTHONPATH', '')}"}
    env["PYTHONUNBUFFERED"] = ""  # with it Python's stdout has no lock that the printer could hold
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, path], env=env, **pipes) as driver:
        seen = b""
        while b"standing still" not in seen:  # nobody reads its stdout
            more = driver.stderr.read1()
            assert more, seen.decode()
            seen += more
        os.waitid(os.P_PID, driver.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # else it may stop after the SIGCONT
        driver.send_signal(signal.SIGCONT)
        rest = driver.stderr.read()
        driver.stdout.close()
        assert driver.wait(pace.PATIENCE_S) in (0, 1), rest
    check(logs / "env" / "rank_0.log", 60_000)
    assert f"{logs} has all".encode() in rest


def test_directory_that_the_driver_cannot_write_to_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    body = "from rlinf_actors import Cluster\nCluster(num_nodes=1, distributed_log_dir='file/logs')"
    done = lw.run_script(tmp_path, body)
    assert done.returncode == 1
    assert "ConfigError: distributed_log_dir: " in done.stderr
