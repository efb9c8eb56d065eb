"""`rlinf-actors estop`: the heads that it stops, and its output. Real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pace
import pytest
from estop_kit import COMMAND
from namespaces import can_unshare

from rlinf_actors.net.host import HeldPorts
from rlinf_actors.settings import CLIENT_CONFIG, HEAD, HEADS_DIR, KEY_DIR, RUN_DIR

pytestmark = pytest.mark.live

OTHER_USER = 61008
OTHER_USER_PY = Path(__file__).parents[1] / "live" / "other_user.py"


def test_every_cluster_of_this_machine_is_stopped_and_named(lab, tmp_path):
    machine, one, other = lab
    script = machine.private(tmp_path)
    done = machine.estop("--reason", "a hand in the cell")
    script.communicate()
    assert done.returncode == 0, done
    stopped = [line for line in done.stdout.splitlines() if line.startswith("STOPPED")]
    assert len(stopped) == 3
    assert any(one in line for line in stopped)
    assert any(other in line and "head, pid" in line for line in stopped)
    (private,) = (line for line in stopped if f"private cluster, pid {script.pid}" in line)
    assert private.endswith(": train.py)")
    assert "every known head has acknowledged" in done.stderr
    for address in (one, other):
        lifted = machine.estop("--release", "--head", address)
        assert "a hand in the cell" in lifted.stdout


def test_json_reports_each_cluster(lab):
    machine, *addresses = lab
    said = json.loads(machine.estop("--json", "--reason", "json").stdout)
    assert sorted(cluster["head"] for cluster in said["clusters"]) == sorted(addresses)
    for cluster in said["clusters"]:
        assert (cluster["kind"], cluster["endpoints"]) == ("head", [f"tcp://{cluster['head']}"])
        assert (cluster["acknowledged"], cluster["error"], cluster["hits"]) == (True, "", [])
        assert any("json" in line for line in cluster["in_force"])
    assert said["in_force"] == [line for cluster in said["clusters"] for line in cluster["in_force"]]
    assert (said["complete"], said["hits"]) == (True, [])


def test_a_head_that_does_not_acknowledge_is_reported_and_delays_no_other(machine):
    _, address = machine.head()
    frozen, silent = machine.head()
    frozen.send_signal(signal.SIGSTOP)
    try:
        with subprocess.Popen(
            [*COMMAND, "estop"], env=machine.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as pressing:
            began = time.monotonic()
            assert pressing.stdout.readline().startswith(f"STOPPED      {address}"), (
                "the command still waits for the other head"
            )
            out, err = pressing.communicate(timeout=pace.PATIENCE_S)
            assert time.monotonic() - began >= 3, "a briefly stalled head gets time to answer"
    finally:
        frozen.send_signal(signal.SIGCONT)
    assert pressing.returncode == 69
    assert f"NOT STOPPED  {silent}: it did not answer within 5 s" in out
    assert "1 OF 2 HEADS DID NOT ACKNOWLEDGE THE EMERGENCY STOP. ROBOTS MAY STILL MOVE" in err


def test_absent_configured_head_fails_and_the_others_are_stopped(lab):
    machine, address, _ = lab
    with closing(HeldPorts()) as ports:
        done = machine.estop(**{HEAD: f"127.0.0.1:{ports.hold()}"})
    assert done.returncode == 69
    assert f"STOPPED      {address}" in done.stdout
    (failed,) = (line for line in done.stdout.splitlines() if line.startswith("NOT STOPPED  127.0.0.1:"))
    assert "its port refuse" in failed or "nobody listens there" in failed
    assert failed.endswith("(head, by RLINF_HEAD)")
    assert "1 OF 3 HEADS DID NOT ACKNOWLEDGE" in done.stderr


def test_an_unknown_host_is_reported_and_the_others_are_stopped(lab):
    machine, address, _ = lab
    done = machine.estop(**{HEAD: "nosuch.invalid:6380"})
    assert done.returncode == 69
    assert f"STOPPED      {address}" in done.stdout
    assert "NOT STOPPED  nosuch.invalid:6380: its name 'nosuch.invalid' cannot be resolved" in done.stdout


def test_without_a_head_it_reports_that_nothing_was_stopped(machine):
    done = machine.estop()
    assert done.returncode == 69
    assert "NOTHING WAS STOPPED: NO HEAD IS KNOWN. ROBOTS MAY STILL MOVE" in done.stderr


def test_wrong_settings_do_not_prevent_a_stop(lab, tmp_path):
    machine, address, _ = lab
    (tmp_path / "client.toml").write_text("haed = 1\n")
    for wrong in ({CLIENT_CONFIG: str(tmp_path / "client.toml")}, {"RLINF_TIMEOUT": "long"}):
        done = machine.estop(**wrong)
        assert done.returncode == 69, "an unreadable record may hide a head"
        assert f"STOPPED      {address}" in done.stdout
        assert "TROUBLE: " in done.stderr


def test_the_client_file_names_a_head_elsewhere(machine, tmp_path):
    _, address = machine.head(env={HEADS_DIR: str(tmp_path)})
    (tmp_path / "client.toml").write_text(f'head = "{address}"\n')
    client = {CLIENT_CONFIG: str(tmp_path / "client.toml")}
    done = machine.estop(**client)
    assert done.returncode == 0, done
    assert f"STOPPED      {address}: no robot worker is running (head, by {tmp_path}/client.toml: head)" in done.stdout
    assert machine.run("status", **client).stdout.startswith(f"head      tcp://{address} ")


def test_head_limits_the_stop_to_one_head(lab):
    machine, one, other = lab
    assert machine.estop("--head", one).returncode == 0
    assert machine.in_force(one)
    assert not machine.in_force(other)


def test_head_of_a_local_agentd_is_stopped(machine, tmp_path):
    _, address = machine.head(
        env={HEADS_DIR: str(tmp_path)}
    )  # its record is elsewhere, as for a head on another machine
    ready, tell = os.pipe()
    run_dir = f"{machine.env[RUN_DIR]}/node"
    agentd = [sys.executable, "-m", "agentd", "--connect", address, "--run-dir", run_dir, "--ready-fd", str(tell)]
    process = subprocess.Popen(agentd, env=machine.env, pass_fds=(tell,), stderr=subprocess.DEVNULL)
    os.close(tell)
    try:
        assert b"node_id" in os.read(ready, 4096)
        done = machine.estop()
        assert done.returncode == 0, done
        assert f"STOPPED      {address}" in done.stdout
        assert f"head of this node's agentd, pid {process.pid}" in done.stdout
    finally:
        os.close(ready)
        process.terminate()
        process.wait(pace.PATIENCE_S)


def test_head_with_other_keys_is_stopped_without_naming_the_keys(machine, tmp_path):
    keys = {KEY_DIR: str(tmp_path / "lab")}
    assert machine.run("keys", "init", **keys).returncode == 0
    _, address = machine.head(env=keys)
    done = machine.estop()
    assert done.returncode == 0, done
    assert f"STOPPED      {address}" in done.stdout


@pytest.mark.skipif(not can_unshare("--mount", "true"), reason="needs root and mount namespaces, to be another user")
def test_root_stops_clusters_of_all_users_and_others_their_own(machine):
    folder = Path(machine.env[RUN_DIR])
    folder.chmod(0o755)
    machine.heads.chmod(0o1777)
    runs = folder / "as_other.py"
    runs.write_text("import os, json, sys, runpy; os.environ |= json.loads(sys.argv.pop(1)); "
                    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)")  # fmt: skip
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}

    def other(module: str, *arguments: str) -> tuple[str, ...]:
        """Run our command as another user."""
        home = tempfile.mkdtemp(dir=folder)
        variables = json.dumps({HEADS_DIR: str(machine.heads), KEY_DIR: f"{folder}/keys-of-other"})
        return (sys.executable, str(OTHER_USER_PY), str(OTHER_USER), home, str(runs), variables, module, *arguments)

    (folder / "keys-of-other").mkdir(0o700)
    os.chown(folder / "keys-of-other", OTHER_USER, OTHER_USER)
    _, ours = machine.head()
    _, theirs = machine.start(*other("rlinf_actors.cli.main", "head", "--listen", "127.0.0.1:0"), env=env)
    run_dir = tempfile.mkdtemp(dir=folder)
    os.chown(run_dir, OTHER_USER, OTHER_USER)
    agentd = other("agentd", "--head", "--listen", "127.0.0.1:0", "--run-dir", run_dir, "--ready-fd", "1")
    _, ready = machine.start(*agentd, env=env)
    assert "node_id" in ready
    alone = subprocess.run(
        other("rlinf_actors.cli.main", "estop"), env={**machine.env, **env}, capture_output=True, text=True, check=False
    )
    assert alone.returncode == 0, alone
    assert theirs in alone.stdout
    assert ours not in alone.stdout
    assert "note: user 0 has heads on this machine too: only that user, or root, may stop them" in alone.stderr
    assert machine.in_force(ours) == []
    done = machine.estop()
    assert done.returncode == 0, done
    assert f"STOPPED      {ours}" in done.stdout
    assert f"STOPPED      {theirs}" in done.stdout
    assert done.stdout.count(f"user {OTHER_USER}") == 2, "the agentd's unix socket accepts root too"


# --- the release ---


def test_release_with_several_heads_lists_them_and_lifts_no_stop(lab):
    machine, one, other = lab
    machine.estop("--head", one, "--reason", "smoke")
    done = machine.estop("--release")
    assert done.returncode == 78
    assert "2 heads are known, and a release is for one of them; nothing was lifted" in done.stderr
    lines = done.stderr.splitlines()
    first, last = (next(n for n, line in enumerate(lines) if f"--head {head} " in line) for head in (one, other))
    smoke = next(n for n, line in enumerate(lines) if "smoke" in line)
    assert first < smoke
    assert last < first or smoke < last
    assert any("smoke" in line for line in machine.in_force(one))
    assert machine.estop("--release", "--head", one).returncode == 0


def test_release_names_the_lifted_stop(lab, tmp_path):
    machine, *_ = lab
    script = machine.private(tmp_path)
    pressed = json.loads(machine.estop("--json", "--job", "lab", "--reason", "dust").stdout)
    (address,) = (cluster["head"] for cluster in pressed["clusters"] if cluster["acknowledged"])
    machine.estop("--head", address, "--reason", "smoke")
    done = machine.estop("--release", "--head", address)
    assert done.returncode == 0
    assert done.stdout.startswith(f"LIFTED       {address}: emergency stop by ")
    assert "smoke" in done.stdout
    (left,) = (line for line in done.stderr.splitlines() if line.startswith("still in force: emergency stop by"))
    assert "dust (job 'lab'); lift it with `rlinf-actors estop --release --job lab`" in left
    again = machine.estop("--release", "--head", address)
    assert (again.returncode, again.stdout) == (69, "")
    assert f"NOTHING WAS LIFTED: NO STOP OF ALL JOBS IS IN FORCE AT {address}" in again.stderr
    assert "dust" in machine.estop("--release", "--job", "lab", "--head", address).stdout
    none = machine.estop("--release", "--head", address)
    assert (none.returncode, none.stderr) == (0, f"no emergency stop is in force at {address}\n")
    script.communicate()


def test_names_that_no_head_knows_fail_in_capitals(lab):
    machine, one, _ = lab
    typo = machine.estop("--job", "TYPO")
    assert typo.returncode == 69
    assert typo.stdout.count("it refused: it has no job 'TYPO'; jobs with robots: none") == 2
    assert "NOTHING WAS STOPPED: NO HEAD HAS THAT JOB. ROBOTS MAY STILL MOVE" in typo.stderr
    assert machine.in_force(one) == []
    released = machine.estop("--release", "--job", "TYPO", "--head", one)
    assert released.returncode == 69
    assert f"NOTHING WAS LIFTED: NO STOP OF JOB 'TYPO' IS IN FORCE AT {one}" in released.stderr


def test_job_of_one_cluster_is_stopped_there_and_its_printed_command_lifts_that(lab, tmp_path):
    machine, one, _ = lab
    script = machine.private(tmp_path)
    done = machine.estop("--job", "lab")
    assert done.returncode == 0, "the other heads do not have the job"
    assert f"NO SUCH JOB  {one}: it refused: it has no job 'lab'" in done.stdout
    address = re.search(r"^STOPPED +(\S+):", done.stdout, re.MULTILINE)[1]
    printed = re.search(r"in force: .*lift it with `rlinf-actors (.*)`", done.stdout)[1]
    (stop,) = machine.in_force(address)
    assert f"`rlinf-actors {printed}`" in stop
    assert machine.run(*printed.split(), "--head", address).stdout.startswith(f"LIFTED       {address}")
    assert machine.in_force(address) == []
    script.communicate()


def test_other_commands_with_several_heads_list_them(lab):
    machine, one, other = lab
    done = machine.run("status")
    assert done.returncode == 78
    for address in (one, other):
        (line,) = (line for line in done.stderr.splitlines() if f"--head {address} " in line)
        assert re.search(r"head, pid \d+, up .*: rlinf_actors\.cli\.main head --listen 127\.0\.0\.1:0", line)


# --- cost ---


def test_estop_imports_no_slow_module():
    code = "import rlinf_actors.cli.main, rlinf_actors.cli.estop, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "click", "rich", "logging", "numpy", "torch", "ssl"} & set(loaded)
    assert "zmq" in loaded
