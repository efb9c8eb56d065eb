"""Claims on robots: refusals across drivers, ends of owners, and waiting launches."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import arm_hardware as ah
import live_workers as lw
import pace
import pytest

from rlinf_actors import HardwareInUseError, UsageError, WorkerError
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def local():
    env = {"RLINF_EXT_MODULE": "arm_hardware", "PYTHONPATH": f"{lw.ROOT / 'tests/live'}"}
    with LocalCluster(2, env=env, options=pace.timers(robot_lease_s=6)) as made:
        yield made


@pytest.fixture
def lab(local):
    with local.cluster(cluster_cfg=ah.config(), namespace="mine") as cluster:
        yield cluster


@contextmanager
def owner(tmp_path, local, cls="Mover", namespace="theirs"):
    """Another driver, whose group has arm 0. It ends when its stdin does."""
    path = tmp_path / "owner.py"
    path.write_text(
        lw.dedent(f"""
            import sys
            sys.path.insert(0, {str(lw.ROOT / "tests/live")!r})
            import arm_hardware as ah
            from rlinf_actors import Cluster
            with Cluster(cluster_cfg=ah.config(), head={local.head!r}, namespace={namespace!r}) as cluster:
                with ah.{cls}.create_group().launch(cluster, ah.on(0), name="taken"):
                    print("has it", flush=True)
                    sys.stdin.readline()
        """)
    )
    process = subprocess.Popen(
        [sys.executable, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**lw.SCRIPT_ENV, **local.driver_env},
    )
    with process:
        assert process.stdout.readline() == "has it\n"
        yield process
        process.stdin.close()
        process.wait(pace.PATIENCE_S)


def leases(cluster):
    status = cluster.runtime.io.submit(cluster.runtime.status(None)).result(pace.PATIENCE_S)
    return {lease.title: (lease.namespace, lease.group, lease.workers, lease.state) for lease in status.leases}


@pytest.mark.parametrize("namespace", ["theirs", "mine"])
@pytest.mark.parametrize("cls", ["Mover", "StubbornMover"])
def test_second_group_is_told_the_arms_owner_and_gets_the_arm_after_its_death(lab, local, tmp_path, cls, namespace):
    with owner(tmp_path, local, cls, namespace) as other:
        with pytest.raises(HardwareInUseError) as refused:
            ah.Mover.create_group().launch(lab, ah.on(1, 0), name="second")
        text = str(refused.value)
        assert f"LeasedArm 10.9.0.1 is held by group 'taken' of job '{namespace}'" in text
        me = pwd.getpwuid(os.geteuid()).pw_name
        assert f"owned by {me}'s owner.py (pid {other.pid} on node0, started " in text
        assert "its worker taken:0 on node node1 (127.0.0.2)" in text
        assert leases(lab) == {"LeasedArm 10.9.0.1": (namespace, "taken", ["taken:0"], "held")}
        killed = time.perf_counter()
        os.kill(other.pid, signal.SIGKILL)
        with ah.Mover.create_group().launch(lab, ah.on(1, 0), name="second", wait_for_hardware=15) as group:
            free = time.perf_counter() - killed
            assert group.where().wait() == ["10.9.0.2", "10.9.0.1"]
    print(f"the arm of a {cls} was launched on {1000 * free:.0f} ms after kill -9 of its owner")


def test_arm_of_a_killed_worker_is_free(lab, local, tmp_path):
    with owner(tmp_path, local):
        mine = ah.Mover.create_group().launch(lab, ah.on(1), name="mine").wait_ready()
        (worker,) = mine.control.group.states.values()
        os.kill(worker.pid, signal.SIGKILL)
        with ah.Mover.create_group().launch(lab, ah.on(1), name="again", wait_for_hardware=15) as group:
            assert group.where().wait() == ["10.9.0.2"]
        with pytest.raises(HardwareInUseError):
            ah.Mover.create_group().launch(lab, ah.on(0))


def test_arm_is_free_after_a_shutdown(lab):
    for _ in range(2):
        group = ah.Mover.create_group().launch(lab, ah.on(0, 1), name="again").wait_ready()
        group.shutdown()
        assert leases(lab) == {}


def test_failed_launch_frees_its_arm_for_a_group_of_any_name(lab):
    with pytest.raises(WorkerError, match="no arm answers"):
        ah.BadMover.create_group().launch(lab, ah.on(0), name="bad").wait_ready()
    with ah.Mover.create_group().launch(lab, ah.on(0), name="good") as group:
        assert group.where().wait() == ["10.9.0.1"]


def test_waiting_launch_ends_by_a_shutdown_and_by_its_timeout(lab):
    async def main():
        holder = await ah.Mover.create_group().launch(lab, ah.on(0), name="holder")
        waiting = ah.Mover.create_group().launch(lab, ah.on(0), name="waiting", wait_for_hardware=600)
        ready = asyncio.ensure_future(_ready(waiting))
        await waiting.shutdown()
        with pytest.raises(HardwareInUseError, match="'waiting' was shut down while it waited"):
            await ready
        with pytest.raises(HardwareInUseError, match="held by group 'holder'"):
            await ah.Mover.create_group().launch(lab, ah.on(0), name="short", wait_for_hardware=0.05)
        await holder.shutdown()

    asyncio.run(main())
    assert leases(lab) == {}


async def _ready(group):
    return await group


class OnWarning(logging.Handler):
    """An event that is set by the first warning; a signal's own moment could fall before the wait that it is to end."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.seen = threading.Event()

    def emit(self, record):
        self.seen.set()


def test_ctrl_c_withdraws_a_waiting_launch(lab, local, tmp_path, monkeypatch):
    handler = OnWarning()

    class Interrupted:
        """The wait of a launch, which ends by Ctrl-C once the launch waits for its hardware."""

        def wait(self):
            assert handler.seen.wait(pace.PATIENCE_S)
            raise KeyboardInterrupt

    with owner(tmp_path, local) as other:
        logging.getLogger("rlinf_actors.runtime.runtime").addHandler(handler)
        with monkeypatch.context() as patch:
            patch.setattr("rlinf_actors.group.launcher.AsyncWork.of_future", lambda future, what: Interrupted())
            with pytest.raises(KeyboardInterrupt):
                ah.Mover.create_group().launch(lab, ah.on(0), name="late", wait_for_hardware=600)
        logging.getLogger("rlinf_actors.runtime.runtime").removeHandler(handler)
        os.kill(other.pid, signal.SIGKILL)
        with ah.Mover.create_group().launch(lab, ah.on(0), name="after", wait_for_hardware=15):
            assert leases(lab) == {"LeasedArm 10.9.0.1": ("mine", "after", ["after:0"], "held")}


def test_invalid_wait_for_hardware_is_refused(lab):
    with pytest.raises(UsageError, match="wait_for_hardware is -1"):
        ah.Mover.create_group().launch(lab, ah.on(0), wait_for_hardware=-1)
