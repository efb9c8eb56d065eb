"""The parts of the template that need no template."""

import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from rlinf_actors import procfs
from rlinf_actors.cgroups.worker_cgroup import Cgroup
from rlinf_actors.procfs import WORKER_MARK, OomKills
from rlinf_actors.template import forked_workers
from rlinf_actors.template.child_setup import _count, import_path, unprotect
from rlinf_actors.template.forked_workers import ForkedWorker, ForkedWorkers
from rlinf_actors.template.log_pump import TAIL_LINE_BYTES, TAIL_LINES, LogPump, Tail
from rlinf_actors.wire.template_protocol import (
    ROBOT_GONE_S,
    Fork,
    Forked,
    LeaseLost,
    NodeRegistered,
    Renew,
    Renewed,
    Revoke,
    WorkerPlace,
    WorkerUp,
    decode_to_watchdog,
    decode_to_worker,
    encode,
)
from rlinf_actors.wire.values import Claim, Endpoint, WorkerSpec


def test_tail_of_binary_output_fits_into_a_packet():
    tail = Tail()
    for _ in range(TAIL_LINES):
        tail.feed(b"\xff" * TAIL_LINE_BYTES + b"\n")
    lines = tail.lines()
    assert len(lines) == TAIL_LINES
    assert all(len(line.encode()) <= TAIL_LINE_BYTES + len(" [cut]") for line in lines)


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_tail_is_the_last_lines(step):
    tail = Tail()
    data = b"".join(b"line %d\n" % n for n in range(50)) + b"no end"
    for at in range(0, len(data), step):
        tail.feed(data[at : at + step])
    assert tail.lines() == [f"line {n}" for n in range(50 - TAIL_LINES + 1, 50)] + ["no end"]


def test_tail_cuts_long_lines_and_keeps_the_others():
    tail = Tail()
    tail.feed(b"first\n" + b"x" * 100_000)
    tail.feed(b"x" * 100_000 + b"\nlast\r\n\xff")
    assert tail.lines() == ["first", "x" * TAIL_LINE_BYTES + " [cut]", "last", "\ufffd"]


def test_log_pump_appends_and_has_a_tail(tmp_path):
    path = tmp_path / "out"
    path.write_text("before\n")
    pump = LogPump(str(path))
    os.write(pump.writer, b"one\n")
    assert pump.pump() == (True, False)
    os.write(pump.writer, b"two\n")
    pump.close_writer()
    assert pump.pump() == (True, True)
    assert path.read_text() == "before\none\ntwo\n"
    assert pump.tail.lines() == ["one", "two"]
    pump.close()
    pump.close()


@pytest.mark.parametrize("path", ["/dev/full", "/no/such/dir/out"])
def test_log_pump_on_a_full_disk_empties_the_pipe_and_has_a_fault(path):
    pump = LogPump(path)
    os.write(pump.writer, b"lost\n")
    assert pump.pump() == (True, False)
    assert pump.fault.startswith(f"{path}: ")
    assert pump.tail.lines() == ["lost"]
    pump.close()


@pytest.mark.parametrize("name", ["out", "out.new"])
def test_log_pump_writes_nothing_to_a_fifo(tmp_path, name):
    os.mkfifo(tmp_path / name)
    reader = os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK)
    pump = LogPump(str(tmp_path / "out"), limit=10)
    for _ in range(3):
        os.write(pump.writer, b"a secret\n")
        pump.pump()
    assert os.read(reader, 100) == b""
    assert pump.fault.endswith("is a FIFO, no file")
    pump.close()
    os.close(reader)


def test_log_pump_gives_others_a_turn_and_reads_all_at_the_end(tmp_path):
    pump = LogPump(str(tmp_path / "out"))
    os.write(pump.writer, b"x" * 60_000)
    assert pump.finish(), "although the other end is open"
    assert not pump.finish()
    assert (tmp_path / "out").stat().st_size == 60_000
    pump.close()


def test_orphan_in_an_exec_may_belong_to_an_ended_worker(monkeypatch):
    forked = ForkedWorkers(None, None)
    of_one, other = (SimpleNamespace(id=f"{name}-{os.getpid()}") for name in ("ended", "living"))
    of_one.status, other.status = object(), None
    forked._workers = {one.id: one for one in (of_one, other)}
    forked._ending = [of_one]
    read = []
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, WORKER_MARK: of_one.id}) as process:
        with monkeypatch.context() as patch:  # it is done with that as soon as its mark was looked for
            patch.setattr(procfs, "mark_of", read.append)
            patch.setattr(procfs, "in_exec", lambda pid: pid == process.pid and pid not in read)
            first = forked._sweep(), forked._look_again > 0
        second = forked._sweep()
        process.kill()
    assert (first, second) == (({of_one.id}, True), {of_one.id})


OUTLIVED = """
import ctypes, platform, sys, threading
libc = ctypes.CDLL(None)
threading.Thread(target=libc.pause).start()
print("started", flush=True)
libc.syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(), of this thread alone
"""
"""A program whose main thread ends before another thread."""


def test_orphan_whose_main_thread_has_ended_is_killed():
    forked = ForkedWorkers(None, None)
    ended = SimpleNamespace(id=f"ended-{os.getpid()}", status=object())
    forked._workers, forked._ending = {ended.id: ended}, [ended]
    with subprocess.Popen([sys.executable, "-c", OUTLIVED], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"started\n"
            while procfs.stat(process.pid).state != "Z":
                os.sched_yield()
            assert not procfs.stat(process.pid).ended
            assert forked._sweep() == {ended.id}
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()


TOLD = """
import os, selectors, socket, subprocess, sys
from types import SimpleNamespace
from rlinf_actors.cgroups.worker_cgroup import Cgroup
from rlinf_actors.wire import template_protocol as spawn
from rlinf_actors.template.template import end_all
from rlinf_actors.template.forked_workers import ForkedWorkers
from rlinf_actors.template.forked_workers import ForkedWorker

place = SimpleNamespace(out_path="/dev/null", err_path="/dev/null", lease_until=0.0, lease_s=0.0)
spec = SimpleNamespace(id="w", token="", claims=["arm"], forward_logs=False, keep_logs=False)
fork = SimpleNamespace(spec=spec, place=place, wrapper=[])
worker = ForkedWorker(fork, Cgroup(), {})
process = subprocess.Popen(["true"], start_new_session=True)
process.returncode = 0  # ForkedWorkers reaps it
worker.started(process.pid)
sent = []
forked = ForkedWorkers(selectors.DefaultSelector(), sent.append, True)
forked.add(worker)
os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
forked.wake()
forked.check_ends()
assert [type(packet) for packet in sent] == [spawn.Exited] and forked.workers == [worker], sent
"""
"""A robot worker has ended and agentd was told, but has no pidfd of it yet."""


@pytest.mark.parametrize(
    ("then", "reaped"),
    [
        ("forked.renew(spawn.Renew(1.0))", False),
        ("forked.tell(spawn.Revoke('w', 'its group was shut down'))", False),
        ("forked.probe()", False),
        ("forked.tell_all(spawn.NodeRegistered('e'))", False),
        ("forked.revoke_all('its agentd was stopped')", False),
        ("forked.watched('w')", True),
        ("forked.orphaned('its agentd ended')", True),
        ("end_all(forked.workers, socket.socketpair()[0])", False),
    ],
)
def test_reported_worker_is_harmless_until_it_is_reaped(then, reaped):
    """In a process of its own: ForkedWorkers ends every process below it that it does not know."""
    code = f"{TOLD}\n{then}\nassert (forked.workers == []) == {reaped}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_next_agentd_watches_the_profiler_of_an_ended_worker_whose_pid_may_be_anothers():
    place = WorkerPlace("", "", "", "n0", "", "", "/dev/null", "/dev/null")
    worker = ForkedWorker(Fork(WorkerSpec("w", "g", "ns", 0, 1, 0, {}), place, {}, ["nsys"], 1.0), Cgroup(), {})
    with selectors.DefaultSelector() as selector:
        forked = ForkedWorkers(selector, lambda packet: None, True)
        worker.started(10)
        forked.add(worker)
        assert [one.pid for one in forked.inventory()] == [10]
        worker.inner = 11
        assert [one.pid for one in forked.inventory()] == [11]
        worker.child.close()
        forked._on_control(worker)
        assert [one.pid for one in forked.inventory()] == [10]
    worker.close()


def test_all_workers_that_listen_are_told_that_the_node_has_registered():
    place = WorkerPlace("", "", "", "n0", "", "", "/dev/null", "/dev/null")
    packet = NodeRegistered("e2", again=True)
    with selectors.DefaultSelector() as selector:
        forked = ForkedWorkers(selector, lambda packet: None, True)
        for n in range(3):
            worker = ForkedWorker(Fork(WorkerSpec(f"w{n}", "g", "ns", n, 3, 0, {}), place, {}), Cgroup(), {})
            worker.pid = n
            if n:
                worker.up = WorkerUp(worker.id, Endpoint("h"), 0, 0)
            forked.add(worker)
        forked.tell_all(packet)
        for worker in forked.workers:
            worker.child.setblocking(False)
            if worker.up:
                assert decode_to_worker(worker.child.recv(1000)) == packet
            with pytest.raises(BlockingIOError):
                worker.child.recv(1000)
        forked.close()


@pytest.fixture
def robot_worker():
    place = WorkerPlace("", "", "", "n0", "", "", "/dev/null", "/dev/null", lease_until=102.0, lease_s=2.0)
    spec = WorkerSpec("w", "g", "ns", 0, 1, 0, {}, claims=(Claim("Arm:1", "Arm 1"),))
    worker = ForkedWorker(Fork(spec, place, {}), Cgroup(), {})
    with selectors.DefaultSelector() as selector:
        sent = []
        forked = ForkedWorkers(selector, sent.append)
        forked.add(worker)

        def says(*said):
            for packet in said:
                worker.theirs.send(encode(packet))
            for key, mask in selector.select(0):
                key.data(mask)
            return sent

        yield SimpleNamespace(forked=forked, due=worker.due, worker=worker, watchdog_says=says)
        forked.close()


def test_robot_worker_that_starts_keeps_its_lease_by_what_agentd_sends(robot_worker):
    assert robot_worker.due() == pytest.approx(101.6)
    robot_worker.forked.renew(Renew(102.5))
    assert robot_worker.due() == pytest.approx(102.1)


def test_robot_worker_that_runs_keeps_its_lease_by_what_its_watchdog_confirms(robot_worker):
    robot_worker.watchdog_says(Forked("w", 1))
    robot_worker.forked.renew(Renew(102.5))
    assert robot_worker.due() == pytest.approx(101.6)
    robot_worker.watchdog_says(Renewed("w", 102.5))
    assert robot_worker.due() == pytest.approx(102.1)
    robot_worker.watchdog_says(Renewed("w", 102.0))  # an older one
    assert robot_worker.due() == pytest.approx(102.1)
    robot_worker.worker.continued = 102.5
    assert robot_worker.due() == pytest.approx(102.25)  # when it is killed


def test_watchdog_that_ends_its_worker_has_the_time_for_all_of_it_once(robot_worker):
    robot_worker.watchdog_says(LeaseLost("w", "told"))
    due = robot_worker.due()
    assert 0 < due - time.monotonic() <= ROBOT_GONE_S
    sent = robot_worker.watchdog_says(LeaseLost("w", "told; and more"))
    assert robot_worker.due() == due
    assert robot_worker.worker.failure == "told; and more"
    assert [packet for packet in sent if isinstance(packet, LeaseLost)] == [LeaseLost("w", "told")]


def test_watchdog_that_confirms_nothing_is_continued_and_has_no_lease(robot_worker):
    """Else a renewal that it got before it stood still, and that was not confirmed, would let the worker go on."""
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        robot_worker.worker.pid = process.pid
        robot_worker.forked.renew(Renew(102.5))
        robot_worker.forked.check_ends()
        assert os.waitid(os.P_PID, process.pid, os.WCONTINUED).si_status == signal.SIGCONT
        process.kill()
    said = [decode_to_watchdog(robot_worker.worker.theirs.recv(1000)) for _ in range(2)]
    assert said == [Renew(102.5), Revoke("w", "its watchdog stood still")]


def test_watchdog_that_is_stopped_before_it_has_ended_its_worker_is_continued(robot_worker, monkeypatch):
    monkeypatch.setattr(forked_workers, "GRACE_S", 0.0)
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        robot_worker.worker.pid = process.pid
        robot_worker.watchdog_says(LeaseLost("w", "told"))
        robot_worker.forked.check_ends()
        assert os.waitid(os.P_PID, process.pid, os.WCONTINUED).si_status == signal.SIGCONT
        process.kill()


def test_watchdog_whose_worker_has_ended_has_the_same_time_and_nobody_hears_of_a_lost_lease(robot_worker):
    sent = robot_worker.watchdog_says(Forked("w", 1), LeaseLost("w", ""))
    assert 0 < robot_worker.due() - time.monotonic() <= ROBOT_GONE_S
    assert robot_worker.worker.failure == ""
    assert not any(isinstance(packet, LeaseLost) for packet in sent)


def test_worker_without_robots_has_no_deadline():
    place = WorkerPlace("", "", "", "n0", "", "", "/dev/null", "/dev/null", lease_until=102.0, lease_s=2.0)
    worker = ForkedWorker(Fork(WorkerSpec("w", "g", "ns", 0, 1, 0, {}), place, {}), Cgroup(), {})
    assert worker.due() == math.inf
    worker.close()


def test_import_path_puts_the_drivers_directories_before_the_interpreters():
    current = ["/run/pkg", "/usr/lib/python3.11", "/venv/lib/python3.11/site-packages"]
    wanted = ["/work", "", "/gone", "/other/lib/python3.12/site-packages", "/usr/lib/python312.zip", "/work", "/lib2"]
    assert import_path(current, wanted, lambda entry: entry != "/gone") == ["/run/pkg", "/work", "/lib2", *current[1:]]


def test_thread_count_of_an_environment():
    assert _count({"A": "", "B": "4,2"}, "A", "B") == 4
    assert _count({"A": "0", "B": "many"}, "A", "B") == 0


@pytest.mark.parametrize(
    ("before", "after", "blame"),
    [
        ((1, 1), (2, 2), "yes"),
        ((None, 1), (None, 2), "suspected"),
        ((1, 1), (1, 2), "suspected"),
        ((1, 1), (1, 1), "no"),
        ((None, None), (None, None), "no"),
    ],
)
def test_cause_of_a_sigkill_is_found(before, after, blame):
    assert OomKills(*after).blame(OomKills(*before)) == blame


def test_oom_counters_can_be_read():
    counts = procfs.oom_kills()
    assert all(count is None or count >= 0 for count in (counts.group, counts.machine))


def test_own_process_is_described():
    stat = procfs.stat(os.getpid())
    assert (stat.pid, stat.parent, stat.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert os.getpid() in procfs.children(os.getppid())
    assert os.getpid() in procfs.subtree(os.getppid())
    assert not procfs.in_exec(os.getpid())
    assert procfs.stat(2**22 + 1) is procfs.mark_of(2**22 + 1) is None
    assert procfs.children(2**22 + 1) == []


def test_children_are_found_although_a_thread_ends_meanwhile(monkeypatch):
    lists = [["999999999"], os.listdir(f"/proc/{os.getppid()}/task")]  # the first is listed, and gone when it is read
    monkeypatch.setattr(os, "listdir", lambda path: lists.pop(0))
    assert os.getpid() in procfs.children(os.getppid())


def test_a_thread_that_ends_while_all_are_named_is_left_out(monkeypatch):
    tasks = os.listdir("/proc/self/task")
    names = procfs.threads()
    monkeypatch.setattr(os, "listdir", lambda path: ["999999999", *tasks])  # listed, and gone when it is read
    assert procfs.threads() == names


def test_a_thread_may_have_any_name():
    """The kernel cuts names after 15 bytes, in the middle of a letter too."""
    names = []

    def tell() -> None:
        procfs.set_name("fourteen bytesé")
        names.extend(procfs.threads())

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()
    assert "fourteen bytes\ufffd" in names


def test_a_full_log_file_begins_anew_at_the_end_of_a_line(tmp_path):
    path = tmp_path / "out"
    pump = LogPump(str(path), limit=100)
    for n in range(30):
        os.write(pump.writer, b"line %2d, first half" % n)
        pump.pump()
        os.write(pump.writer, b", second half\n")
        pump.pump()
    old, new = (tmp_path / "out.1").read_text(), path.read_text()
    assert new.endswith("line 29, first half, second half\n")
    assert {len(line) for line in (old + new).splitlines()} == {32}, "no line is in two files"
    assert len(old) <= 133
    pump.close()


def test_log_of_which_nothing_may_be_left_out_is_renamed_only_when_its_older_part_was_read(tmp_path):
    path = tmp_path / "out"
    pump = LogPump(str(path), limit=100, keep=True)

    def say(lines):
        for _ in range(lines):
            os.write(pump.writer, b"nine byte\n")
            pump.pump()

    say(15)  # the reader has not begun: the first part waits for it
    say(40)
    assert ((tmp_path / "out.1").stat().st_size, path.stat().st_size) == (100, 450)
    pump.reading = path.stat().st_ino
    say(1)
    assert ((tmp_path / "out.1").stat().st_size, path.stat().st_size) == (450, 10)
    pump.close()


def test_output_without_lines_is_bounded_too(tmp_path):
    pump = LogPump(str(tmp_path / "out"), limit=100)
    for _ in range(50):
        os.write(pump.writer, b"." * 30)
        pump.pump()
    assert (tmp_path / "out.1").stat().st_size + (tmp_path / "out").stat().st_size < 500
    pump.close()
    again = LogPump(str(tmp_path / "out"), limit=100)
    os.write(again.writer, b"x\n" * 60)
    again.pump()
    assert (tmp_path / "out").stat().st_size == 120, "what an earlier worker wrote counts"
    again.close()


@pytest.mark.parametrize(("score", "expected"), [("-500\n", "0"), ("-1\n", "0"), ("0\n", "0\n"), ("300\n", "300\n")])
def test_workers_are_not_spared_when_memory_runs_out(tmp_path, score, expected):
    """A score below 0 needs a capability that not every machine gives its tests; test_unit_life has it for real."""
    file = tmp_path / "oom_score_adj"
    file.write_text(score)
    unprotect(file)
    assert file.read_text() == expected
