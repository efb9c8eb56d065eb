"""Real forks, real kills. The fixture checks that no process, fd or file is left."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pace
import pytest
from workers_kit import children, order, spec

import agentd.workers
from agentd.templates import MAX_IDLE
from rlinf_actors import procfs
from rlinf_actors.procfs import WORKER_MARK
from rlinf_actors.wire.agent_messages import WorkerReady
from rlinf_actors.wire.launch_rules import LaunchRules
from rlinf_actors.wire.values import Claim

pytestmark = pytest.mark.live

TELL = """
import gc, json, os, random, signal, sys, threading
facts = {
    "env": dict(os.environ), "cwd": os.getcwd(), "path": sys.path, "argv": sys.argv, "pid": os.getpid(),
    "parent_line": open(f"/proc/{os.getppid()}/cmdline").read(),
    "sid": os.getsid(0), "stdin": os.readlink("/proc/self/fd/0"),
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")),
    "control": sock.fileno(), "random": random.random(), "threads": threading.active_count(),
    "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "handlers": [signal.getsignal(s) == signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGCHLD)],
    "comm": open("/proc/self/comm").read().strip(), "line": open("/proc/self/cmdline").read(), "gc": gc.isenabled(),
}
print(json.dumps(facts))
"""


async def environment_of(reports, one):
    return json.loads((await reports.line('"env"'))[2])


async def test_worker_comes_up_and_is_stopped(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one = spec()
        kids.start(order([one]))
        (ready,) = await reports.up(one)
        assert ready.port == 1000
        (tmp_path / "run" / "w" / one.id).touch()
        kids.stop([one.id, "unknown"], 5)
        exit = await reports.gone(one)
        assert (exit.kind, exit.signal) == ("stopped", 15)


async def test_worker_that_the_nodes_rules_do_not_admit_is_refused(tmp_path, caplog):
    """Even if the head orders its start; the others of the order come up."""
    async with children(tmp_path) as (kids, reports):
        kids.admit(LaunchRules(("a",), ()))
        one, robot, other = spec(), spec(claims=(Claim("arm", "Arm"),)), spec()
        kids.start(msgspec.structs.replace(order([one, robot]), driver="a"))
        kids.start(msgspec.structs.replace(order([other]), driver="b"))
        await reports.up(one)
        assert "does not give its robots to driver 'a'" in (await reports.gone(robot)).reason
        assert "node n0 does not admit driver 'b'" in (await reports.gone(other)).reason
        assert {report.id for report in reports.order if getattr(report, "refused", False)} == {robot.id, other.id}
        assert "refused to start workers of group g: node n0 does not admit" in caplog.text


async def test_a_stop_ends_what_the_template_was_not_asked_to_fork_yet(tmp_path):
    """So few forks lie between a stop, or a renewal of a robot's lease, and a template that is busy or stands still."""
    async with children(tmp_path) as (kids, reports):
        first, *others = specs = [spec(rank) for rank in range(10)]
        kids.start(order([first]))
        (ready,) = await reports.up(first)
        template = procfs.stat(ready.pid).parent
        os.kill(template, signal.SIGSTOP)
        try:
            kids.start(order(others))
            kids.stop([one.id for one in specs], 5.0)
            await reports.until(lambda: {one.id for one in others[2:]} <= reports.exits.keys())
            assert first.id not in reports.exits
            assert {exit.kind for exit in reports.exits.values()} == {"stopped"}
        finally:
            os.kill(template, signal.SIGCONT)
        await reports.until(lambda: len(reports.exits) == 10)


@contextlib.contextmanager
def traced(pid):
    """A debugger, as which nothing but SIGKILL ends the stand still of a process."""
    attach = (
        "import ctypes, sys; print(ctypes.CDLL(None).ptrace(16, int(sys.argv[1]), 0, 0), flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", attach, str(pid)], **pipes) as debugger:
        assert debugger.stdout.readline() == b"0\n"
        yield
        debugger.stdin.close()


@pytest.mark.parametrize("killed", [False, True])
async def test_template_that_stands_still_beside_a_robot_is_continued_or_killed(tmp_path, killed):
    """And its watchdog, which stands still too, ends the worker."""
    lease_s = 1.0 * pace.slowness
    async with children(tmp_path) as (kids, reports):
        loop = asyncio.get_running_loop()
        kids.renew(loop.time() + lease_s, lease_s)
        one = spec(claims=(Claim("arm", "Arm"),))
        kids.start(order([one]))
        (ready,) = await reports.up(one)
        watchdog = procfs.stat(ready.pid).parent
        template = procfs.stat(watchdog).parent
        for pid in (template, watchdog):
            os.kill(pid, signal.SIGSTOP)
        with traced(template) if killed else contextlib.nullcontext():
            kids.renew(loop.time() + lease_s, lease_s)
            exit = await reports.gone(one)
        assert ("template process that it came from ended" if killed else "no word from the head") in exit.reason
        assert procfs.stat(watchdog) is None


async def test_repeated_worker_up_is_reported_once(tmp_path):
    """Otherwise every repetition would be sent to the head."""
    again = "sock.send(spawn.encode(spawn.WorkerUp(spec.id, Endpoint('elsewhere'), 7, 0))); print('said', flush=True)"
    first = "from rlinf_actors.wire import template_protocol as spawn; from rlinf_actors.wire.values import Endpoint"
    async with children(tmp_path) as (kids, reports):
        one = spec(first=first, do=again)
        kids.start(order([one]))
        await reports.line("said")
        kids.stop([one.id], 0.0)
        await reports.gone(one)
        ups = [report for report in reports.order if isinstance(report, WorkerReady)]
        assert [(up.id, up.port) for up in ups] == [(one.id, 1000)]


async def test_worker_is_stopped_in_a_process_with_many_descriptors(tmp_path):
    """An agentd with a head and many connections has descriptors above 1023."""
    with contextlib.ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 1300:
            pytest.skip(f"this user may have {hard} descriptors")
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for _ in range(1024):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        async with children(tmp_path) as (kids, reports):
            one = spec()
            kids.start(order([one]))
            await reports.up(one)
            kids.stop([one.id], 5)
            assert (await reports.gone(one)).kind == "stopped"


async def test_worker_is_watched_and_stopped_as_soon_as_a_descriptor_is_free(tmp_path, monkeypatch, caplog):
    pidfd_open, none_left = os.pidfd_open, [True]

    def limited(pid):
        if none_left and procfs.stat(pid).parent != os.getpid():  # a worker's parent is its template
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pidfd_open(pid)

    monkeypatch.setattr(os, "pidfd_open", limited)
    monkeypatch.setattr(agentd.workers, "AGAIN_S", 0.01)
    async with children(tmp_path) as (kids, reports):
        one, other = spec(), spec(1, do="sys.exit(3)")
        kids.start(order([one, other]))
        await reports.up(one)
        assert (await reports.gone(other)).exit_code == 3, "the template reports that end"
        kids.stop([one.id], pace.PATIENCE_S)
        assert f"cannot watch worker {one.id} yet: Too many open files" in caplog.text
        none_left.clear()
        exit = await reports.gone(one)
        assert (exit.kind, exit.signal) == ("stopped", signal.SIGTERM)


async def test_link_of_another_installation_in_the_run_directory_is_replaced(tmp_path):
    """The old link to the package is dangling, or leads to another version."""
    (tmp_path / "run" / "pkg").mkdir(parents=True)
    (tmp_path / "run" / "pkg" / "rlinf_actors").symlink_to(tmp_path / "gone")
    async with children(tmp_path) as (kids, reports):
        one = spec()
        kids.start(order([one]))
        await reports.up(one)


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_worker_has_its_own_session_environment_and_descriptors(tmp_path, method):
    extra = tmp_path / "extra"
    extra.mkdir()
    async with children(tmp_path, env={"PATH": "/node", "OMP_NUM_THREADS": "3"}) as (
        kids,
        reports,
    ):
        one = spec(
            do=TELL,
            env={"PATH": "/ours", "RANK": "0"},
            start_method=method,
            cwd=str(extra),
            sys_path=[str(extra), "/no/such", "/usr/lib/python3.9"],
        )
        kids.start(order([one]))
        facts = await environment_of(reports, one)
    env = facts["env"]
    assert env[WORKER_MARK] == one.id
    assert (env["PATH"], env["RANK"], env["OMP_NUM_THREADS"]) == ("/ours:/node", "0", "3")
    for name in ("OPENBLAS_NUM_THREADS", "GLIBC_TUNABLES"):  # variables of the template alone
        assert env.get(name) == os.environ.get(name)
    assert facts["cwd"] == str(extra)
    assert facts["path"][0] == str(tmp_path / "run" / "pkg")
    assert str(extra) in facts["path"]
    assert not {"", "/no/such", "/usr/lib/python3.9"} & set(facts["path"])
    assert facts["sid"] == facts["pid"]
    assert facts["stdin"] == "/dev/null"
    assert facts["fds"] == [0, 1, 2, facts["control"]]
    assert facts["blocked"] == []
    assert all(facts["handlers"])
    assert facts["comm"] == "g:0"
    assert facts["line"].rstrip("\0") == f"rlinf: g:0 of {one.namespace}"
    assert facts["parent_line"].startswith("rlinf: template")
    assert facts["argv"] == ["-c"]
    assert facts["gc"]


async def test_forked_workers_draw_different_numbers(tmp_path):
    async with children(tmp_path) as (kids, reports):
        specs = [spec(rank, do=TELL) for rank in range(2)]
        kids.start(order(specs))
        await reports.until(lambda: len(reports.lines) == 2)
        assert len({json.loads(text)["random"] for _, _, text in reports.lines}) == 2


async def test_workers_of_one_environment_share_a_template(tmp_path):
    async with children(tmp_path) as (kids, reports):
        do = "print('parent', os.getppid())"
        kids.start(order([spec(0, do=do), spec(1, do=do), spec(2, do=do, env={"LD_LIBRARY_PATH": "/tmp"})]))
        await reports.until(lambda: len(reports.lines) == 3)
        parents = {name: text for name, _, text in reports.lines}
        assert parents["g:0"] == parents["g:1"] != parents["g:2"]


@pytest.mark.parametrize(
    ("do", "kind", "code", "number", "tail"),
    [
        ("raise SystemExit(3)", "exited", 3, None, ""),
        ("raise ValueError('oh')", "exited", 1, None, "ValueError: oh"),
        ("os.kill(os.getpid(), 9)", "signalled", None, 9, ""),
        ("import ctypes; ctypes.string_at(0)", "signalled", None, 11, "Segmentation fault"),
        ("os.write(2, b'last words'); os._exit(5)", "exited", 5, None, "last words"),
    ],
)
async def test_exit_report_has_kind_code_signal_and_last_lines(tmp_path, do, kind, code, number, tail):
    async with children(tmp_path) as (kids, reports):
        one = spec(do=do)
        kids.start(order([one]))
        exit = await reports.gone(one)
        assert (exit.kind, exit.exit_code, exit.signal, exit.oom) == (kind, code, number, "no")
        assert tail in "\n".join(exit.stderr_tail)


@pytest.mark.parametrize(("group", "warnings"), [("channel@c", 0), ("g", 1)])
async def test_the_host_of_a_closed_channel_ends_without_a_warning(tmp_path, caplog, group, warnings):
    async with children(tmp_path) as (kids, reports):
        one = spec(group=group, do="raise SystemExit(0)")
        kids.start(order([one]))
        assert (await reports.gone(one)).exit_code == 0
    assert caplog.text.count("exited with code 0") == warnings


async def test_worker_that_ends_before_it_listens_has_failed_to_start(tmp_path):
    async with children(tmp_path) as (kids, reports):
        crash, quiet = spec(first="raise OSError('no socket')"), spec(1, first="os._exit(0)")
        kids.start(order([crash, quiet]))
        exit = await reports.gone(crash)
        assert exit.kind == "start_failed"
        assert "OSError: no socket" in exit.stderr_tail[-1]
        assert "exit code 1" in exit.reason
        assert (await reports.gone(quiet)).kind == "start_failed"


async def test_worker_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one = spec(first="import signal; signal.signal(15, signal.SIG_IGN)")
        kids.start(order([one]))
        await reports.up(one)
        kids.stop([one.id], 60)
        kids.stop([one.id], 0.05)
        exit = await reports.gone(one)
        assert (exit.kind, exit.signal, exit.oom) == ("stopped", 9, "no")


async def test_worker_can_be_stopped_while_its_template_starts(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one = spec()
        kids.start(order([one]))
        kids.stop([one.id], 0)
        assert (await reports.gone(one)).kind == "stopped"


async def test_stop_before_the_fork_is_obeyed(tmp_path):
    async with children(tmp_path) as (kids, reports):
        kids.prestart()
        first = spec()
        kids.start(order([first]))
        await reports.up(first)
        one, two = spec(1), spec(2)
        kids.start(order([one, two]))
        kids.stop([one.id], 5)
        kids.stop([two.id], 0)
        assert (await reports.gone(one)).kind == "stopped"
        assert (await reports.gone(two)).kind == "stopped"


async def test_start_order_after_close_fails(tmp_path):
    async with children(tmp_path) as (kids, reports):
        await kids.close(0)
        one = spec()
        kids.start(order([one]))
        assert "shutting down" in (await reports.gone(one)).reason


async def test_twenty_workers_start_at_once(tmp_path):
    async with children(tmp_path) as (kids, reports):
        specs = [spec(rank) for rank in range(20)]
        kids.start(order(specs))
        assert [r.port for r in await reports.up(*specs)] == [1000 + n for n in range(20)]


async def test_template_with_threads_refuses_to_fork(tmp_path):
    (tmp_path / "threadful.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    async with children(tmp_path, env={"PYTHONPATH": f"{os.path.dirname(__file__)}:{tmp_path}"}) as (kids, reports):
        one = spec(
            preload=(
                "threadful",
                "no_such_module",
            )
        )
        kids.start(order([one]))
        await reports.up(one)
        note = await reports.line("started afresh instead of forked")
        assert note[1] == "err"
        assert "2 threads" in note[2]


async def test_close_does_not_wait_for_an_import(tmp_path, monkeypatch):
    monkeypatch.setattr("agentd.workers.TEMPLATE_END_S", 1000)
    os.mkfifo(tmp_path / "begun")
    (tmp_path / "endless.py").write_text(f"import signal; open('{tmp_path}/begun', 'w').close(); signal.pause()")
    async with children(tmp_path, env={"PYTHONPATH": f"{os.path.dirname(__file__)}:{tmp_path}"}) as (kids, reports):
        one = spec(preload=("endless",))
        kids.start(order([one]))
        with open(tmp_path / "begun") as begun:  # noqa: ASYNC230 the fifo opens when the import has begun
            begun.read()
    assert reports.exits[one.id].kind == "stopped"


@pytest.mark.parametrize("size", [3 << 18, 2 << 20])
async def test_environment_that_is_too_large_fails_the_start(tmp_path, size):
    async with children(tmp_path) as (kids, reports):
        one, two = spec(env={"BIG": "x" * size}), spec(1)
        kids.start(order([one, two]))
        exit = await reports.gone(one)
        assert exit.kind == "start_failed"
        assert "environment" in exit.reason
        await reports.up(two)


async def test_log_directory_that_cannot_be_made_fails_the_start(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one = spec(log_dir="/proc/nowhere")
        kids.start(order([one]))
        exit = await reports.gone(one)
        assert exit.kind == "start_failed"
        assert "/proc/nowhere/ns cannot be used" in exit.reason


async def test_start_without_free_descriptors_fails_with_the_reason(tmp_path, monkeypatch):
    read, own, looks = Path.read_bytes, Path(f"/proc/{os.getpid()}/stat"), []

    def none_left(path):
        if path == own and not looks:
            looks.append(path)
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path)

    async with children(tmp_path, keep_s=60.0) as (kids, reports):
        one, two = spec(), spec(1)
        monkeypatch.setattr(Path, "read_bytes", none_left)
        kids.start(order([one, two]))
        exit = await reports.gone(one)
        assert exit.kind == "start_failed"
        assert "Too many open files: this process may have" in exit.reason
        await reports.up(two)


@pytest.mark.parametrize("where", ["_plan", "_ask"])
async def test_internal_error_fails_only_the_worker_concerned(tmp_path, monkeypatch, caplog, where):
    async with children(tmp_path) as (kids, reports):
        before, one, two = spec(0), spec(1), spec(2)
        kids.start(order([before]))
        await reports.up(before)  # the template is ready, so the request goes out at once
        whose = kids if where == "_ask" else kids._starts
        right, met = getattr(whose, where), []

        def fault(*args):
            if met:
                return right(*args)
            met.append(args)
            raise RuntimeError("not thought of")

        monkeypatch.setattr(whose, where, fault)
        kids.start(order([one, two]))
        exit = await reports.gone(one)
        assert exit.kind == "start_failed"
        assert "internal error of its agentd (RuntimeError: not thought of)" in exit.reason
        await reports.up(two)
        (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
        assert record.exc_info
        caplog.clear()


async def test_ended_template_gets_no_worker(tmp_path):
    async with children(tmp_path) as (kids, reports):
        first, second = spec(0, do="print('parent', os.getppid())"), spec(1)
        kids.start(order([first]))
        template = int((await reports.line("parent"))[2].split()[1])
        await reports.up(first)
        end = os.pidfd_open(template)  # opened before the template ends, because the keeper reaps it at once
        os.kill(template, signal.SIGKILL)
        assert procfs.has_ended(end, None)  # before the loop hears of it
        os.close(end)
        kids.start(order([second]))
        await reports.up(second)
        await reports.gone(first)


async def test_end_of_a_worker_is_reported_even_if_its_template_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr("agentd.workers.TEMPLATE_SILENT_S", 0.05)
    async with children(tmp_path) as (kids, reports):
        code = "import time; print('here', flush=True); time.sleep(600)"  # its mark can be read only after it runs
        left = f"subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
        one = spec(do=f"import subprocess; {left}; print('parent', os.getppid())")
        kids.start(order([one]))
        await reports.line("here")
        template = int((await reports.line("parent"))[2].split()[1])
        (ready,) = await reports.up(one)
        assert len([pid for pid in procfs.pids() if procfs.mark_of(pid) == one.id]) == 2
        os.kill(template, signal.SIGSTOP)
        os.kill(ready.pid, signal.SIGKILL)
        assert "does not answer" in (await reports.gone(one)).reason
        assert not [pid for pid in procfs.pids() if procfs.mark_of(pid) == one.id]
        os.kill(template, signal.SIGCONT)


async def test_only_unrequested_ends_are_logged_as_warnings(tmp_path, caplog):
    async with children(tmp_path) as (kids, reports):
        one, two = spec(), spec(1)
        kids.start(order([one, two]))
        await reports.up(one, two)
        os.kill(reports.ready[one.id].pid, signal.SIGKILL)
        await reports.gone(one)
        kids.stop([two.id], 0.0)
        await reports.gone(two)
    (death,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert death.getMessage().startswith("worker g:0 of job ")
    assert "SIGKILL" in death.getMessage()


def test_workers_run_under_uvloop(tmp_path):
    uvloop = pytest.importorskip("uvloop")

    async def scenario():
        async with children(tmp_path) as (kids, reports):
            one, two = spec(do="print('hello')"), spec(1)
            kids.start(order([one, two]))
            await reports.up(one, two)
            await reports.line("hello")
            os.kill(reports.ready[two.id].pid, signal.SIGKILL)
            assert (await reports.gone(two)).signal == 9

    loop = uvloop.new_event_loop()
    loop.run_until_complete(scenario())
    loop.close()


async def test_idle_templates_are_limited(tmp_path):
    async with children(tmp_path) as (kids, reports):
        for n in range(MAX_IDLE + 2):
            one = spec(n, env={"OMP_NUM_THREADS": str(n + 1)}, do="raise SystemExit")
            kids.start(order([one]))
            await reports.gone(one)
            kids.acknowledged([one.id])  # otherwise its template keeps its exit status
        await kids._until(lambda: len(os.listdir(tmp_path / "run" / "t")) <= MAX_IDLE, 10)
        assert len(os.listdir(tmp_path / "run" / "t")) == MAX_IDLE


@pytest.mark.torch
async def test_threads_of_a_preloaded_torch_are_restored(tmp_path):
    pytest.importorskip("torch")
    do = (
        "import torch, numpy; print('threads', torch.get_num_threads(), torch.initial_seed() >= 0, numpy.random.rand())"
    )
    async with children(tmp_path) as (kids, reports):
        three, default = (
            spec(0, do=do, env={"OMP_NUM_THREADS": "3"}, preload=("torch",)),
            spec(1, do=do, preload=("torch",)),
        )
        kids.start(order([three, default]))
        await reports.up(three, default)
        await reports.until(lambda: len(reports.lines) == 2)
        said = {name: text.split() for name, _, text in reports.lines}
    assert said["g:0"][1] == "3"
    assert int(said["g:1"][1]) >= 1
    assert said["g:0"][3] != said["g:1"][3]


def ended():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_start_with_an_ended_owner_raises(tmp_path):
    pid = ended()
    (tmp_path / "run").mkdir()
    with pytest.raises(ProcessLookupError):
        async with children(tmp_path, owner_pid=pid):
            pass
