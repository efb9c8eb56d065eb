"""agentd as a process: exit codes, the line to its driver, signals, and its owner's end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pace
import pytest

pytestmark = pytest.mark.live

ROOT = Path(__file__).resolve().parents[2]
NO_HARDWARE = "{}"


@pytest.fixture
def place():
    """A directory with a short path for sockets: pytest's paths are too long."""
    with tempfile.TemporaryDirectory(prefix="ad-", dir="/tmp") as path:
        Path(path, "hw.json").write_text(NO_HARDWARE)
        Path(path, "agentd.toml").write_text("")
        yield Path(path)


def environment(**more):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF", "NOTIFY"))}
    return {**clean, "PYTHONPATH": str(ROOT), **more}


def command(place, *arguments):
    return [sys.executable, "-m", "agentd", "--config", str(place / "agentd.toml"), *arguments]


def run(place, *arguments, **env):
    return subprocess.run(
        command(place, *arguments),
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=pace.PATIENCE_S,
        check=False,
    )


class Started:
    """A running agentd, and the line that it wrote to its driver."""

    def __init__(self, place, *arguments, name="run", **env):
        read, write = os.pipe()
        self.run_dir = place / name
        self.process = subprocess.Popen(
            command(place, "--run-dir", str(self.run_dir), "--log-dir", str(place / "log"), "--hardware",
                    str(place / "hw.json"), "--ready-fd", str(write), *arguments),
            env=environment(**env), pass_fds=(write,), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(write)
        with os.fdopen(read) as pipe:
            self.said = json.loads(pipe.readline() or "{}")

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.end()

    def end(self):
        self.errors = self.process.communicate(timeout=pace.PATIENCE_S)[1]
        return self.process.returncode


@pytest.fixture
def start(place):
    started = []

    def begin(*arguments, **more):
        started.append(Started(place, *arguments, **more))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.end()


HEAD = ("--head", "--listen", "127.0.0.1:0")


# --- exit codes ---


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "say what to be: --head, --connect HOST:PORT"),
        (("--hed",), "unrecognized arguments: --hed"),
        (("--head", "--connect", "127.0.0.1:1"), "not allowed with argument"),
        (("--node-rank", "x", "--head"), "invalid int value"),
        (("--head", "--embedded"), "give --owner-pid too"),
    ],
)
def test_usage_error_exits_with_64(place, arguments, text):
    done = run(place, *arguments)
    assert done.returncode == 64
    assert text in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--head", "--listen", "0.0.0.0:0"), "there is no key here. Run `rlinf-actors keys init`"),
        (("--connect", "192.0.2.1:7000"), "refusing to connect to tcp://192.0.2.1:7000"),
        (("--head", "--listen", "nonsense"), "it must be HOST:PORT"),
        (("--head", "--hardware", "/nowhere.json"), "/nowhere.json: cannot be read"),
    ],
)
def test_configuration_error_exits_with_78_and_one_line(place, arguments, text):
    done = run(place, "--run-dir", str(place / "run"), *arguments)
    assert done.returncode == 78
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_head_whose_name_is_not_found_exits_with_69_so_that_the_unit_starts_it_again(place):
    done = run(place, "--run-dir", str(place / "run"), "--connect", "no.such.host.invalid:1", "--insecure-test-network")
    assert done.returncode == 69
    assert "no route to the head's machine, no.such.host.invalid: " in done.stderr
    assert "`rlinf-actors doctor`" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_unknown_key_exits_with_78_and_a_suggestion(place):
    (place / "agentd.toml").write_text("[node]\nlabel = {}\n")
    done = run(place, "--check-config")
    assert done.returncode == 78
    assert "node.label: unknown key 'label'; did you mean 'labels'?" in done.stderr


def test_check_config_names_the_files(place):
    done = run(place, "--check-config")
    assert (done.returncode, done.stdout.strip()) == (0, str(place / "agentd.toml"))


def test_version_option_prints_the_version(place):
    assert run(place, "--version").stdout.startswith("agentd 0.")


def test_port_in_use_exits_with_78(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run(place, "--head", "--listen", address, "--run-dir", str(place / "run"))
    assert done.returncode == 78
    assert f"cannot listen on tcp://{address}: Address already in use, by " in done.stderr
    assert f"(pid {os.getpid()} on " in done.stderr
    assert "end that one, or choose another port" in done.stderr


def test_run_directory_in_use_exits_with_78(place, start):
    first = start(*HEAD)
    second = start(*HEAD)
    assert second.end() == 78
    assert "another --run-dir" in second.errors
    assert "another --run-dir" in second.said["error"]
    assert first.stop() == 0


def test_directory_that_cannot_be_made_exits_with_77_or_69(place):
    done = run(place, *HEAD, "--run-dir", "/proc/nowhere")
    assert done.returncode in (69, 77)
    assert len(done.stderr.splitlines()) == 1


def test_ended_owner_exits_with_69(place):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = run(place, "--head", "--embedded", "--owner-pid", str(gone.pid), "--run-dir", str(place / "run"))
    assert done.returncode == 69
    assert "gone already" in done.stderr


# --- a life ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_head_registers_and_ends_by_signal(start, number):
    head = start(*HEAD, "--node-id", "n0")
    assert head.said["node_id"] == "n0"
    assert head.said["head"].startswith("tcp://127.0.0.1:")
    assert head.stop(number) == 0
    assert "registered" in head.errors


def test_node_joins_a_head_and_a_taken_rank_is_refused(start):
    head = start(*HEAD, "--node-rank", "0")
    address = head.said["head"].removeprefix("tcp://")
    node = start("--connect", address, "--node-rank", "1", name="run1")
    assert node.said["head"] == head.said["head"]
    twin = start("--connect", address, name="run2", RLINF_NODE_RANK="1")
    assert twin.said["code"] == 78
    assert twin.end() == 78
    assert "RLINF_NODE_RANK: is 1 on two nodes" in twin.errors
    assert (node.stop(), head.stop()) == (0, 0)


def test_agent_without_a_head_is_ready_and_can_be_stopped(place):
    away = ("--connect", "127.0.0.1:9", "--run-dir", str(place / "run"), "--hardware", str(place / "hw.json"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(place / "notify"))
        manager.settimeout(pace.PATIENCE_S)
        process = subprocess.Popen(
            command(place, *away),
            env=environment(NOTIFY_SOCKET=str(place / "notify")), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        ready, status = manager.recv(4096).decode().split("\n")
    expected = "not registered yet: the head at tcp://127.0.0.1:9 did not answer"
    assert (ready, status[: 7 + len(expected)]) == ("READY=1", f"STATUS={expected}")
    assert status.endswith("; no accelerators or robots")
    assert any(expected in line for line in iter(process.stderr.readline, ""))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=pace.PATIENCE_S)
    assert process.returncode == 0


def test_failed_start_reports_its_reason_to_the_driver(start):
    failed = start("--head", "--listen", "0.0.0.0:1")
    assert failed.said["code"] == 78
    assert "there is no key here" in failed.said["error"]
    assert failed.end() == 78


def owner():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_an_embedded_cluster_ends_with_its_owner_and_leaves_nothing(start, place):
    driver = owner()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:  # of the driver's unit
        manager.bind(str(place / "notify"))
        manager.setblocking(False)
        daemon = start("--head", "--embedded", "--owner-pid", str(driver.pid), NOTIFY_SOCKET=str(place / "notify"))
        assert daemon.said["head"] == f"ipc://{daemon.run_dir}/head"
        driver.kill()
        driver.communicate()
        assert daemon.end() == 0
        with pytest.raises(BlockingIOError):
            manager.recv(4096)
    assert not daemon.run_dir.exists()


def test_owner_with_a_reused_pid_exits_with_69(start):
    driver = owner()
    daemon = start("--head", "--embedded", "--owner-pid", str(driver.pid), "--owner-start", "1")
    assert daemon.end() == 69
    assert "its pid is another's now" in daemon.said["error"]
    driver.communicate(b"\n")


def test_sighup_reads_the_configuration_again(place, start):
    head = start(*HEAD)
    (place / "agentd.toml").write_text('[node]\nenv = {X = "1"}\nname = "other"\n')
    head.process.send_signal(signal.SIGHUP)
    read = _lines_until(head.process.stderr, "taken over: ")
    assert "a restart is needed for: node.name" in read
    assert "env" in read.splitlines()[-1]
    (place / "agentd.toml").write_text("[nodes]\n")
    head.process.send_signal(signal.SIGHUP)
    assert "the configuration stays as it was" in _lines_until(head.process.stderr, "did you mean 'node'")
    assert head.stop() == 0


def test_sighup_removes_old_log_files_of_ended_workers(place, start):
    job = place / "log" / "job"
    job.mkdir(parents=True)
    for name, age_days in (("g-0.out", 9), ("g-0.err", 40), ("g-1.out", 40), ("g-1.out.marks", 40), ("notes", 40)):
        (job / name).write_text("said\n")
        os.utime(job / name, (time.time() - age_days * 86400,) * 2)
    head = start(*HEAD)
    (place / "agentd.toml").write_text("[workers]\nlog_keep_days = 10\n")
    head.process.send_signal(signal.SIGHUP)
    read = _lines_until(head.process.stderr, "removed the log files")
    assert "taken over: workers.log_keep_days" in read
    assert "of 1 ended workers" in read
    assert "older than 10 days (workers.log_keep_days)" in read
    assert {path.name for path in job.iterdir()} == {"g-0.out", "g-0.err", "notes"}, "one worker's files go together"
    assert head.stop() == 0


def _lines_until(stream, text):
    read = ""
    for line in iter(stream.readline, ""):
        read += line
        if text in line:
            return read
    raise AssertionError(read)


def test_the_service_manager_is_notified(place):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(place / "notify"))
        manager.settimeout(pace.PATIENCE_S)
        head = Started(place, *HEAD, NOTIFY_SOCKET=str(place / "notify"))
        said = [manager.recv(4096).decode()]
        assert head.stop() == 0
        with contextlib.suppress(BlockingIOError):
            manager.setblocking(False)
            while True:
                said.append(manager.recv(4096).decode())
    assert said[0].startswith("READY=1\nSTATUS=registered; head: ipc://")
    assert said[1] == "STOPPING=1\nSTATUS=stopping: SIGTERM"
    assert said[-1].endswith("STATUS=stopped"), "the driver was not told why agentd ended"


def test_daemon_does_not_load_torch(start):
    head = start(*HEAD)
    maps = Path(f"/proc/{head.process.pid}/maps").read_text()
    assert "torch" not in maps
    assert head.stop() == 0


def test_daemon_imports_no_heavy_modules():
    code = (
        "import agentd.command_line, agentd.daemon, agentd.session, agentd.workers, agentd.node_report, sys\n"
        "import rlinf_actors.head.server, rlinf_actors.net.zmq_network, rlinf_actors.hardware.probe\n"
        "print([m for m in ('cloudpickle', 'torch', 'click', 'rich', 'numpy', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
