"""A robot worker's guard, in a process of its own whose template is the test: nothing moves after the stop."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest

from rlinf_actors import procfs
from rlinf_actors.exit_codes import LEASE_LOST
from rlinf_actors.procfs import WORKER_MARK
from rlinf_actors.wire import template_protocol

pytestmark = pytest.mark.slow

LEASE_S = 2.0 * pace.slowness
LONG_S = 600.0
BEATS = 8
"""Renewals in a lease, at least."""

WORKER = """
import contextlib, ctypes, os, signal, socket, subprocess, sys, threading, time
from rlinf_actors import procfs
from rlinf_actors.wire import template_protocol as spawn
from rlinf_actors.wire.values import Claim, WorkerSpec
from rlinf_actors.worker.template_socket import TemplateSocket
from rlinf_actors.worker.lease_guard import Guard

control, arm, lease_s, until = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])

def move(who="main"):
    os.write(arm, f"move {who}\\n".encode())

class Env:
    def on_lease_lost(self):
        time.sleep(0.05)  # as one that waits for the robot's confirmation
        os.write(arm, b"stop\\n")
        time.sleep(0.05)

spec = WorkerSpec("w1", "env", "ns", 0, 1, 0, {}, claims=(Claim("Arm:1", "Arm 1"),))
place = spawn.WorkerPlace("", "", "", "node", "", "", "", "", until, lease_s)
procfs.brand("w1")
guard = Guard(spec, place, TemplateSocket(socket.socket(fileno=control), lambda: None), Env)

def stream(who="main", forever=True):
    while True:
        with contextlib.suppress(Exception):
            move(who)
            time.sleep(0.002)

"""


class Process:
    """The worker; what it sent the arm is read from a pipe."""

    def __init__(self, folder: Path, body: str, lease_s: float, env: dict[str, str] | None = None) -> None:
        self.lease_s = lease_s
        script = folder / "worker.py"
        script.write_text(WORKER + textwrap.dedent(body))
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._arm, arm = os.pipe()
        self._text = b""
        given = [str(theirs.fileno()), str(arm), str(lease_s), str(time.monotonic() + lease_s)]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *given],
            pass_fds=(theirs.fileno(), arm),
            env={**os.environ, WORKER_MARK: "w1", **(env or {})},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(arm)
        theirs.close()

    def renew(self) -> None:
        self.control.send(template_protocol.encode(template_protocol.Renew(time.monotonic() + self.lease_s)))

    def until_moving(self, *who: str) -> None:
        """Wait until each of these has moved the arm; the lease lasts meanwhile, however long that takes."""
        missing = set(who or ["main"])
        moved = select.poll()
        moved.register(self._arm, select.POLLIN)
        while missing:
            assert self.process.poll() is None
            self.renew()
            if moved.poll(min(self.lease_s, LEASE_S) / BEATS * 1000):
                missing -= {line.removeprefix("move ") for line in self._read()}

    def _read(self) -> list[str]:
        data = os.read(self._arm, 1 << 16)
        *whole, rest = (self._text + data).split(b"\n")
        self._text = rest
        return [line.decode() for line in whole] if data else ["end"]

    def rest(self) -> list[str]:
        """All that comes until nobody holds the arm's connection any more."""
        lines = list[str]()
        while lines[-1:] != ["end"]:
            lines += self._read()
        return lines[:-1]

    def reason(self) -> str:
        """Why it lost its lease, as it said before it ended."""
        with contextlib.suppress(ConnectionResetError):  # there are packets that it has not read: told once
            self.control.recv(1 << 16, socket.MSG_PEEK)
        packet = template_protocol.decode_to_agent(self.control.recv(1 << 16))
        assert isinstance(packet, template_protocol.LeaseLost)
        return packet.text

    def close(self) -> None:
        self.control.close()
        os.close(self._arm)

    def revoke(self, *, orderly: bool = False) -> None:
        self.control.send(template_protocol.encode(template_protocol.Revoke("w1", "told", orderly)))


@contextlib.contextmanager
def worker(folder: Path, body: str, lease_s: float = LONG_S, **env: str) -> Iterator[Process]:
    procfs.set_subreaper()  # as a template is; conftest takes that back
    made = Process(folder, body, lease_s, env)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait(pace.PATIENCE_S)
        for pid in procfs.children(os.getpid()):  # orphans, which the guard has killed
            stat = procfs.stat(pid)
            ours = stat is not None and made.process.pid == stat.session
            if stat is not None and (ours or stat.state == "Z" or procfs.branded(pid, ["w1"])):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        made.close()


def stopped_last(lines: list[str]) -> None:
    assert lines.count("stop") == 1, lines[-5:]
    assert lines[-1] == "stop", lines[lines.index("stop") :]


@pytest.mark.parametrize("orderly", [True, False])
def test_a_lease_was_lost_unless_the_owner_wanted_the_end(tmp_path, orderly):
    with worker(tmp_path, "stream()") as one:
        one.until_moving()
        one.revoke(orderly=orderly)
        stopped_last(one.rest())
        said = one.reason()
    assert said.endswith(": told")
    assert ("was lost" in said) != orderly


def test_process_stopped_for_a_lease_has_lost_it_although_renewals_are_queued(tmp_path):
    with worker(tmp_path, "stream()", LEASE_S) as one:
        one.until_moving()
        os.kill(one.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, one.process.pid, os.WSTOPPED)
        time.sleep(LEASE_S + 0.1)  # it is the lease's length that is tested
        os.set_blocking(one._arm, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                one._read()
        os.set_blocking(one._arm, True)
        one.renew()
        os.kill(one.process.pid, signal.SIGCONT)
        *moved, last = one.rest()
        assert last == "stop"
        assert moved in ([], ["move main"]), "the system call that it was about to make, and none after it"
        assert one.process.wait(pace.PATIENCE_S) == LEASE_LOST
        assert "its process stood still" in one.reason()


def test_process_stopped_for_a_moment_keeps_its_lease(tmp_path):
    with worker(tmp_path, "stream()") as one:
        one.until_moving()
        os.kill(one.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, one.process.pid, os.WSTOPPED)
        os.kill(one.process.pid, signal.SIGCONT)
        for _ in range(3):
            one.until_moving()
        one.revoke()
        stopped_last(one.rest())


def test_machine_suspended_for_a_lease_has_lost_it(tmp_path):
    """CLOCK_MONOTONIC stands still meanwhile, CLOCK_BOOTTIME does not."""
    body = """
    slept, real = [0.0], time.clock_gettime
    time.clock_gettime = lambda clock: real(clock) + (slept[0] if clock == time.CLOCK_BOOTTIME else 0.0)
    def sleep(*_):
        slept[0] = 3600.0
        signal.raise_signal(signal.SIGUSR2)  # wakes the guard; a timer of CLOCK_BOOTTIME does where a machine sleeps
    signal.signal(signal.SIGUSR1, sleep)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    stream()
    """
    with worker(tmp_path, body) as one:
        one.until_moving()
        os.kill(one.process.pid, signal.SIGUSR1)
        stopped_last(one.rest())
        assert "its process stood still" in one.reason()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("before", ["", "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"])
def test_signals_that_end_a_process_make_its_robot_safe(tmp_path, number, before):
    with worker(tmp_path, f"{before}stream()") as one:
        one.until_moving()
        os.kill(one.process.pid, number)
        stopped_last(one.rest())
        assert one.process.wait(pace.PATIENCE_S) == LEASE_LOST
        assert f"it was sent {number.name}" in one.reason()


def test_renewals_that_came_during_the_start_count(tmp_path):
    """Importing takes longer than the lease on a slow machine; nothing has moved meanwhile."""
    with worker(tmp_path, "stream()", 0.5) as one:  # over before Python has started, but for these
        for _ in range(3):
            one.control.send(template_protocol.encode(template_protocol.Renew(time.monotonic() + LONG_S)))
        one.until_moving()
        one.revoke()
        stopped_last(one.rest())


def test_lease_is_renewed_during_a_start_that_outlasts_it(tmp_path):
    """As one does whose machine is busy: the renewals go on."""
    with worker(tmp_path, f"time.sleep({2 * LEASE_S})\nstream()", LEASE_S) as one:
        one.until_moving()
        one.revoke()
        stopped_last(one.rest())


EXEC = "code = f'import os, time\\nwhile True: os.write({arm}, b\"move child\\\\n\"); time.sleep(0.002)'; " + (
    "os.set_inheritable(arm, True); os.execve(sys.executable, [sys.executable, '-c', code], {})"
)
POPEN = """
code = f"import os, time\\nwhile True: os.write({arm}, b'move child\\\\n'); time.sleep(0.002)"
subprocess.Popen([sys.executable, "-c", code], pass_fds=[arm], env={ENV})
"""
DOUBLE_FORK = """
if not os.fork():
    os.setsid()
    if not os.fork():
        stream("child")
    os._exit(0)
os.wait()
"""
OWN_GROUP = """
if not os.fork():
    os.setpgid(0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stream("child")
"""
CHILDREN = {
    "fork": "if not os.fork(): stream('child')\n",
    "popen": POPEN.replace("{ENV}", "None"),
    "popen without environment": POPEN.replace("{ENV}", "{}"),
    "popen in a session of its own": POPEN.replace("{ENV}", "None, start_new_session=True"),
    "double fork": DOUBLE_FORK,
    "double fork without environment": DOUBLE_FORK.replace('stream("child")', EXEC),
    "one that ignores SIGHUP in a group of its own": OWN_GROUP,
    "a child of a child": "if not os.fork():\n    if not os.fork(): stream('child')\n    time.sleep(600)\n",
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_no_command_of_a_child_follows_the_stop(tmp_path, kind):
    with worker(tmp_path, CHILDREN[kind] + "stream()") as one:
        one.until_moving("main", "child")
        one.revoke()
        stopped_last(one.rest())


def test_exempted_child_runs_while_the_hook_runs(tmp_path):
    """It stops the arm when it is told to; then it goes, as all the others do."""
    body = """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        theirs.setblocking(False)
        while True:
            with contextlib.suppress(BlockingIOError):
                if theirs.recv(10) == b"stop":
                    os.write(arm, b"stop\\n")
                    theirs.send(b"done")
                    time.sleep(600)
            move("child")
            time.sleep(0.002)
    def stop(self):
        ours.send(b"stop")
        ours.recv(10)
    Env.on_lease_lost = stop
    assert guard.keep(pid) == ""
    move()
    time.sleep(600)
    """
    with worker(tmp_path, body) as one:
        one.until_moving("main", "child")
        one.revoke()
        stopped_last(one.rest())


def test_foreign_process_cannot_be_exempted_and_outlives_the_worker(tmp_path):
    """It would be killed with those that were stopped. The worker itself is none of its own processes either."""
    other = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    with other:
        other.stdout.readline()
        body = f"""
        for pid in ({other.pid}, os.getpid(), os.getppid(), 1, 1 << 22):
            os.write(arm, guard.keep(pid).encode() + b"\\n")
        stream()
        """
        with worker(tmp_path, body) as one:
            lines = [line for _ in range(5) for line in one._read()][:5]
            one.until_moving()
            one.revoke()
            stopped_last(one.rest())
        other.communicate(b"\n")
    assert lines == ["this worker did not start it"] * 4 + ["there is no such process"]
    assert other.returncode == 0


def test_daemon_of_the_worker_can_be_exempted(tmp_path):
    body = """
    (ours, theirs), (asked, ask), (moved, told) = os.pipe(), os.pipe(), os.pipe()
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.write(theirs, str(os.getpid()).encode())
            move("child")
            os.read(asked, 1)
            move("child")
            os.write(told, b"x")
            time.sleep(600)
        os._exit(0)
    os.wait()
    assert guard.keep(int(os.read(ours, 10))) == ""
    def stop(self):
        os.write(arm, b"stop\\n")
        os.write(ask, b"x")
        os.read(moved, 1)
    Env.on_lease_lost = stop
    stream()
    """
    with worker(tmp_path, body) as one:
        one.until_moving("main", "child")
        one.revoke()
        lines = one.rest()
    assert "move child" in lines[lines.index("stop") :]


RUNS_OUT = {
    "descriptors": """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with contextlib.suppress(OSError):
            while True:
                os.dup(arm)
        """,
    "threads": """
        import resource
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (4 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        try:
            threading.Thread(target=print).start()
        except RuntimeError as error:
            assert "can't start new thread" in str(error)
        else:
            raise AssertionError("there is room for a thread")
        """,
}


@pytest.mark.parametrize("what", RUNS_OUT)
def test_worker_without_descriptors_or_threads_is_made_safe_with_its_children(tmp_path, what):
    body = f"if not os.fork(): stream('child')\n{textwrap.dedent(RUNS_OUT[what])}stream()\n"
    with worker(tmp_path, body) as one:
        one.until_moving("main", "child")
        one.revoke()
        stopped_last(one.rest())
        assert one.process.wait(pace.PATIENCE_S) == LEASE_LOST


def test_worker_that_cannot_list_processes_logs_it_and_is_made_safe(tmp_path, capfd):
    """No descriptor can be opened, not even in the place of one of the reserve."""
    body = """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    stream()
    """
    with worker(tmp_path, body) as one:
        one.until_moving()
        one.revoke()
        stopped_last(one.rest())
        assert one.process.wait(pace.PATIENCE_S) == LEASE_LOST
    said = capfd.readouterr().err
    assert "cannot look for processes that this worker started: OSError(24, 'Too many open files')" in said
    assert "env:0: the lease of Arm 1 was lost: told" in said


WAITED = """
from rlinf_actors.worker import standstill as descendants

class Clock:
    waited = 0.0
    def monotonic(self):
        return self.waited
    def sleep(self, seconds):
        self.waited += seconds

clock = descendants.time = Clock()
def stop(self):
    os.write(arm, f"waited {clock.waited:.3f}\\n".encode() + b"stop\\n")
Env.on_lease_lost = stop
"""
UNINTERRUPTIBLE = """
fifo = sys.argv[0] + ".fifo"
os.mkfifo(fifo)
pid = os.fork()
if not pid:  # waits for its child's exec, as in an uninterruptible call of a driver; the child waits for the FIFO
    os.close(arm)
    os.posix_spawn(sys.executable, [sys.executable], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
while procfs.stat(pid).state != "D":  # nobody is told of that
    os.sched_yield()
stream()
"""
ANOTHER_USERS = """
if not os.fork():
    os.close(arm)
    time.sleep(600)
os.setresuid(65534, 65534, 65534)
stream()
"""


@pytest.mark.parametrize(
    ("body", "bound_s"),
    [
        pytest.param(UNINTERRUPTIBLE, 0.1, id="uninterruptible"),
        pytest.param(
            ANOTHER_USERS, 0.005, id="another user's", marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root")
        ),
    ],
)
def test_process_that_cannot_be_stopped_delays_the_hook_by_a_tenth_of_a_second_at_most(tmp_path, body, bound_s):
    with worker(tmp_path, WAITED + body) as one:
        one.until_moving()
        one.revoke()
        lines = one.rest()
    stopped_last(lines)
    assert 0.0 < float(lines[-2].removeprefix("waited ")) <= bound_s + 0.001


def test_a_process_that_the_hook_starts_runs(tmp_path):
    body = """
    def stop(self):
        subprocess.run([sys.executable, "-c", f"import os; os.write({arm}, b'stop\\\\n')"], pass_fds=[arm], check=True)
    Env.on_lease_lost = stop
    stream()
    """
    with worker(tmp_path, body) as one:
        one.until_moving()
        one.revoke()
        stopped_last(one.rest())


LOOP_C = """
#include <unistd.h>
#include <rlinf_lease.h>
void stream(const void *page, int arm) {
    while (rlinf_lease_held(page)) {
        if (write(arm, "move native\\n", 12) < 0) return;
        usleep(2000);
    }
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")
@pytest.mark.parametrize(("library", "lease_s"), [("CDLL", LONG_S), ("CDLL", LEASE_S), ("PyDLL", LEASE_S)])
def test_a_native_loop_that_reads_the_page_stops_with_the_lease(tmp_path, library, lease_s):
    """PyDLL keeps the interpreter's lock: the guard cannot run, and the page runs out by itself."""
    source, shared = tmp_path / "loop.c", tmp_path / "loop.so"
    source.write_text(LOOP_C)
    include = Path(__file__).parents[2] / "rlinf_actors" / "include"
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-I", include]
    subprocess.run(["cc", *flags, "-o", shared, source], check=True)
    body = f"""
    ctypes.{library}({json.dumps(str(shared))}).stream(ctypes.c_void_p(guard.page.address), arm)
    stream()
    """
    with worker(tmp_path, body, lease_s) as one:
        one.until_moving("native")
        if lease_s == LONG_S:
            one.revoke()
        stopped_last(one.rest())
        assert one.process.wait(pace.PATIENCE_S) == LEASE_LOST


STREAMS = """
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.worker.executors import BesideExecutor, SerialExecutor
from rlinf_actors.worker.invocation import Invocation
from rlinf_actors.worker.standstill import Unwound

lock = threading.Lock()

class Streams:
    def watch(self):
        with lock:
            try:
                yield move("main")
                yield move("main, without credit")  # made, and kept
                move("main, after the stop")
            finally:
                move("closed")

    def health(self):
        stream("beside")

def stop(self):
    with lock:  # which the generator holds
        os.write(arm, b"stop\\n")
        time.sleep(0.05)

Env.on_lease_lost = stop
executor = BesideExecutor(SerialExecutor(), {"health": 1}, guard.stay)
for call, (method, window) in enumerate({"watch": 1, "health": 0}.items(), 1):
    executor.submit(Invocation(b"driver", call, method, AuthenticatedParts(), lambda *_: None, bytes, 0.0, window))
try:
    executor.serve(Streams())
except Unwound:
    guard.stay()
"""


def test_a_generator_that_waits_for_its_caller_gives_back_its_lock_and_a_concurrent_method_stops(tmp_path):
    with worker(tmp_path, STREAMS) as one:
        one.until_moving("main", "main, without credit", "beside")
        one.revoke()
        lines = one.rest()
    stopped_last(lines)
    assert "move closed" in lines
    assert "move main, after the stop" not in lines
