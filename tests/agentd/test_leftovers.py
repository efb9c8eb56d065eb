"""A worker's child processes end with it, if the worker, template, agentd or owner is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pace
import pytest
from nightly import Figures
from workers_kit import HERE, children, order, spec

from agentd import keeper_client
from rlinf_actors import procfs

pytestmark = pytest.mark.live

DAEMONS = """
import subprocess, sys
def daemon():
    # forked twice, in a session of its own, with the pipes of the worker still open
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("daemon", os.getpid(), flush=True)
            while True: signal.pause()
        os._exit(0)
    os.wait()
import signal
daemon()
print("daemon", os.getpid(), flush=True)
code = "import os, signal; print('daemon', os.getpid(), flush=True); signal.pause()"
other = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
print(other.stdout.readline(), end="")
in_group = subprocess.Popen(["sleep", "1000"])
print("daemon", in_group.pid, "parent", os.getppid(), flush=True)
"""
LEAVES_WHEN_TOLD = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
{}
signal.sigwait([signal.SIGUSR1])
sys.exit(0)
"""


async def daemons(reports, n):
    await reports.until(lambda: sum("daemon" in text for _, _, text in reports.lines) >= n)
    pids = [int(text.split()[1]) for _, _, text in reports.lines if "daemon" in text]
    template = next(int(text.split()[3]) for _, _, text in reports.lines if "parent" in text)
    assert all(procfs.stat(pid) for pid in pids)
    return pids, template


def alive(pids):
    return [stat for pid in pids if (stat := procfs.stat(pid)) and stat.state != "Z"]


@pytest.mark.parametrize("how", ["kill", "stop", "exit", "template"])
async def test_daemons_end_with_their_worker(tmp_path, how, monkeypatch):
    monkeypatch.setattr(keeper_client, "STATUS_S", pace.PATIENCE_S)
    async with children(tmp_path) as (kids, reports):
        one, other = spec(do=LEAVES_WHEN_TOLD.format(DAEMONS) if how == "exit" else DAEMONS), spec(1)
        kids.start(order([one, other]))
        mine, ready = await reports.up(one, other)
        pids, template = await daemons(reports, 4)
        if how == "exit":
            os.kill(mine.pid, signal.SIGUSR1)
        elif how == "kill":
            os.kill(mine.pid, signal.SIGKILL)
        elif how == "stop":
            kids.stop([one.id], 5)
        elif how == "template":
            os.kill(template, signal.SIGKILL)
        await reports.gone(one)
        assert alive(pids) == []
        if how == "template":
            exit = await reports.gone(other)
            assert exit.kind in ("signalled", "exited"), (
                "by the kernel's signal, or by itself at the end of its control"
            )
            assert "template process that it came from ended (signal 9" in exit.reason
            again = spec(2)
            kids.start(order([again]))
            await reports.up(again)
        else:
            assert other.id not in reports.exits
            assert alive([ready.pid])


@pytest.mark.parametrize("how", ["exit", "template"])
async def test_programs_in_the_middle_of_exec_end_with_their_worker(tmp_path, how):
    do = """
import subprocess
os.environ["DO"] = ""
for _ in range(8):
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
os.kill(%s, 9)
""" % ("os.getppid()" if how == "template" else "os.getpid()")
    async with children(tmp_path) as (kids, reports):
        one, other = spec(do=do), spec(1)
        kids.start(order([other]))
        await reports.up(other)
        kids.start(order([one]))
        await reports.gone(one)
        assert procfs.marked([one.id]) == []


async def test_daemons_of_living_workers_are_not_killed(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one, other = spec(do=DAEMONS), spec(1)
        kids.start(order([one, other]))
        await reports.up(one, other)
        pids, _ = await daemons(reports, 4)
        os.kill(reports.ready[other.id].pid, signal.SIGKILL)
        await reports.gone(other)
        assert len(alive(pids)) == 4


HIDES = """
import signal, subprocess
# no environment, a session of its own, forked twice, and none of the worker's descriptors
shell = "setsid sh -c '(sleep 1000 & echo daemon $!)' 2>/dev/null </dev/null"
command = ["env", "-i", "sh", "-c", shell.replace("sleep 1000", "sleep 1000 >/dev/null")]
for _ in range(%d):
    print(subprocess.check_output(command, text=True), end="", flush=True)
print("daemon", os.getpid(), "parent", os.getppid(), flush=True)
"""


@pytest.mark.parametrize("how", ["kill", "stop", "template"])
async def test_hidden_process_ends_with_its_worker_while_others_live(tmp_path, how):
    """Without cgroups."""
    async with children(tmp_path) as (kids, reports):
        one, other = spec(do=HIDES % 4), spec(1, do=DAEMONS)
        kids.start(order([one]))
        pids, template = await daemons(reports, 5)
        kids.start(order([other]))
        await daemons(reports, 9)
        others = {pid for _, _, text in reports.lines if "daemon" in text for pid in [int(text.split()[1])]} - set(pids)
        assert all(procfs.mark_of(pid) is None for pid in pids[:4]), "the processes are still marked"
        if how == "template":
            os.kill(template, signal.SIGKILL)
        elif how == "kill":
            (ready,) = await reports.up(one)
            os.kill(ready.pid, signal.SIGKILL)
        else:
            kids.stop([one.id], 5)
        await reports.gone(one)
        if how == "template":
            await reports.gone(other)
        assert alive(pids) == []
        assert len(alive(others)) == (0 if how == "template" else 4)


async def test_process_of_another_user_with_the_same_brand_is_spared(tmp_path, monkeypatch):
    if os.getuid() != 0:
        pytest.skip("needs root, to have another user")
    code = "import sys; from rlinf_actors import procfs; procfs.brand(sys.argv[1]); print(flush=True); input()"
    command = [sys.executable, "-c", code, "w1"]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    try:
        assert procfs.branded(process.pid, ["w0", "w1"]) == "w1"
        assert procfs.branded(process.pid, ["w0"]) is None
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert procfs.branded(process.pid, ["w0", "w1"]) is None
    finally:
        process.kill()
        await process.wait()


def test_nested_worker_has_its_own_brand():
    code = """if 1:
        import os
        from rlinf_actors import procfs
        for worker in map(str, range(20)):
            assert procfs.brand(worker)
            assert procfs.branded(os.getpid(), map(str, range(20))) == worker
    """
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_fork_bomb_ends_with_its_worker(tmp_path):
    bomb = """
import signal
if os.fork() == 0:
    os.setsid()
    print("daemon", os.getpid(), flush=True)
    while True:
        if os.fork():
            os._exit(0)  # a new pid all the time, an orphan at once
"""
    async with children(tmp_path) as (kids, reports):
        one = spec(do=bomb)
        kids.start(order([one]))
        (ready,) = await reports.up(one)
        await reports.line("daemon")
        os.kill(ready.pid, signal.SIGKILL)
        await reports.gone(one)
        assert procfs.marked([one.id]) == []


AGENT = """
    import asyncio, sys
    sys.path.insert(0, {here!r})
    import pathlib
    from workers_kit import children, order, spec
    from test_leftovers import DAEMONS, daemons
    async def main():
        async with children(pathlib.Path({tmp!r}), owner_pid={owner}) as (kids, reports):
            one = spec(do={do!r})
            kids.start(order([one]))
            pids, template = await daemons(reports, {n})
            print(template, *pids, flush=True)
            await asyncio.Event().wait()
    asyncio.run(main())
"""


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("victim", ["agentd", "owner", "template and agentd", "template, agentd and owner"])
async def test_all_processes_end_with_agentd_or_the_owner(tmp_path, victim, hides, request, figures: Figures):
    hidden = request.config.option.grandchildren
    owner = await asyncio.create_subprocess_exec("sleep", "1000")
    do, n = (HIDES % hidden, hidden + 1) if hides else (DAEMONS, 4)
    code = textwrap.dedent(AGENT).format(here=str(HERE), tmp=str(tmp_path), owner=owner.pid, do=do, n=n)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE, env=env)
    assert agent.stdout is not None
    try:
        pids = [int(word) for word in (await agent.stdout.readline()).split()]
        assert len(pids) == n + 1
        watched = [os.pidfd_open(pid) for pid in pids]
        if "template" in victim:
            os.kill(pids[0], signal.SIGKILL)  # a stopped agentd cannot end its workers: the kernel does
        if "agentd" in victim:
            agent.kill()
        if "owner" in victim:
            owner.kill()
        killed = time.monotonic()
        for pidfd in watched:
            await readable(pidfd)
            os.close(pidfd)
        took = time.monotonic() - killed
    finally:
        for process in (owner, agent):
            if process.returncode is None:
                process.kill()
            await process.wait()
    for stat in map(procfs.stat, pids):
        if stat is not None and stat.parent == os.getpid():  # earlier tests made us a subreaper
            os.waitpid(stat.pid, 0)  # noqa: ASYNC222 it is a zombie
    left = alive(pids)
    if hides:
        figures.done(hidden, hidden, "daemons that hide")
        figures.add(f"left of {hidden} after kill -9 of {victim}", f"{len(left)}; the last ended after {took:.2f} s")
    assert left == []


async def readable(fd):
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(fd, lambda: ended.done() or ended.set_result(None))
    await ended
    loop.remove_reader(fd)
