"""`rlinf-actors head`: restarts after kill -9, and unusable state files. Real processes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path

import pace
import pytest
from namespaces import can_unshare

from rlinf_actors.cli import app
from rlinf_actors.head.store import FILE
from rlinf_actors.net.host import HeldPorts

# some tests run six processes one after the other
pytestmark = pytest.mark.live

COMMAND = (sys.executable, "-m", "rlinf_actors.cli.main")


@contextmanager
def head(directory: Path, listen: str = "127.0.0.1:0", **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a head; yield it and its address. It is killed at the end."""
    command = [*COMMAND, "head", "--state-dir", str(directory), *(["--listen", listen] if listen else [])]
    environ = {**os.environ, **env}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def ask(address: str, *arguments: str) -> dict:
    with redirect_stdout(io.StringIO()) as out:
        assert app.run([*arguments, "--json", "--head", address]) == 0
    return json.loads(out.getvalue())


@pytest.fixture
def address() -> Iterator[str]:
    """An address for a head that is restarted: the kernel assigns the port to no other process meanwhile."""
    with closing(HeldPorts()) as ports:
        yield f"127.0.0.1:{ports.hold()}"


def test_state_survives_a_reboot_without_a_named_directory(tmp_path, address):
    """A reboot empties /tmp and the run directories. State of an earlier version, which is there, is taken over."""
    port = address.rpartition(":")[2]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    env.pop("RLINF_ACTORS_RUN_DIR", None)
    place = tmp_path / "state" / "rlinf-actors" / f"head-{port}"
    for boot in range(2):
        (tmp_path / "run").mkdir()
        command = [*COMMAND, "head", "--listen", address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            try:
                process.stdout.readline()
                if boot == 0:
                    ask(address, "estop", "--reason", "smoke")
                else:
                    assert "smoke" in str(ask(address, "status")["estop"])
            finally:
                process.kill()
        assert (place / FILE).exists()
        shutil.rmtree(tmp_path / "run")


def test_an_emergency_stop_and_a_higher_epoch_survive_kill_9(tmp_path, address):
    with head(tmp_path, address) as (_, there):
        assert there == address
        stopped = ask(address, "estop", "--reason", "smoke")
        assert stopped["warning"] == ""
    with head(tmp_path, address) as (_, again):
        status = ask(again, "status")
    assert again == address
    assert status["epoch"].startswith("2-")
    assert status["trouble"] == []
    assert [line for line in status["estop"] if "smoke" in line] == status["estop"] != []


def test_a_stop_that_a_restart_would_forget_is_not_a_success(tmp_path, address, capsys):
    with head(tmp_path / "state", address):
        shutil.rmtree(tmp_path / "state")
        assert app.run(["estop", "--reason", "smoke", "--head", address]) == 69
        said = capsys.readouterr().err
        (trouble,) = ask(address, "status")["trouble"]
    assert f"NOT ON DISK: {address}: the robots were told to stop" in said
    assert "THE EMERGENCY STOP IS NOT ON DISK EVERYWHERE" in said
    assert f"{tmp_path}/state/{FILE} was deleted or replaced" in trouble


def test_second_head_of_one_directory_exits_with_78(tmp_path):
    with head(tmp_path) as (first, address), head(tmp_path) as (second, nothing):
        assert address
        assert nothing == ""
        assert second.wait(pace.PATIENCE_S) == 78
        said = second.stderr.read()
    assert str(tmp_path / FILE) in said
    assert "is used by another head that runs, " in said
    assert f"(pid {first.pid} on " in said


def test_a_port_in_use_exits_with_78_and_names_the_process(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with head(tmp_path, listen) as (process, nothing):
            assert (nothing, process.wait(pace.PATIENCE_S)) == ("", 78)
            said = process.stderr.read()
    assert f"error: cannot listen on tcp://{listen}: Address already in use, by " in said
    assert f"(pid {os.getpid()} on " in said


def test_damaged_file_exits_with_78_and_is_unchanged(tmp_path):
    (tmp_path / FILE).write_bytes(b"rubbish" * 1000)
    with head(tmp_path) as (process, nothing):
        assert nothing == ""
        assert process.wait(pace.PATIENCE_S) == 78
        said = process.stderr.read()
    assert str(tmp_path / FILE) in said
    assert "see first that every robot is safe" in said
    assert (tmp_path / FILE).read_bytes() == b"rubbish" * 1000


ON_A_FULL_DISK = """
import json, os, subprocess, sys

disk, *command = sys.argv[1:]
state = disk + "/state"
filler = disk + "/filler"


def start():
    return subprocess.Popen([*command, state], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fill():
    with open(filler, "wb", 0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            pass


def refused():
    process = start()
    said = process.communicate()[1]
    return process.returncode, said


def goes():
    with start() as process:
        line = process.stdout.readline() or process.stderr.read()
        process.kill()
    return line


fill()
first = refused()
os.unlink(filler)
before = goes()
fill()
again = refused()
os.unlink(filler)
print(json.dumps([first, before, again, goes()]))
"""


def on_a_full_disk(disk: Path, *command: str) -> list:
    """Start a head on a full disk, with room, on a full disk after kill -9, and with room again; return the results."""
    within = ["--mount", "sh", "-c", f'mount -t tmpfs -o size=512k tmpfs {disk} && exec "$@"', "sh"]
    if not can_unshare(*within, "true"):
        pytest.skip("needs root and namespaces")
    done = subprocess.run(
        ["unshare", *within, sys.executable, "-c", ON_A_FULL_DISK, str(disk), *command],
        capture_output=True,
        text=True,
        check=True,
        timeout=pace.PATIENCE_S,
    )
    return json.loads(done.stdout)


def test_head_stopped_by_a_full_disk_starts_again_with_room(tmp_path):
    command = (*COMMAND, "head", "--listen", "127.0.0.1:0", "--state-dir")
    first, before, again, after = on_a_full_disk(tmp_path, *command)
    for code, said in (first, again):
        assert code == 69, "exit code 78 would keep systemd from restarting it"
        assert f"{tmp_path}/state/{FILE} cannot be written" in said
        assert f"The file system at {tmp_path} has" in said
        assert "of 512 KiB" in said
    for line in (before, after):
        assert line.startswith("127.0.0.1:")


def test_an_agentd_with_the_head_on_a_full_disk_exits_with_69(tmp_path):
    (run := tmp_path / "run").mkdir(mode=0o700)
    (disk := tmp_path / "disk").mkdir(mode=0o700)
    agentd = (sys.executable, "-m", "agentd", "--head", "--listen", "127.0.0.1:0", "--ready-fd", "1", "--prestart", "")
    places = ("--run-dir", str(run), "--log-dir", str(run), "--state-dir")
    first, _, again, after = on_a_full_disk(disk, *agentd, *places)
    for code, said in (first, again):
        assert code == 69
        assert f"The file system at {disk} has" in said
    assert json.loads(after)["head"].startswith("tcp://127.0.0.1:")


def test_a_head_notifies_the_service_manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(pace.PATIENCE_S)
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
        with head(tmp_path, "", RLINF_ACTORS_LISTEN="127.0.0.1:0", **told) as (process, address):
            said = [manager.recv(4096).decode() for _ in range(4)]
            process.send_signal(signal.SIGHUP)
            lines = iter(process.stderr.readline, "")
            assert any("SIGHUP: the head reloads nothing" in line for line in lines), "and it lives"
            process.terminate()
            assert process.wait(pace.PATIENCE_S) == 0
            while not said[-1].startswith("STOPPING"):
                said.append(manager.recv(4096).decode())
    assert said[0] == "WATCHDOG=1"
    assert f"READY=1\nSTATUS=listens on {address}" in said
    assert said[-1] == "STOPPING=1\nSTATUS=stopping: SIGTERM"
    assert len([one for one in said if one == "WATCHDOG=1"]) >= 3


def test_an_error_at_the_start_has_a_priority_in_the_journal(tmp_path):
    with open(tmp_path / "journal", "w+") as journal:
        found = os.fstat(journal.fileno())
        env = {**os.environ, "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}", "RLINF_ACTORS_LISTEN": "nowhere"}
        done = subprocess.run([*COMMAND, "head"], env=env, stderr=journal, check=False, timeout=pace.PATIENCE_S)
        journal.seek(0)
        said = journal.read()
    assert done.returncode == 78
    assert said == "<3>error: RLINF_ACTORS_LISTEN: is 'nowhere'; it must be HOST:PORT, e.g. 127.0.0.1:6380\n"
