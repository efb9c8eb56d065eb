"""kill -9 of the head: workers go on, requests wait, and the next head finds the whole state again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

import head_workers as hw
import live_workers as lw
import pace
import pytest

from rlinf_actors import GroupNotFoundError, NameInUseError, NodePlacementStrategy, WorkerDiedError
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

TIMERS = pace.timers(beat_s=0.1, lease_s=8.0)


@pytest.fixture(scope="module")
def local():
    """The head and no workers on node 0: its agentd is killed with the head."""
    env = {"PYTHONPATH": f"{lw.ROOT / 'tests/live'}", "RLINF_ACTORS_SHARED_MEMORY": "0"}
    with LocalCluster(3, env=env, options=TIMERS) as made:
        yield made


@pytest.fixture
def lab(local):
    with local.cluster(namespace="mine") as cluster:
        yield cluster


def launch(cluster, name, cls=hw.Steady):
    return cls.create_group().launch(cluster, NodePlacementStrategy([1, 2]), name=name)


@contextmanager
def headless(local):
    """Run the block without the head. Afterwards the head is up again and knows its nodes."""
    local.kill_agent(0)
    try:
        yield
    finally:
        local.restart_agent(0)


@contextmanager
def driver(tmp_path, local, source, name):
    """Another driver of the same job, with `group` launched under that name; it ends when its stdin does.

    The name is a test's own: a head that is restarted waits for the owner of a group before it forgets that.
    """
    path = tmp_path / "other.py"
    path.write_text(
        lw.dedent(f"""
            import sys
            sys.path.insert(0, {str(lw.ROOT / "tests/live")!r})
            import head_workers as hw
            from rlinf_actors import Cluster, NodePlacementStrategy, WorkerGroup
            with Cluster(num_nodes=3, head={local.head!r}, namespace="mine") as cluster:
                group = hw.Steady.create_group().launch(cluster, NodePlacementStrategy([1, 2]), name={name!r})
                print(*group.pid().wait(), flush=True)
        """)
        + textwrap.indent(lw.dedent(source), "    ")
    )
    process = subprocess.Popen(
        [sys.executable, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**lw.SCRIPT_ENV, **local.driver_env},
    )
    with process:
        try:
            yield process, [int(pid) for pid in process.stdout.readline().split()]
        finally:
            process.kill()


class Load:
    """Calls again and again, from a thread."""

    def __init__(self, group) -> None:
        self._group = group
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self.done = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.005):
                self.done = self._group.step().wait(pace.PATIENCE_S)[0]
        except BaseException as error:  # noqa: BLE001 - the test shows it
            self.error = error

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.error is None


def later(act):
    """Run something that waits for the head on a thread; returns how to get its result."""
    got: list = []

    def run() -> None:
        try:
            got.append((True, act()))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            got.append((False, error))

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(pace.PATIENCE_S)
        ok, value = got[0]
        if not ok:
            raise value
        return value

    return result


def watch(pid):
    return os.pidfd_open(pid)


def test_groups_of_a_driver_that_dies_without_a_head_end(lab, local, tmp_path):
    # first: later on the agentd that watches the driver is the one that is killed with the head
    with driver(tmp_path, local, "sys.stdin.readline()", "first") as (other, pids):
        ends = [watch(pid) for pid in pids]
        with headless(local):
            other.kill()
            other.wait()
        for end in ends:
            lw.wait_for_end(end)


def test_jobs_go_on_without_a_head_and_waiting_requests_are_done_afterwards(lab, local, tmp_path):
    group = launch(lab, "mine")
    pids = group.pid().wait()
    doomed = launch(lab, "doomed")
    ends = [watch(pid) for pid in doomed.pid().wait()]
    again = """
        sys.stdin.readline()
        print(*group.pid().wait(), flush=True)
        print(*WorkerGroup.from_group_name(hw.Steady, "mine").pid().wait(), flush=True)
        sys.stdin.readline()
    """
    with driver(tmp_path, local, again, "theirs") as (other, their_pids), Load(group) as load:
        with headless(local):
            before = load.done
            launching = later(lambda: launch(lab, "new").pid().wait())
            stopping = later(lambda: doomed.shutdown(1.0))
            taken = later(lambda: launch(lab, "theirs"))
            while load.done < before + 20:
                assert load.error is None
        stopping()
        for end in ends:
            lw.wait_for_end(end)
        assert len(set(launching()) - set(pids)) == 2
        with pytest.raises(NameInUseError, match="'theirs' is running"):
            taken()
        assert group.pid().wait() == pids
        other.stdin.write("on\n")
        other.stdin.flush()
        assert [int(pid) for pid in other.stdout.readline().split()] == their_pids
        assert [int(pid) for pid in other.stdout.readline().split()] == pids
        status = lab.runtime.io.submit(lab.runtime.status(None)).result(pace.PATIENCE_S)
        # one whose beats are late at this moment is suspect, which is there as well
        assert {node.rank: node.state in ("ready", "suspect") for node in status.nodes} == {0: True, 1: True, 2: True}
        assert {state.name for state in status.groups} - {"first"} == {"mine", "new", "theirs"}


def test_sigterm_to_an_agentd_with_the_head_ends_no_job(lab, local):
    group = launch(lab, "outlasting")
    pids = group.pid().wait()
    with Load(group) as load:
        local.stop_node(0, pace.PATIENCE_S)
        before = load.done
        launching = later(lambda: launch(lab, "waiting").pid().wait())
        while load.done < before + 20:
            assert load.error is None
        local.restart_agent(0)
        assert len(set(launching()) - set(pids)) == 2
    assert group.pid().wait() == pids


def test_restart_of_the_unit_of_agentd_with_the_head_keeps_workers(lab, local):
    group = hw.Steady.create_group().launch(lab, NodePlacementStrategy([0, 1]), name="beside")
    pids = group.pid().wait()
    with Load(group) as load:
        for number in (signal.SIGUSR1, signal.SIGTERM):  # what `systemctl restart` sends
            local.nodes[0].process.send_signal(number)
        assert local.nodes[0].process.wait(pace.PATIENCE_S) == 0
        before = load.done
        while load.done < before + 20:
            assert load.error is None
        local.restart_agent(0, pace.PATIENCE_S)
        assert len(set(launch(lab, "later").pid().wait()) - set(pids)) == 2
    assert group.pid().wait() == pids


def test_death_of_a_worker_without_a_head_is_reported_afterwards(lab, local):
    group = launch(lab, "mortal")
    pids = group.pid().wait()
    with headless(local):
        end = watch(pids[0])
        os.kill(pids[0], signal.SIGKILL)
        lw.wait_for_end(end)
        dead = group.step()
    with pytest.raises(WorkerDiedError, match="signal 9") as died:
        dead.wait(pace.PATIENCE_S)
    assert died.value.rank == 0
    assert group.execute_on(1).pid().wait() == pids[1:]


def test_later_handle_knows_a_rank_that_ended_before_the_heads_restart(lab, local, tmp_path):
    group = launch(lab, "half")
    pids = group.pid().wait()
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        group.execute_on(0).step().wait(pace.PATIENCE_S)
    attach = """
        from rlinf_actors import WorkerDiedError
        sys.stdin.readline()
        half = WorkerGroup.from_group_name(hw.Steady, "half")
        print(*half.execute_on(1).pid().wait(10), flush=True)
        try:
            half.execute_on(0).pid().wait(10)
        except WorkerDiedError as error:
            print(error.signal, flush=True)
        sys.stdin.readline()
    """
    with driver(tmp_path, local, attach, "attaching") as (other, _):
        with headless(local):
            pass
        other.stdin.write("on\n")
        other.stdin.flush()
        assert [int(other.stdout.readline()) for _ in range(2)] == [pids[1], signal.SIGKILL]


def test_unknown_group_name_is_an_error_after_the_nodes_are_back(lab, local):
    with headless(local):
        finding = later(
            lambda: lab.runtime.io.submit(lab.runtime.groups.find("mine", "nobody")).result(pace.PATIENCE_S)
        )
    with pytest.raises(GroupNotFoundError):
        finding()


def test_emergency_stop_survives_a_killed_head(lab, local):
    assert cli(local, "estop", "--reason", "smoke").returncode == 0
    with headless(local):
        pass
    assert "smoke" in cli(local, "status").stdout
    assert cli(local, "estop", "--release").returncode == 0
    assert "smoke" not in cli(local, "status").stdout


def test_stream_ends_with_a_consumer_on_another_machine(lab, local, tmp_path):
    """Without shared memory no worker watches processes of its machine: as between machines, the head reports ends."""
    strategy = NodePlacementStrategy([1])
    group = hw.Pipe.create_group().launch(lab, strategy, name="pipe")
    path = lw.script(
        tmp_path,
        lw.dedent(f"""
            import asyncio, sys
            sys.path.insert(0, {str(lw.ROOT / "tests/live")!r})
            import head_workers as hw
            from rlinf_actors import Cluster, WorkerGroup

            async def consume():
                async with Cluster.connect(head={local.head!r}, namespace="mine"):
                    pipe = WorkerGroup.from_group_name(hw.Pipe, "pipe")
                    async for _rank, n in pipe.items():
                        if n == 1:
                            print("reads", flush=True)
                            await asyncio.Event().wait()

            asyncio.run(consume())
        """),
    )
    env = {**lw.SCRIPT_ENV, **local.driver_env, "RLINF_ACTORS_SHARED_MEMORY": "0"}
    closed = group.closed()
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True, env=env) as consumer:
        assert consumer.stdout.readline() == "reads\n"
        consumer.kill()
        assert closed.wait(pace.PATIENCE_S) == [True]


def cli(local, command, *arguments):
    boot = "import sys; from rlinf_actors.cli.main import main; sys.exit(main())"
    call = [sys.executable, "-c", boot, command, "--head", local.head, *arguments]
    return subprocess.run(call, capture_output=True, text=True, check=False, env={**lw.SCRIPT_ENV, **local.driver_env})
