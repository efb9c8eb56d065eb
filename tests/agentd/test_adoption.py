"""Adoption of workers and templates of an earlier agentd: real templates, both agentds in this process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

import pace
import pytest
from workers_kit import HERE, children, make, order, spec

import agentd.sweep
from agentd import adoption, keeper_client, owner
from agentd.adoption import Survivors, end_template, refuse_other_protocols, take_inventory
from agentd.launch_plan import Rules, Site
from agentd.run_dir import OrderLedger, make_directories
from agentd.sweep import Sweep
from agentd.template_start import TemplateStarter
from rlinf_actors import procfs
from rlinf_actors.errors import ProtocolMismatchError, RlinfActorsError
from rlinf_actors.procfs import WORKER_MARK
from rlinf_actors.testing.faults import templates
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.protocol import PROTOCOL

pytestmark = pytest.mark.live

HIDDEN = """
import subprocess
command = ["env", "-i", "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"]
print("hidden", subprocess.check_output(command, text=True), end="")
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


async def start_and_leave(tmp_path, *specs, **options):
    """Run an agentd that starts *specs* and goes; return its reports, and its template's pid."""
    kids, reports = make(tmp_path, keep_s=60.0, **options)
    kids.start(order(specs))
    await reports.up(*specs)
    for one in specs:
        if "hidden" in one.env["DO"]:
            await reports.line("hidden")
    (template,) = kids._templates.running
    kids.abandon()
    return reports, template.pid


@contextlib.asynccontextmanager
async def take_over(tmp_path, template, goes=False, **options):
    """Run the next agentd, after its inventory. At the end it stops all workers, or leaves them if *goes*."""
    survivors = await take_inventory(str(tmp_path / "run"), True)
    kids, reports = make(tmp_path, keep_s=60.0, ledger=survivors.ledger, **options)
    kids.adopt(survivors.templates, survivors.workers)
    try:
        yield kids, reports, survivors
    finally:
        if goes:
            kids.abandon()
        else:
            await kids.close(0.2)
            assert procfs.stat(template) is None, "the keeper has reaped the template"


def ended(pidfd):
    return bool(select.select([pidfd], [], [], 0)[0])


async def test_unmarked_process_ends_with_a_stalled_template(tmp_path, monkeypatch):
    monkeypatch.setattr(adoption, "ANSWER_S", 0.1)
    one = spec(do=HIDDEN)
    reports, template = await start_and_leave(tmp_path, one)
    hidden = os.pidfd_open(int((await reports.line("hidden"))[2].split()[1]))
    os.kill(template, signal.SIGSTOP)
    async with take_over(tmp_path, template) as (_, _, survivors):
        assert "did not answer" in survivors.lost[one.id]
        assert survivors.templates == []
        assert ended(hidden)
    os.close(hidden)


async def parent_of(kids, reports, one):
    """Start a worker; returns the pid of its template."""
    kids.start(order([one]))
    (up,) = await reports.up(one)
    return procfs.stat(up.pid).parent


async def test_upgraded_packages_start_a_new_template_and_end_the_old_one(tmp_path):
    site = tmp_path / "site-packages"
    (site / "numpy-1.26.0.dist-info").mkdir(parents=True)
    env = {"PYTHONPATH": f"{HERE}:{site}"}
    async with children(tmp_path, env=env) as (kids, reports):
        one, two, three = spec(0), spec(1), spec(2)
        first = await parent_of(kids, reports, one)
        assert await parent_of(kids, reports, two) == first
        (site / "numpy-1.26.0.dist-info").rename(site / "numpy-2.0.0.dist-info")
        assert await parent_of(kids, reports, three) != first
        assert len(kids._templates.running) == 2, "the old template still serves its living workers"
        kids.stop([one.id, two.id], 5.0)
        await reports.gone(one)
        await reports.gone(two)
        kids.acknowledged([one.id, two.id])
        await kids._until(lambda: len(kids._templates.running) == 1, pace.PATIENCE_S)
        assert procfs.stat(first) is None, "the old template ended with its last worker"


@pytest.mark.parametrize("changed", ["settings", "code", "nothing"])
async def test_adopted_template_forks_workers_only_if_code_and_settings_are_unchanged(tmp_path, changed):
    site = tmp_path / "site-packages"
    site.mkdir()
    env, one, two = {"PYTHONPATH": f"{HERE}:{site}"}, spec(0), spec(1)
    _, template = await start_and_leave(tmp_path, one, env=env)
    if changed == "code":
        (site / "torch-2.9.0.dist-info").mkdir()
    rules = {"log_bytes": 1 << 20} if changed == "settings" else {}
    async with take_over(tmp_path, template, env=env, rules=rules) as (kids, reports, _):
        assert one.id in kids._workers
        assert (await parent_of(kids, reports, two) == template) == (changed == "nothing")
        kids.stop([one.id], 5.0)
        await reports.gone(one)
        kids.acknowledged([one.id])
        if changed != "nothing":
            await kids._until(lambda: len(kids._templates.running) == 1, pace.PATIENCE_S)
            assert [running.pid for running in kids._templates.running] != [template]


async def test_agentd_refuses_to_start_beside_a_template_of_another_protocol(tmp_path):
    one, run_dir = spec(0), tmp_path / "run"
    _, template = await start_and_leave(tmp_path, one)
    refuse_other_protocols(str(run_dir))
    (path,) = (run_dir / "t").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "protocol": PROTOCOL + 1}))
    said = rf"process {template} of .* with 1 worker, .* protocol {PROTOCOL + 1}; .* --reap --run-dir {run_dir}`"
    with pytest.raises(ProtocolMismatchError, match=said):
        refuse_other_protocols(str(run_dir))
    assert procfs.stat(template) is not None
    assert one.id in (await take_inventory(str(run_dir), False)).lost, "as agentd --reap does"
    refuse_other_protocols(str(run_dir))


async def test_killed_keeper_is_replaced_and_no_worker_ends(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one, two, three = spec(0), spec(1), spec(2, env={"OMP_NUM_THREADS": "3"})
        first = await parent_of(kids, reports, one)
        keeper = procfs.stat(first).parent
        os.kill(keeper, signal.SIGKILL)
        assert await parent_of(kids, reports, two) == first, "templates outlive their keeper"
        other = await parent_of(kids, reports, three)
        assert procfs.stat(other).parent not in (keeper, os.getpid())
        assert reports.exits == {}
        os.kill(first, signal.SIGKILL)
        assert "ended (signal 9" in (await reports.gone(one)).reason, "the template had become a child of agentd"


def stop_and_wait(pid):
    """Stop a child of this process, and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


async def test_stalled_keeper_is_replaced_without_delay(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one, two = spec(0), spec(1, env={"OMP_NUM_THREADS": "3"})
        keeper = procfs.stat(await parent_of(kids, reports, one)).parent
        stop_and_wait(keeper)
        kids.start(order([two]))
        assert procfs.stat(keeper).state == "T", "agentd has not waited for the keeper's answer"
        kids._keeper._on_silence()
        (up,) = await reports.up(two)
        assert procfs.stat(procfs.stat(up.pid).parent).parent not in (keeper, os.getpid())
        assert one.id not in reports.exits


async def test_template_can_be_killed_before_the_keeper_has_started_it(tmp_path):
    async with children(tmp_path) as (kids, _):
        stop_and_wait(kids._keeper.pid)
        kids.start(order([spec()]))
        (template,) = kids._templates.running
        template.kill()
        await kids._until(lambda: not kids._templates.running, pace.PATIENCE_S)
        assert "had not started it yet" in template.last_words()
        os.kill(kids._keeper.pid, signal.SIGCONT)


async def test_template_killed_under_a_stalled_keeper_leaves_no_zombie(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one = spec()
        template = await parent_of(kids, reports, one)
        keeper = procfs.stat(template).parent
        stop_and_wait(keeper)
        os.kill(template, signal.SIGKILL)
        assert "is not known" in (await reports.gone(one)).reason
        os.kill(keeper, signal.SIGKILL)  # `children` checks for leftovers


@pytest.fixture
def unit_keeper(tmp_path):
    """The keeper of rlinf-workers@.service, and the path of its socket."""
    path = f"{tmp_path}/keeper"
    code = f"from agentd import keeper_client as keeping; keeping.enter_leaf = str; keeping.become_keeper({path!r})"
    env = {**os.environ, "NOTIFY_SOCKET": f"{tmp_path}/notify"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(env["NOTIFY_SOCKET"])
        notified.settimeout(pace.PATIENCE_S)
        with subprocess.Popen([sys.executable, "-c", code], env=env) as process:
            notified.recv(100)
            yield process, path
            process.kill()


async def test_stalled_keeper_of_the_unit_is_killed(tmp_path, unit_keeper):
    process, path = unit_keeper
    stop_and_wait(process.pid)
    async with children(tmp_path, keeper=path) as (kids, reports):
        one = spec()
        kids.start(order([one]))
        assert procfs.stat(process.pid).state == "T"
        kids._keeper._on_silence()
        assert "look at systemctl status" in (await reports.gone(one)).reason, "systemd starts another keeper"
    assert process.wait(pace.PATIENCE_S) == -signal.SIGKILL


async def test_keeper_with_a_full_accept_queue_causes_no_delay(tmp_path, unit_keeper):
    process, path = unit_keeper
    stop_and_wait(process.pid)
    with contextlib.suppress(BlockingIOError):
        while True:
            keeper_client.connect(path).close()
    assert keeper_client.pid_of(path) is None
    async with children(tmp_path, keeper=path) as (kids, reports):
        one = spec()
        kids.start(order([one]))
        assert "does not answer: look at systemctl status" in (await reports.gone(one)).reason


async def test_launch_without_the_units_keeper_names_the_unit(tmp_path):
    async with children(tmp_path, keeper=f"{tmp_path}/none") as (kids, reports):
        one = spec()
        kids.start(order([one]))
        assert "systemctl status rlinf-workers@USER" in (await reports.gone(one)).reason


async def test_importing_template_ends_with_its_agentd(tmp_path):
    """An importing template cannot notice agentd's end itself. The imported module hangs and says so."""
    (tmp_path / "hangs.py").write_text("import os, signal\nos.write(2, b'hangs')\nsignal.pause()\n")
    env = {"PYTHONPATH": f"{HERE}:{tmp_path}"}
    kids, _ = make(tmp_path, keep_s=60.0, env=env)
    kids.prestart(["hangs"])
    (template,) = kids._templates.running
    await template._starting
    pidfd = os.pidfd_open(template.pid)
    kids.abandon()
    assert await asyncio.to_thread(procfs.has_ended, pidfd, pace.PATIENCE_S)
    os.close(pidfd)


async def test_worker_without_a_ledger_entry_is_ended_and_forgotten(tmp_path):
    stray = spec()
    reports, template = await start_and_leave(tmp_path, stray)
    for path in (tmp_path / "run" / "l").iterdir():
        path.unlink()
    pid = reports.ready[stray.id].pid
    async with take_over(tmp_path, template, goes=True) as (kids, reports, survivors):
        assert [kept.id for kept in survivors.templates[0].strays] == [stray.id]
        other = spec(1)
        kids.start(order([other]))  # with which the template is done only after the end of the first
        await reports.up(other)
        assert procfs.stat(pid) is None, "it is reaped"
    async with take_over(tmp_path, template) as (_, _, again):
        assert (again.templates[0].strays, list(again.workers)) == ([], [other.id])


async def test_template_ignores_callers_until_one_adopts_it(tmp_path):
    kids, reports = make(tmp_path, keep_s=60.0)
    one, other = spec(do="signal.pause()"), spec(1)  # this worker ends only by the kernel's signal
    kids.start(order([one]))
    await reports.up(one)
    (path,) = (tmp_path / "run" / "t").glob("*.sock")
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(4)]
        for caller, said in zip(
            callers, (b"\xc1", template_protocol.encode(template_protocol.KeepFor(0.0)), b"", b""), strict=True
        ):
            caller.connect(str(path))
            if said:
                caller.send(said)
                assert caller.recv(1) == b""
        kids.start(order([other]))
        await reports.up(other)
        callers[2].send(template_protocol.encode(template_protocol.Adopt()))
        assert (await reports.gone(one)).kind == "signalled"
        await reports.gone(other)
    await kids.close(0.2)


async def test_answer_that_came_during_a_stall_of_agentd_counts(monkeypatch):
    monkeypatch.setattr(adoption, "ANSWER_S", 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)

    def answer_and_stall():
        for packet in (template_protocol.SurvivingWorker("a"), template_protocol.Inventory(5.0)):
            theirs.send(template_protocol.encode(packet))
        time.sleep(0.05)

    with ours, theirs:
        asyncio.get_running_loop().call_soon(answer_and_stall)
        assert await adoption._receive_inventory(ours) == (
            [template_protocol.SurvivingWorker("a")],
            template_protocol.Inventory(5.0),
        )
        with pytest.raises(asyncio.TimeoutError):
            await adoption._receive_inventory(ours)


async def test_template_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(adoption, "TEMPLATE_END_S", 0.05)
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as template:  # noqa: ASYNC220
        template.stdout.readline()
        pidfd = os.pidfd_open(template.pid)
        await end_template(template.pid, pidfd, "why", True, Survivors(OrderLedger(None)))
        assert template.wait() == -signal.SIGKILL
        os.close(pidfd)


async def test_sweep_spares_a_process_with_a_reused_pid():
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:  # noqa: ASYNC220
        stat = procfs.stat(process.pid)
        for started in (0, stat.started + 1):
            await adoption.sweep([], {process.pid: started})
            assert process.poll() is None
        done = asyncio.Event()
        Sweep(asyncio.get_running_loop(), [], {process.pid: stat.started}, lambda *_: done.set())
        await done.wait()
        process.returncode = 0  # reaped there
    assert procfs.stat(process.pid) is None


async def test_sweep_spares_a_process_that_got_the_pid_after_the_search(monkeypatch):
    """Between the search and the kill another process may get the pid."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:  # noqa: ASYNC220
        started = procfs.stat(process.pid).started
        looks = [started, started + 1]  # the second look finds another process

        def stat(pid, found=procfs.stat):
            known = found(pid)
            return known._replace(started=looks.pop(0) if len(looks) > 1 else looks[0]) if pid == process.pid else known

        monkeypatch.setattr(procfs, "stat", stat)
        await adoption.sweep([], {process.pid: started})
        assert process.poll() is None
        process.kill()


async def test_sweep_kills_the_session_of_an_ended_process():
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=2).pid)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader:  # noqa: ASYNC220
        pidfd = os.pidfd_open(int(leader.stdout.readline()))
    await adoption.sweep([], {leader.pid: 0})
    assert ended(pidfd)
    os.close(pidfd)


FORKS = """
import os, signal, sys
sys.stdin.readline()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
signal.pause()
"""


def marked(command, mark, **more):
    return subprocess.Popen(command, env={**os.environ, WORKER_MARK: mark}, text=True, **more)


async def test_sweep_kills_a_process_forked_after_its_listing(monkeypatch):
    procfs.set_subreaper()
    mark, pids, late = f"forks-{os.getpid()}", procfs.pids, []
    with marked([sys.executable, "-c", FORKS], mark, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:

        def listed():
            found = pids()
            if not late:
                parent.stdin.write("\n")
                parent.stdin.flush()
                late.append(os.pidfd_open(int(parent.stdout.readline())))
                parent.wait()
            return found

        monkeypatch.setattr(procfs, "pids", listed)
        await adoption.sweep([mark], {})
    found = ended(late[0])
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(late[0], signal.SIGKILL)
    os.close(late[0])
    assert found


async def test_sweep_kills_a_process_that_is_in_the_middle_of_exec(monkeypatch):
    mark, mark_of, unread = f"executes-{os.getpid()}", procfs.mark_of, []
    with marked(["sleep", "1000"], mark) as process:
        unread.append(process.pid)
        monkeypatch.setattr(procfs, "mark_of", lambda pid: unread.remove(pid) if pid in unread else mark_of(pid))
        await adoption.sweep([mark], {})
        left = procfs.stat(process.pid)
        process.kill()
    assert left is None


@pytest.mark.parametrize("call", ["pidfd_open", "listdir"])
async def test_sweep_without_free_descriptors_tries_again(monkeypatch, caplog, call):
    mark, real, failed = f"lives-{os.getpid()}", getattr(os, call), []

    def limited(*what):
        if not failed:
            failed.append(what)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(*what)

    monkeypatch.setattr(agentd.sweep, "AGAIN_S", 0.0)
    with marked(["sleep", "1000"], mark) as process:
        monkeypatch.setattr(os, call, limited)
        try:
            await adoption.sweep([mark], {})
            left = procfs.stat(process.pid)
        finally:
            process.kill()
    assert (bool(failed), left) == (True, None)
    assert "is repeated in 0 s: Too many open files" in caplog.text


async def test_sweep_ignores_a_process_that_ends_before_its_pidfd_opens(monkeypatch):
    """Linux before 6.15 returns EINVAL for an ended process whose pid remains as a session id."""
    mark, pidfd_open = f"ends-{os.getpid()}", os.pidfd_open
    with marked(["sleep", "1000"], mark) as process:

        def late(pid):
            if pid == process.pid:
                process.kill()
                process.wait()
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return pidfd_open(pid)

        monkeypatch.setattr(os, "pidfd_open", late)
        try:
            await adoption.sweep([mark], {})
        finally:
            process.kill()


async def test_owner_whose_pid_remains_as_a_session_id_is_gone(monkeypatch):
    def late(pid):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pidfd_open", late)
    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(RlinfActorsError, match="is gone already"):
            owner.watch_owner(os.getpid(), 0, lambda: None, stack)


def test_correct_link_to_the_package_is_not_replaced(tmp_path):
    link = tmp_path / "pkg" / "rlinf_actors"
    make_directories(tmp_path)
    before = link.lstat().st_ino, link.lstat().st_mtime_ns
    make_directories(tmp_path)
    assert (link.lstat().st_ino, link.lstat().st_mtime_ns) == before


async def test_files_of_templates_are_named_after_their_agentd(tmp_path):
    this = procfs.stat(os.getpid())
    site = Site(Rules("n0", ""), tmp_path, None, dict)
    starter = TemplateStarter.of_site(asyncio.get_running_loop(), site)
    assert starter._new_stem() == f"{tmp_path}/t/{this.pid}-{this.started}-1"


def test_template_record_that_vanishes_while_read_is_ignored(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "1.json").symlink_to("gone")
    assert templates(str(tmp_path)) == []
    assert adoption._records(str(tmp_path)) == {}
