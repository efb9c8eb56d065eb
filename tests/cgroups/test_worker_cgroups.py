"""Workers in cgroups of the real kernel: limits, hidden processes, and cleanup."""

import asyncio
import os
import signal
import sys

import pytest

from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import PARENT, find
from rlinf_actors.cgroups.worker_cgroup import cgroup_of, leftovers, prepare, workers_of

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../agentd"))
from workers_kit import children, order, spec

pytestmark = pytest.mark.live

STALE = f"stale{os.getpid()}"
"""The id of a worker of an ended template, unique to this run of the tests."""
HIDER = """
import subprocess
command = ["env", "-i", "sh", "-c", "setsid sh -c 'echo hidden $$; exec sleep 1000' &"]
subprocess.run(command)
"""
HIDDEN_BOMB = """
import subprocess
code = '''
import os
print("bomb", os.getpid(), flush=True)
while True:
    if os.fork(): os._exit(0)
    os.setsid()
'''
subprocess.Popen(["env", "-i", sys.executable, "-S", "-c", code])
"""
EATER = "held = [bytearray(1 << 20) for _ in range(400)]"
FORKER = """
import threading, time
stop = threading.Event()
try:
    for n in range(100): threading.Thread(target=stop.wait, daemon=True).start()
except RuntimeError as error: print("refused", n, error, flush=True)
"""


@pytest.fixture
def roots():
    found = prepare(find())
    if not found.unified:
        pytest.skip(f"no cgroups here: {found.why['cgroup']}")
    yield found
    assert left(found) == []


def left(roots):
    mine = procfs.stat(os.getpid())
    assert mine is not None
    return [name for root in roots.directories() for name in os.listdir(f"{root}/{PARENT}") if STALE in name]


def need(roots, controller):
    if controller in roots.why:
        pytest.skip(roots.why[controller])


async def hidden(reports, word="hidden"):
    return int((await reports.line(word))[2].split()[1])


def alive(pid):
    stat = procfs.stat(pid)
    return stat is not None and not stat.ended


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
async def test_hidden_process_ends_with_its_own_worker(tmp_path, roots, start_method):
    async with children(tmp_path, rules={"cgroups": roots}) as (kids, reports):
        one, other = spec(do=HIDER, start_method=start_method), spec(1, do=HIDER.replace("hidden", "other"))
        kids.start(order([one, other]))
        pid, kept = await hidden(reports), await hidden(reports, "other")
        assert procfs.mark_of(pid) is None
        assert workers_of(pid) == [one.id]
        (ready,) = await reports.up(one)
        os.kill(ready.pid, signal.SIGKILL)
        await reports.gone(one)
        assert not alive(pid)
        assert alive(kept)
    assert not alive(kept)


async def test_a_hidden_fork_bomb_ends_with_its_worker(tmp_path, roots):
    async with children(tmp_path, rules={"cgroups": roots}) as (kids, reports):
        one, other = spec(do=HIDDEN_BOMB), spec(1)
        kids.start(order([one, other]))
        ready, _ = await reports.up(one, other)
        await hidden(reports, "bomb")
        os.kill(ready.pid, signal.SIGKILL)
        exit = await reports.gone(one)
        assert exit.reason == ""
        assert [pid for pid in procfs.pids() if one.id in workers_of(pid) and alive(pid)] == []


async def test_hidden_processes_of_a_killed_template_end(tmp_path, roots):
    async with children(tmp_path, rules={"cgroups": roots}) as (kids, reports):
        one = spec(do=HIDER)
        kids.start(order([one]))
        pid = await hidden(reports)
        (ready,) = await reports.up(one)
        os.kill(procfs.stat(ready.pid).parent, signal.SIGKILL)
        await reports.gone(one)
        assert not alive(pid)
        assert not [c for c in leftovers(roots) if c.worker == one.id]


async def test_exit_report_says_if_a_worker_ran_out_of_memory(tmp_path, roots):
    need(roots, "memory")
    async with children(tmp_path, rules={"cgroups": roots}) as (kids, reports):
        one, other = spec(do=EATER, memory_limit=200 << 20), spec(1, do=EATER)
        kids.start(order([one, other]))
        exit = await reports.gone(one)
        assert (exit.kind, exit.signal, exit.oom) == ("signalled", signal.SIGKILL, "yes")
        await reports.up(other)
        limited = spec(2, memory_limit=200 << 20)
        kids.start(order([limited]))
        (ready,) = await reports.up(limited)
        os.kill(ready.pid, signal.SIGKILL)
        assert (await reports.gone(limited)).oom == "no", "a kill for another reason is reported as such"


async def test_pids_limit_counts_processes_and_threads(tmp_path, roots):
    need(roots, "pids")
    async with children(tmp_path, rules={"cgroups": roots}) as (kids, reports):
        one = spec(do=FORKER, pids_limit=20)
        kids.start(order([one]))
        refused = int((await reports.line("refused"))[2].split()[1])
        assert refused == 19


async def test_unavailable_limit_fails_the_start_unless_best_effort(tmp_path):
    async with children(tmp_path, rules={"cgroups": find("off")}) as (kids, reports):
        one, other = spec(memory_limit=1 << 30), spec(1, memory_limit=1 << 30, limits_best_effort=True)
        kids.start(order([one, other]))
        exit = await reports.gone(one)
        assert exit.kind == "start_failed"
        assert "cgroups are switched off" in exit.reason
        assert "limits='best_effort'" in exit.reason
        await reports.up(other)
        assert "runs without a limit that was asked for" in (await reports.line("without a limit"))[2]


async def test_next_agentd_clears_cgroups_of_a_dead_template(tmp_path, roots):
    from agentd.sweep import clear_cgroups

    dead = await asyncio.create_subprocess_exec("sleep", "1000")
    keeper = procfs.stat(dead.pid)
    full, empty = cgroup_of(roots, keeper, f"{STALE}-0"), cgroup_of(roots, keeper, f"{STALE}-1")
    for cgroup in (full, empty):
        cgroup.make(roots.limits(None, None))
    child = await asyncio.create_subprocess_exec("sleep", "1000", preexec_fn=full.enter)
    assert not [c for c in leftovers(roots) if c.worker.startswith(STALE)], "the template lives"
    dead.kill()
    await dead.wait()
    cleared = asyncio.Event()
    clear_cgroups(asyncio.get_running_loop(), roots, cleared.set)
    assert empty.gone(), "at once"
    assert child.returncode is None, "a robot may be being made safe"
    await child.wait()  # killed; either asyncio or the sweep gets the exit code
    await cleared.wait()
    assert full.gone()
