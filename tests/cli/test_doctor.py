"""`rlinf-actors doctor` on this machine and on invented ones."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys

import msgspec
import pytest
from namespaces import can_unshare

from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.cli import app
from rlinf_actors.cli.doctor import command as doctor
from rlinf_actors.cli.doctor import machine as doctor_machine
from rlinf_actors.cli.doctor import machine_checks as doctor_checks
from rlinf_actors.cli.doctor.agentds import Agentd, agentds, asked, environment, log_dir_of, recorded
from rlinf_actors.cli.doctor.finding import Finding
from rlinf_actors.cli.doctor.machine import directory, inspect_machine, key_files, processes, stale_run_dirs
from rlinf_actors.cli.doctor.machine_checks import (
    AgentdFacts,
    Directory,
    Disk,
    KeyOnDisk,
    MachineFacts,
    OwnProcess,
    diagnose,
)
from rlinf_actors.cli.process_figures import Figures
from rlinf_actors.errors import AuthenticationError, ClusterTimeoutError
from rlinf_actors.net.link import Diagnosis
from rlinf_actors.net.rpc import KeyRefusedError
from rlinf_actors.procfs import WORKER_MARK
from rlinf_actors.settings import CLIENT_CONFIG, Settings
from rlinf_actors.wire.check_values import NodeFacts

FACTS = NodeFacts(
    "1.0",
    open_files=(1024, 65536),
    real_time=99,
    shared_memory=[8 << 30, 8 << 30],
    cgroup="/sys/fs/cgroup/w",
    clock_synchronized=True,
    py_spy="/venv/bin/py-spy",
)
NO_CGROUPS = Roots(why={"cgroup": "this", "memory": "m", "pids": "p"})
NO_MEMORY = Roots("/w", ("pids",), why={"memory": "that"})
GOOD = MachineFacts(
    user=1000,
    python=(3, 11, 7),
    interpreter="/venv/bin/python",
    modules={
        "zmq": "27",
        "msgspec": "0.20",
        "cloudpickle": "3",
        "uvloop": "0.22",
        "cryptography": "50",
        "torch": "2.9",
    },
    run_parent=Directory("/tmp", 0o1777),
    memfd="",
    peers="",
    agentds=[AgentdFacts(Roots("/sys/fs/cgroup/w", ("memory", "pids")))],
    facts=FACTS,
    head="10.0.0.1:6380",
    head_version="1.0",
    version="1.0",
)


def with_agentd(**changes):
    return {"agentds": [dataclasses.replace(GOOD.agentds[0], **changes)]}


def with_facts(**changes):
    return dataclasses.replace(GOOD, facts=msgspec.structs.replace(FACTS, **changes))


def test_good_machine_passes_all_checks():
    findings = diagnose(GOOD)
    assert [f for f in findings if f.status != "pass" or f.fix] == []
    assert len({f.check for f in findings}) == len(findings)


@pytest.mark.parametrize(
    ("change", "check", "status", "text", "fix"),
    [
        ({"python": (3, 9, 1)}, "python", "fail", "3.9.1", "newer Python"),
        ({"modules": {**GOOD.modules, "zmq": None}}, "zmq", "fail", "not installed", "python -m pip install pyzmq"),
        ({"modules": {**GOOD.modules, "uvloop": None}}, "uvloop", "warn", "slower", "pip install uvloop"),
        ({"cipher_error": "ImportError: x"}, "cryptography", "pass", "(ImportError: x); only clusters with keys", ""),
        (
            {"modules": {**GOOD.modules, "cryptography": None}, "keys": [KeyOnDisk("/k", True)]},
            "cryptography", "warn", "not installed: large arrays travel", "python -m pip install cryptography;",
        ),
        (
            {"cipher_error": "ImportError: x", "keys": [KeyOnDisk("/k", True)]},
            "cryptography", "warn", "cryptography 50 cannot be used (ImportError: x)", "pip install --force-reinstall",
        ),
        ({"modules": {**GOOD.modules, "torch": None}}, "torch", "pass", "only workers that use it", ""),
        ({"run_parent": Directory("/gone")}, "run_dir", "fail", "does not exist", "mkdir -m 700 /gone"),
        ({"run_parent": Directory("/x", 0o755, 0, "permission denied")}, "run_dir", "fail", "denied", "chown 1000 /x"),
        ({"run_parent": Directory("/x", 0o777)}, "run_dir", "warn", "others can rename", "chmod"),
        ({"run_parent": Directory("/" + 70 * "x", 0o700)}, "run_dir", "warn", "71 bytes long", "RLINF_ACTORS_RUN_DIR"),
        ({"memfd": "Cannot allocate memory"}, "shared_memory", "warn", "Cannot allocate", "memory limit"),
        ({"peers": "PermissionError: …"}, "shared_memory", "warn", "one another's memory", "SYS_PTRACE"),
        (with_agentd(cgroups=NO_CGROUPS), "cgroup", "warn", "mark", "this"),
        (with_agentd(cgroups=NO_MEMORY), "memory_limit", "warn", "cannot hold", "that"),
        (with_agentd(cgroup_error="is '/x', which is no directory"), "cgroup", "fail", "no directory", "agentd.toml"),
        ({"head_error": "no answer in 5 s"}, "head", "fail", "no answer", "agentd --head --listen 10.0.0.1:6380"),
        ({"head_version": "0.9"}, "head", "warn", "version 0.9, this is 1.0", "install rlinf-actors 0.9"),
        ({"keys": [KeyOnDisk("/k", True), KeyOnDisk("/k/a", True, "agent 'n1'")]}, "keys", "pass", "agent 'n1'", ""),
        ({"keys": [KeyOnDisk("/k", False)]}, "keys", "fail", "others can read /k", "chown 1000 /k && chmod 700 /k;"),
        ({"keys": [KeyOnDisk("/k/a", False, error="x")]}, "keys", "fail", "others can", "chmod 600 /k/a;"),
        ({"keys": [KeyOnDisk("/k/a", True, error="is no key")]}, "keys", "fail", "is no key", "copy it again"),
        ({"head": ""}, "head", "pass", "private cluster", ""),
        ({"head": "", "heads": ["h:7"]}, "head", "pass", "these heads run here: h:7", ""),
        ({"head_error": "nobody listens", "heads": ["h:7"]}, "head", "fail", "nobody", "address (these heads run"),
        ({"head_error": "no answer", "head_fix": "it runs, but"}, "head", "fail", "no answer", "it runs, but"),
        ({"joining": ["/k/agent.key.joining"]}, "keys", "warn", "was interrupted", "same token"),
        ({"key_left_s": 86400.0 * 13}, "keys", "warn", "ends in 13 d", "--replace"),
        ({"key_left_s": 86400.0 * 15}, "keys", "pass", "", ""),
        ({"faults": ["NVML: driver mismatch"]}, "accelerators", "warn", "driver mismatch", "hw scan"),
        (
            {"disks": [Disk(["/r (sockets of agentd 7)", "/var/log/rlinf-agentd"], 80 << 30, 1 << 30)]},
            "disk", "warn", "/var/log/rlinf-agentd has 1.0 GiB of 80.0 GiB free: output", "lower log_total_max_gb",
        ),
        ({"disks": [Disk(["/run"], 1 << 30, 1 << 29)]}, "disk", "pass", "/run has 512 MiB of 1.0 GiB free", ""),
        ({"disks": [Disk(["/l"], 0, 0, "denied")]}, "disk", "warn", "disk of /l is not known: denied", "as the user"),
        ({"stale": ["/tmp/rlinf-a"]}, "leftover_run_dir", "warn", "no agentd uses", "rm -r /tmp/rlinf-a"),
        ({"processes": []}, "processes", "pass", "no worker of this user runs here", ""),
        (
            {
                "processes": [
                    OwnProcess(6, "template", "py", False, Figures(1.0, 64 << 20, 1, 9)),
                    OwnProcess(7, "worker", "py", False, Figures(2.5, 192 << 20, 12, None)),
                    OwnProcess(8, "worker", "py", False, None),
                ]
            },
            "processes", "pass", "1 template and 2 workers: 256 MiB resident (what they share counts for each), "
            "13 threads, 9 descriptors, 4 s of CPU time", "",
        ),
        (
            {"processes": [OwnProcess(7, "worker", "py", False, None, "/r")]},
            "processes", "pass", "1 worker of the agentd in /r: 0 MiB", "",
        ),
        ({"processes": [OwnProcess(7, "worker", "py", True)]}, "leftover_process", "warn", "its template", "kill -9 7"),
        ({"processes": [OwnProcess(7, "worker", "python", False)]}, "leftovers", "pass", "nothing is left", ""),
        ({"users": {"a": "lab"}, "unknown_users": ["lab"]}, "users", "fail", "'lab', who does not", "useradd lab"),
        (
            {"users": {"a": "lab"}, **with_agentd(missing=["CAP_SETUID"], name="7 in /r")},
            "users", "fail", "agentd 7 in /r cannot start workers as the users in agentd.toml: it lacks CAP_SETUID",
            "rlinf-agentd.service",
        ),
        (with_agentd(user=0, name="7 in /r"), "users", "warn", "as root, and so do all", "map drivers to users"),
        ({"users": {"a": "lab"}, **with_agentd(user=0)}, "users", "pass", "a user of their own", ""),
        ({"stale_cgroups": ["/cg/w"]}, "leftover_cgroup", "warn", "is gone", "echo 1 > /cg/w/cgroup.kill; rmdir /cg/w"),
    ],
)  # fmt: skip
def test_each_problem_has_its_status_and_fix(change, check, status, text, fix):
    found = [f for f in diagnose(dataclasses.replace(GOOD, **change)) if f.check == check]
    (finding,) = found
    assert finding.status == status
    assert text in finding.text
    assert fix in finding.fix if fix else not finding.fix


def test_every_warning_and_failure_has_a_fix():
    bad = MachineFacts(
        user=1, python=(3, 11, 0), interpreter="p", modules={}, run_parent=Directory("/gone"), memfd="no",
        peers="", facts=NodeFacts("1"), agentds=[AgentdFacts(NO_CGROUPS)],
        head="h:1", head_error="silent", faults=["f"], accelerators={"NV_GPU": 1},
        stale=["/s"], stale_cgroups=["/c"],
    )  # fmt: skip
    assert [f for f in diagnose(bad) if f.status != "pass" and not f.fix] == []


def test_this_machine_is_inspected(rlinf_leak_check):
    machine = inspect_machine(Settings.load())
    assert machine.modules["zmq"]
    assert machine.modules["cryptography"]
    assert machine.cipher_error == ""
    assert machine.memfd == machine.peers == ""
    assert {f.check for f in diagnose(machine)} >= {"python", "run_dir", "open_files", "cgroup", "memory_limit", "head"}
    assert directory("/proc/nowhere").mode is None
    assert [disk for disk in machine.disks if 0 <= disk.free <= disk.total]


def test_each_disk_is_reported_once(tmp_path):
    (tmp_path / "a").mkdir()
    (found,) = doctor_machine.disks([(f"{tmp_path}/gone/x", "logs of agentd 7 in /r"), (f"{tmp_path}/a", "sockets")])
    assert found.places == [f"{tmp_path}/gone/x (logs of agentd 7 in /r; not made yet)", f"{tmp_path}/a (sockets)"]


@pytest.mark.live
def test_unreachable_head_fails(rlinf_leak_check, monkeypatch):
    monkeypatch.setattr("rlinf_actors.cli.queries.TIMEOUT_S", 0.2)
    said = doctor_machine._ask("127.0.0.1:1", Settings.load())
    facts = dataclasses.replace(GOOD, head="127.0.0.1:1", head_error=said.error, head_fix=said.fix)
    (finding,) = doctor_checks.head(facts)
    assert finding.status == "fail"
    assert "did not answer" in finding.text
    assert "network" not in finding.fix


def test_failure_exits_with_1_and_is_in_the_json(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "inspect_machine", lambda settings, head: with_facts(open_files=(1, 1)))
    assert app.run(["doctor", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["fail"] == 1
    assert set(shown["findings"][0]) == {"check", "status", "text", "fix", "nodes"}
    monkeypatch.setattr(doctor, "inspect_machine", lambda settings, head: with_facts(shared_memory=[]))
    assert app.run(["doctor"]) == 0
    assert "WARN  dev_shm" in (out := capsys.readouterr().out)
    assert "fix: mount -t tmpfs" in out


def test_unused_run_directories_are_reported(tmp_path):
    for name in ("rlinf-used", "rlinf-stale", "rlinf-clean"):
        (tmp_path / name / "w").mkdir(parents=True)
        (tmp_path / name / "lock").touch()
        if name != "rlinf-clean":
            (tmp_path / name / "head").touch()
    (tmp_path / "rlinf-workers/w").mkdir(parents=True)
    for file in ("lock", "w/one", "w/two"):
        (tmp_path / "rlinf-workers" / file).touch()
    lock = os.open(tmp_path / "rlinf-used/lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert stale_run_dirs([str(tmp_path)]) == [str(tmp_path / f"rlinf-{name}") for name in ("stale", "workers")]
    os.close(lock)


@pytest.mark.live
def test_a_running_template_is_no_leftover(rlinf_cluster):
    """A template has a title in the place of its command line."""
    run_dir = rlinf_cluster._daemon.run_dir
    ours = [one for one in processes() if one.kind == "template" and doctor_machine._run_dir_of(one.pid) == run_dir]
    assert len(ours) == 1
    assert not ours[0].orphan


@pytest.mark.live
def test_answering_head_passes_and_cgroups_are_checked_for_the_running_agentd(local_cluster):
    local = local_cluster(1)
    machine = inspect_machine(Settings(key_dir=local.keys), local.head)
    (finding,) = doctor_checks.head(machine)
    assert finding.status == "pass", finding
    agentd = f"{local.nodes[0].pid} in {local.nodes[0].run_dir}"
    near = agentds([os.path.dirname(local.nodes[0].run_dir)])
    (found,) = [one for one in near if str(one) == agentd]
    there = Settings(run_dir=local.nodes[0].run_dir)
    assert asked([*near, Agentd(1, "/elsewhere")], there, "") == agentds([there.run_dir]) == [found]
    of_agentd = Settings.load(environment(found.pid))
    assert there.run_dir in recorded(of_agentd)
    assert asked([*near, Agentd(1, "/elsewhere")], of_agentd, f"tcp://{local.head}") == [found]
    placed = Settings(heads_dir=of_agentd.heads_dir, run_dir="/elsewhere")
    chosen = [asked([*near, Agentd(1, "/elsewhere")], placed, f"tcp://{local.head}", named) for named in (True, False)]
    assert chosen == [[found], [Agentd(1, "/elsewhere")]], "a head that the user names comes first"
    for unified in ("/sys/fs/cgroup/x", ""):
        roots = Roots(unified, why={} if unified else dict.fromkeys(("cgroup", "memory", "pids"), "w"))
        several = [AgentdFacts(roots, name=one) for one in (agentd, "")]
        checked = doctor_checks.cgroups(dataclasses.replace(GOOD, agentds=several))
        found = [finding for finding in checked if finding.check == "cgroup"]
        assert f"of agentd {agentd}" in found[0].text
        assert "started from here" in found[1].text


def test_private_cluster_is_checked_only_if_it_is_asked_about(rlinf_cluster):
    daemon = rlinf_cluster._daemon
    found = agentds([os.path.dirname(daemon.run_dir)])
    (private,) = [one for one in found if one.run_dir == daemon.run_dir]
    assert private not in asked(found, Settings.load(), "")
    assert asked(found, Settings.load(), rlinf_cluster._endpoint) == [private], "but it is, if its head is asked"
    assert log_dir_of(private) == f"{daemon.run_dir}/logs"


def test_a_worker_without_its_template_is_an_orphan(tmp_path):
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    (tmp_path / "t").mkdir()
    output = os.open(tmp_path / "t/1.err", os.O_WRONLY | os.O_CREAT)
    env = {**os.environ, WORKER_MARK: "abc-0"}
    orphan = subprocess.Popen(["sleep", "1000"], env=env)
    template = subprocess.Popen(
        [sys.executable, "-c", "import os, subprocess, sys; os.environ['RLINF_ACTORS_WORKER'] = 'abc-1';"
         "subprocess.run([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(1000)'])"],
        env={**os.environ, WORKER_MARK: "-" * 128}, stdout=subprocess.PIPE, stderr=output, text=True,
    )  # fmt: skip
    os.close(output)
    assert template.stdout is not None
    worker = int(template.stdout.readline())
    try:
        found = {process.pid: process for process in processes()}
        assert found[orphan.pid].orphan
        assert not found[worker].orphan
        assert found[template.pid].kind == "template"
        assert found[template.pid].orphan
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = {process.pid: process for process in processes()}
        assert not found[template.pid].orphan, "an agentd uses this run directory"
    finally:
        os.close(lock)
        os.kill(worker, signal.SIGKILL)
        for process in (orphan, template):
            process.kill()
            process.communicate()


@pytest.mark.skipif(not can_unshare("--pid", "--fork", "--mount-proc", "true"), reason="needs root and pid namespaces")
def test_a_process_in_a_container_is_no_orphan(tmp_path):
    code = "import os, subprocess; os.environ['RLINF_ACTORS_WORKER'] = 'a-1'; subprocess.run(['sh', '-c', 'echo; cat'])"
    template = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, f"{tmp_path}/pkg"],
        env={**os.environ, WORKER_MARK: "-" * 128}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert template.stdout is not None
    template.stdout.readline()
    inside = procfs.subtree(template.pid)[1:]
    try:
        assert len(inside) >= 2, "the template and its supposed worker"
        assert not {process.pid for process in processes()} & set(inside)
    finally:
        template.communicate()


def test_a_wrong_client_file_fails_and_the_other_checks_still_run(monkeypatch, tmp_path, capsys):
    (tmp_path / "client.toml").write_text("haed = 1\n")
    monkeypatch.setenv(CLIENT_CONFIG, str(tmp_path / "client.toml"))
    monkeypatch.setattr(doctor, "inspect_machine", lambda settings, head: GOOD)
    assert app.run(["doctor"]) == 1
    assert "haed: unknown key 'haed'; did you mean 'head'?" in capsys.readouterr().out


def test_findings_are_counted_by_status(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "inspect_machine", lambda settings, head: GOOD)
    monkeypatch.setattr(doctor, "diagnose", lambda machine: [Finding("a", "warn", "")])
    assert app.run(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {status: shown[status] for status in ("pass", "warn", "fail")} == {"pass": 0, "warn": 1, "fail": 0}


def test_key_files_are_checked(tmp_path):
    settings = Settings(key_dir=str(tmp_path / "k"))
    assert key_files(settings) == []
    assert app.run(["keys", "init", "--dir", str(tmp_path / "k"), "--name", "kim"]) == 0
    assert [(key.whose, key.private) for key in key_files(settings)] == [
        ("", True), ("head 'head'", True), ("driver 'kim'", True)
    ]  # fmt: skip
    (tmp_path / "k" / "driver.key").chmod(0o644)
    (tmp_path / "k" / "head.key").write_text("x")
    fixes = [finding.fix for finding in doctor_checks.keys(dataclasses.replace(GOOD, keys=key_files(settings)))]
    assert ["chmod 600" in fix for fix in fixes] == [False, True]


def test_a_cryptography_that_cannot_be_loaded_is_found(monkeypatch, tmp_path):
    broken = tmp_path / "cryptography"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libssl.so.3: version not found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert "version not found" in doctor_machine._cipher_error()


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (KeyRefusedError("the head at h:1 refused: this key"), "does not list this user's key"),
        (AuthenticationError("what listens there does not have the key that is expected"), "keys trust"),
        (ClusterTimeoutError(f"did not answer; {Diagnosis.KEYED.value}"), "busy or stopped"),
        (ClusterTimeoutError(f"did not answer; {Diagnosis.NOBODY.value}"), ""),
    ],
)
def test_fix_fits_the_cause(error, fix):
    assert fix in doctor_machine.fix_of(error)
    assert bool(fix) == bool(doctor_machine.fix_of(error))


def test_a_users_link_in_place_of_a_lock_is_not_followed(tmp_path):
    """root's `doctor` would open what it leads to, such as a watchdog."""
    (tmp_path / "device").touch()
    (tmp_path / "lock").symlink_to(tmp_path / "device")
    with pytest.raises(OSError, match="symbolic links"):
        doctor_machine.is_locked(str(tmp_path / "lock"))
    assert not doctor_machine.is_locked(str(tmp_path / "device"))
    with open(tmp_path / "device") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert doctor_machine.is_locked(str(tmp_path / "device"))
