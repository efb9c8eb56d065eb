"""A robot worker's guard, in a process of its own whose template is the test: nothing moves after the stop."""

from __future__ import annotations

import contextlib
import functools
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
import contextlib, ctypes, os, resource, signal, socket, subprocess, sys, threading, time
from rlinf_actors import Worker, procfs
from rlinf_actors.cgroups.worker_cgroup import Cgroup
from rlinf_actors.template import watchdog
from rlinf_actors.template.child_setup import ChildStart
from rlinf_actors.wire import frames
from rlinf_actors.wire import template_protocol as spawn
from rlinf_actors.wire.values import Claim, WorkerSpec
from rlinf_actors.worker.lease_guard import Guard
from rlinf_actors.worker.stopper import give_class

link, arm, lease_s, until, outside = int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
many = [os.dup(0) for _ in range(int(os.environ.get("DESCRIPTORS", "0")))]  # as a template of many workers has

def move(who="main"):
    os.write(arm, f"move {who}\\n".encode())

class Env(Worker):
    def __init__(self):
        pass

    def on_lease_lost(self):
        time.sleep(0.05)  # as one that waits for the robot's confirmation
        os.write(arm, b"stop\\n")
        time.sleep(0.05)

    @staticmethod
    def stop_hardware(hardware_infos):
        os.write(arm, f"stop {hardware_infos[0]}\\n".encode())

spec = WorkerSpec("w1", "env", "ns", 0, 1, 0, {}, claims=(Claim("Arm:1", "Arm 1"),), stops_outside=bool(outside))
place = spawn.WorkerPlace("", "", "", "node", "", "", "", "", until, lease_s)
control = os.open(os.devnull, os.O_RDWR)
start = watchdog.start(ChildStart(spawn.Fork(spec, place, {}), control, "", 0, Cgroup(), link=link), lambda *_: None)
os.setsid()
procfs.die_with_parent(signal.SIGKILL, start.template)
procfs.brand("w1")
env = object.__new__(Env)
guard = Guard(spec, place, start.guarded, lambda: env)

def stream(who="main", forever=True):
    while True:
        with contextlib.suppress(Exception):
            move(who)
            time.sleep(0.002)

def stops_outside():
    give_class(start.guarded.stopper, frames.Create(1, "", {}), Env, ["outside"])()

"""


class Process:
    """The worker below its watchdog; what it sent the arm is read from a pipe. The test is the template."""

    def __init__(self, folder: Path, body: str, lease_s: float, env: dict[str, str] | None, outside: bool) -> None:
        self.lease_s = lease_s
        script = folder / "worker.py"
        script.write_text(WORKER + textwrap.dedent(body))
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._arm, arm = os.pipe()
        self._text = b""
        given = [theirs.fileno(), arm, lease_s, time.monotonic() + lease_s, int(outside)]
        self.watchdog = subprocess.Popen(
            [sys.executable, str(script), *map(str, given)],
            pass_fds=(theirs.fileno(), arm),
            env={**os.environ, WORKER_MARK: "w1", **(env or {})},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(arm)
        theirs.close()
        self._code: int | None = None
        self._packets: list[object] = []

    @functools.cached_property
    def pid(self) -> int:
        """Of the worker, as the first packet of its watchdog says."""
        forked = self._packet()
        assert isinstance(forked, template_protocol.Forked)
        return forked.pid

    def _packet(self) -> object:
        """The next packet of the watchdog; None at its end."""
        if self._packets:
            return self._packets.pop(0)
        with contextlib.suppress(ConnectionResetError):  # there are packets that it has not read: told once
            self.link.recv(1 << 16, socket.MSG_PEEK)
        data = self.link.recv(1 << 16)
        return template_protocol.decode_to_agent(data) if data else None

    def renew(self) -> None:
        with contextlib.suppress(BlockingIOError):  # as a template, read what the watchdog confirms
            while data := self.link.recv(1 << 16, socket.MSG_DONTWAIT):
                self._packets.append(template_protocol.decode_to_agent(data))
        self.link.send(template_protocol.encode(template_protocol.Renew(time.monotonic() + self.lease_s)))

    def until_moving(self, *who: str) -> None:
        """Wait until each of these has moved the arm; the lease lasts meanwhile, however long that takes."""
        missing = set(who or ["main"])
        moved = select.poll()
        moved.register(self._arm, select.POLLIN)
        while missing:
            assert self.watchdog.poll() is None
            self.renew()
            if moved.poll(min(self.lease_s, LEASE_S) / BEATS * 1000):
                missing -= {line.removeprefix("move ") for line in self._read()}

    def _read(self) -> list[str]:
        data = os.read(self._arm, 1 << 16)
        *whole, rest = (self._text + data).split(b"\n")
        self._text = rest
        return [line.decode() for line in whole] if data else ["end"]

    def drain(self) -> None:
        """Read what it has sent the arm up to now."""
        os.set_blocking(self._arm, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._read()
        os.set_blocking(self._arm, True)

    def rest(self) -> list[str]:
        """All that comes until nobody holds the arm's connection any more."""
        lines = list[str]()
        while lines[-1:] != ["end"]:
            lines += self._read()
        return lines[:-1]

    def reason(self) -> str:
        """Why it lost its lease, as its watchdog said last."""
        assert self.pid
        said = []
        while (packet := self._packet()) is not None:
            said += [packet.text] if isinstance(packet, template_protocol.LeaseLost) else []
        return said[-1]

    def code(self) -> int:
        """The worker's exit code, or less a signal. Its watchdog has left its zombie to the template."""
        self.watchdog.wait(pace.PATIENCE_S)
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def close(self) -> None:
        self.link.close()
        os.close(self._arm)

    def revoke(self, *, orderly: bool = False) -> None:
        self.link.send(template_protocol.encode(template_protocol.Revoke("w1", "told", orderly)))


@contextlib.contextmanager
def worker(folder: Path, body: str, lease_s: float = LONG_S, *, outside: bool = False, **env: str) -> Iterator[Process]:
    procfs.set_subreaper()  # as a template is; conftest takes that back
    made = Process(folder, body, lease_s, env, outside)
    try:
        yield made
    finally:
        assert made.pid
        made.watchdog.kill()  # and so the kernel the worker
        made.code()
        left = [one for one in procfs.children(os.getpid()) if procfs.branded(one, ["w1"])]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        made.close()


def stand_still(pid: int) -> None:
    """Stop all threads of a process that is no child of this one: no event tells of it."""
    os.kill(pid, signal.SIGSTOP)
    while procfs.stat(pid).state != "T":
        os.sched_yield()


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


def test_watchdog_of_a_template_with_many_descriptors_ends_the_lease(tmp_path):
    with worker(tmp_path, "for fd in many: os.close(fd)\nstream()", DESCRIPTORS="1100") as one:
        one.until_moving()
        one.revoke()
        stopped_last(one.rest())
        assert one.code() == LEASE_LOST


def test_order_that_came_before_the_guard_is_the_reason(tmp_path, capfd):
    with worker(tmp_path, "stream()") as one:
        one.revoke()
        one.rest()
        assert one.reason().endswith(": told")
    said = capfd.readouterr().err
    assert "told" in said
    assert "stood still" not in said


def test_process_stopped_for_a_lease_has_lost_it_although_renewals_are_queued(tmp_path):
    with worker(tmp_path, "stream()", LEASE_S) as one:
        one.until_moving()
        stand_still(one.pid)
        for _ in range(5):
            one.renew()
            time.sleep(LEASE_S / 4)  # it is the lease's length that is tested
        one.drain()
        os.kill(one.pid, signal.SIGCONT)
        *moved, last = one.rest()
        assert last == "stop"
        assert moved in ([], ["move main"]), "the system call that it was about to make, and none after it"
        assert one.code() == LEASE_LOST
        assert "its process stood still" in one.reason()


def test_process_stopped_for_a_moment_keeps_its_lease(tmp_path):
    with worker(tmp_path, "stream()") as one:
        one.until_moving()
        stand_still(one.pid)
        os.kill(one.pid, signal.SIGCONT)
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
        os.kill(one.pid, signal.SIGUSR1)
        stopped_last(one.rest())
        assert "its process stood still" in one.reason()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("before", ["", "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"])
def test_signals_that_end_a_process_make_its_robot_safe(tmp_path, number, before):
    with worker(tmp_path, f"{before}stream()") as one:
        one.until_moving()
        os.kill(one.pid, number)
        stopped_last(one.rest())
        assert one.code() == LEASE_LOST
        assert f"it was sent {number.name}" in one.reason()


def test_renewals_that_came_during_the_start_count(tmp_path):
    """Importing takes longer than the lease on a slow machine; nothing has moved meanwhile."""
    with worker(tmp_path, "stream()", 0.5) as one:  # over before Python has started, but for these
        for _ in range(3):
            one.link.send(template_protocol.encode(template_protocol.Renew(time.monotonic() + LONG_S)))
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
        assert one.code() == LEASE_LOST


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
    "body",
    [
        pytest.param(UNINTERRUPTIBLE, id="uninterruptible"),
        pytest.param(
            ANOTHER_USERS, id="another user's", marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root")
        ),
    ],
)
def test_the_hook_runs_beside_a_process_that_cannot_be_stopped(tmp_path, body):
    with worker(tmp_path, body) as one:
        one.until_moving()
        one.revoke()
        stopped_last(one.rest())
        assert one.pid


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
        assert one.code() == LEASE_LOST


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


MOVING_CHILD = "if not os.fork(): stream('child')\n"
EXECS = """
code = f"import os, time\\nwhile True: os.write({arm}, b'move new program\\\\n'); time.sleep(0.002)"
os.set_inheritable(arm, True)
os.execv(sys.executable, [sys.executable, "-c", code])
"""


@pytest.mark.parametrize("child", ["", MOVING_CHILD], ids=["alone", "with a child"])
def test_a_worker_that_replaces_itself_by_another_program_is_killed(tmp_path, child):
    with worker(tmp_path, child + EXECS) as one:
        one.rest()
        assert one.code() == -signal.SIGKILL
        assert "it was replaced (os.exec)" in one.reason()


def test_a_worker_ends_with_its_watchdog(tmp_path):
    with worker(tmp_path, "stops_outside()\nstream()", outside=True) as one:
        one.until_moving()
        os.kill(one.watchdog.pid, signal.SIGKILL)
        assert one.rest()[-1] == "stop outside"
        assert one.code() == -signal.SIGKILL


def test_the_child_of_a_worker_that_stands_still_is_stopped_and_the_hook_runs_later(tmp_path):
    with worker(tmp_path, MOVING_CHILD + "stream()", LEASE_S) as one:
        one.until_moving("main", "child")
        stand_still(one.pid)
        while not isinstance(one._packet(), template_protocol.LeaseLost):
            one.renew()
            time.sleep(LEASE_S / BEATS)  # a lease has to pass
        (child,) = procfs.children(one.pid)
        while procfs.stat(child).state != "T":  # the packet comes before the stop, of which no event tells
            os.sched_yield()
        one.drain()
        os.kill(one.pid, signal.SIGCONT)
        lines = one.rest()
        stopped_last(lines)
        assert "move child" not in lines
        assert one.code() == LEASE_LOST


def test_a_hook_that_stood_still_is_killed_if_it_goes_on_without_its_guard(tmp_path):
    body = """
    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)
        ctypes.PyDLL(None).usleep(10**9)
    Env.on_lease_lost = stop
    stream()
    """
    with worker(tmp_path, body) as one:
        one.until_moving()
        one.revoke()
        time.sleep(template_protocol.ROBOT_END_S + 0.2)  # the time at which it would be killed has to pass
        assert procfs.stat(one.pid).state == "T"
        os.kill(one.pid, signal.SIGCONT)
        assert one.code() == -signal.SIGKILL


HOLDS_LOCK = "stops_outside()\n" + MOVING_CHILD + "move()\nctypes.PyDLL(None).usleep(10**9)\n"


@pytest.mark.parametrize("revoked", [True, False])
def test_a_worker_in_c_code_with_the_interpreters_lock_is_killed_and_stopped_from_outside(tmp_path, revoked):
    with worker(tmp_path, HOLDS_LOCK, LEASE_S, outside=True) as one:
        one.until_moving("main", "child")
        if revoked:
            one.revoke()
        lines = one.rest()
        assert lines[-1] == "stop outside"
        assert "stop" not in lines
        assert one.code() == -signal.SIGKILL
        assert "its guard could not run" in one.reason()


ENDS = {
    "exit": ("os._exit(3)", 3),
    "killed": ("os.kill(os.getpid(), 9)", -9),
    "crash": ("ctypes.string_at(0)", -signal.SIGSEGV),
}


@pytest.mark.parametrize("end", ENDS)
def test_hardware_is_stopped_from_outside_whatever_ends_the_worker(tmp_path, end):
    code, status = ENDS[end]
    with worker(tmp_path, f"stops_outside()\n{MOVING_CHILD}move()\n{code}", outside=True) as one:
        assert one.rest()[-1] == "stop outside"
        assert one.code() == status


def test_hardware_is_stopped_from_outside_after_the_hook(tmp_path):
    with worker(tmp_path, "stops_outside()\nstream()", outside=True) as one:
        one.until_moving()
        one.revoke()
        assert one.rest()[-2:] == ["stop", "stop outside"]


def test_nothing_is_stopped_after_an_orderly_end(tmp_path):
    with worker(
        tmp_path, "stops_outside()\nmove()\nguard.closed()\nmove('closed')\ntime.sleep(600)", outside=True
    ) as one:
        one.until_moving("main", "closed")
        one.revoke(orderly=True)
        assert one.rest() == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("time.sleep(600)", "it did not return within 1 s"),
        ("(signal.signal(signal.SIGALRM, signal.SIG_IGN), time.sleep(600))", "it did not return within 1 s"),
        ("1 / 0", "exit code 1; its stderr says why"),
    ],
)
def test_a_stop_from_outside_that_fails_is_said(tmp_path, body, said, capfd):
    code = f"Env.stop_hardware = staticmethod(lambda infos: {body})\nstops_outside()\nstream()"
    with worker(tmp_path, code, outside=True) as one:
        one.until_moving()
        one.revoke()
        stopped_last(one.rest())
        assert f"stop_hardware() failed: {said}" in one.reason()
    assert ("ZeroDivisionError" in capfd.readouterr().err) == (body == "1 / 0")


def test_a_class_that_cannot_be_imported_for_the_stop_is_refused(tmp_path):
    body = """
    class Broken:
        def __reduce__(self):
            return exec, (f"import os; assert os.getpid() == {os.getpid()}",)
    try:
        give_class(start.guarded.stopper, frames.Create(1, "", {}), Env, [Broken()])()
    except Exception as error:
        os.write(arm, f"{type(error).__name__}: {'cannot run outside the worker' in str(error)}\\n".encode())
    stream()
    """
    with worker(tmp_path, body, outside=True) as one:
        one.until_moving("WorkerStartError: True", "main")
        one.revoke()
        stopped_last(one.rest())


HELD = {
    "a thread with a name like the runtime's": """
        threading.Thread(target=stream, args=["thread"], name="rlinf-actors-then", daemon=True).start()
        stream()
        """,
    "a thread that has the lock of all threads": """
        threading.Thread(target=stream, args=["thread"], daemon=True).start()
        move()
        while True:
            threading.enumerate()
        """,
    "where no signal can be queued": """
        import resource
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))
        threading.Thread(target=stream, args=["thread"], daemon=True).start()
        stream()
        """,
}


@pytest.mark.parametrize("what", HELD)
def test_no_thread_moves_after_the_stop(tmp_path, what):
    with worker(tmp_path, HELD[what]) as one:
        one.until_moving("main", "thread")
        one.revoke()
        stopped_last(one.rest())


def test_a_kept_thread_runs_while_the_hook_runs(tmp_path):
    body = """
    asked, done = threading.Event(), threading.Event()
    def sdk():
        asked.wait()
        os.write(arm, b"stop\\n")
        done.set()
    def stop(self):
        asked.set()
        done.wait()
    Env.on_lease_lost = stop
    thread = threading.Thread(target=sdk, daemon=True)
    os.write(arm, f"move {guard.keep_thread(thread)}\\n".encode())
    thread.start()
    assert guard.keep_thread(thread) == ""
    os.write(arm, f"move {guard.keep_thread(threading.main_thread())}\\n".encode())
    stream()
    """
    with worker(tmp_path, body) as one:
        one.until_moving("it does not run", "the main thread runs the calls of this worker", "main")
        one.revoke()
        stopped_last(one.rest())


TURNS = """
import queue
from rlinf_actors.worker.standstill import Unwound

queue_ = queue.Queue()
with_ = {with_}
def turns():
    while True:
        with with_:
            move("thread")
            time.sleep(0.002)
def stop(self):
    with with_:
        os.write(arm, b"stop\\n")
Env.on_lease_lost = stop
for _ in range(2):
    threading.Thread(target=turns, daemon=True).start()
try:
    stream()
except Unwound:
    guard.stay()
"""


@pytest.mark.parametrize(
    "with_", ["threading.Lock()", "threading.RLock()", "threading.Condition()", "queue_.not_empty"]
)
def test_the_hook_gets_a_lock_for_which_two_threads_take_turns(tmp_path, with_):
    with worker(tmp_path, TURNS.format(with_=with_)) as one:
        one.until_moving("main", "thread")
        one.revoke()
        stopped_last(one.rest())


def test_the_hook_gets_a_lock_that_it_wants_after_a_while(tmp_path):
    """Not only one that it wants in the moment in which the guard first looks."""
    taken = "    with with_:\n        os.write"
    body = TURNS.format(with_="threading.Lock()").replace(taken, f"    time.sleep(0.4)\n{taken}")
    with worker(tmp_path, body) as one:
        one.until_moving("main", "thread")
        one.revoke()
        stopped_last(one.rest())


HOOKS = {
    "a coroutine that a plain function returns": """
        async def stopping():
            os.write(arm, b"stop\\n")
        Env.on_lease_lost = lambda self: stopping()
        """,
    "a generator": """
        def stop(self):
            yield
            os.write(arm, b"stop\\n")
        Env.on_lease_lost = stop
        """,
    "one that prints first, while nobody reads and a thread that is held has the stream": """
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        def stop(self):
            print("x" * 100_000)
            os.write(arm, b"stop\\n")
        Env.on_lease_lost = stop
        def fill():
            while True:
                sys.stdout.write("y" * 10_000)
        threading.Thread(target=fill, daemon=True).start()
        """,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_runs_whatever_it_is(tmp_path, hook):
    with worker(tmp_path, textwrap.dedent(HOOKS[hook]) + "stream()\n") as one:
        one.until_moving()
        one.revoke()
        stopped_last(one.rest())
