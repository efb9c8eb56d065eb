"""A head that is stopped by SIGTERM and started again, and a head that ends for good."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import head_workers as hw
import live_workers as lw
import pace
import pytest
import resize_workers as rw
from child_workers import Parent
from nightly import Figures

from rlinf_actors import Channel, Cluster, NodeLostError, NodePlacementStrategy, WorkerGroup
from rlinf_actors.cluster.local_daemon import start_agentd
from rlinf_actors.net.host import HeldPorts

pytestmark = pytest.mark.live

COMMAND = (sys.executable, "-m", "rlinf_actors.cli.main")


class Site:
    """A head and an agentd, each a process of its own, on one address.

    Args:
        place: a short path, for sockets.
        address: where the head listens.
    """

    def __init__(self, place: Path, address: str) -> None:
        self.place = place
        self.address = address
        self.state = place / "state-0"
        self._numbers = itertools.count(1)
        self.head = self._start_head()
        self.agent = self._start_agent()

    def cli(self, *arguments: str, code: int = 0) -> str:
        """What `rlinf-actors` prints."""
        done = subprocess.run(
            [*COMMAND, *arguments, "--head", self.address], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return done.stdout

    def restart_head(self) -> None:
        """SIGTERM, then a new head at the same address, from a copy of the state alone: as on another machine."""
        self.head.send_signal(signal.SIGTERM)
        assert self.head.wait(pace.PATIENCE_S) == 0
        before, self.state = self.state, self.place / f"state-{next(self._numbers)}"
        shutil.copytree(before, self.state)
        shutil.rmtree(before)
        self.head = self._start_head()

    def log(self) -> str:
        """What the heads have said."""
        return (self.place / "head.log").read_text()

    def close(self) -> None:
        """End both."""
        for process in (self.agent, self.head):
            with process:
                process.terminate()
                process.wait(pace.PATIENCE_S)

    def _start_head(self) -> subprocess.Popen[bytes]:
        command = [*COMMAND, "head", "--listen", self.address, "--state-dir", str(self.state)]
        with open(self.place / "head.log", "ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        with process.stdout as said:
            assert said.readline().decode().strip() == self.address
        return process

    def _start_agent(self) -> subprocess.Popen[bytes]:
        (self.place / "hw.json").write_text("{}")
        (self.place / "agentd.toml").write_text("")
        run_dir = str(self.place / "agent")
        os.mkdir(run_dir, 0o700)
        read, write = os.pipe()
        arguments = ["--connect", self.address, "--hardware", str(self.place / "hw.json"), "--node-id", "n0"]
        options = ["--config", str(self.place / "agentd.toml"), "--log-dir", str(self.place / "log")]
        process = start_agentd(
            [*arguments, *options], run_dir, write, {**os.environ, "PYTHONPATH": str(lw.ROOT / "tests/live")}
        )
        os.close(write)
        with os.fdopen(read) as pipe:
            assert "node_id" in json.loads(pipe.readline())
        return process


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as place, contextlib.closing(HeldPorts()) as ports:
        made = Site(Path(place), f"127.0.0.1:{ports.hold()}")
        try:
            yield made
        finally:
            made.close()


class Load:
    """Work that is done again and again on a thread of its own, until the block ends; then an error of it is raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.rounds = 0
        self._work = work
        self._progress = threading.Condition()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.005):
                self._work()
                with self._progress:
                    self.rounds += 1
                    self._progress.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised where the block ends
            self._error = error
            with self._progress:
                self._progress.notify_all()

    def goes_on(self, rounds: int = 5) -> None:
        """Wait until that much more was done."""
        with self._progress:
            until = self.rounds + rounds
            assert self._progress.wait_for(lambda: self.rounds >= until or self._error, pace.PATIENCE_S), (
                "it stands still"
            )

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join(pace.PATIENCE_S)
        assert not self._thread.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error


@pytest.mark.timeout(0)
def test_head_restarts_by_sigterm_lose_no_call_message_or_item(site, request, figures: Figures):
    restarts = request.config.getoption("head_restarts")
    with Cluster(num_nodes=1, head=site.address, namespace="mine") as cluster:
        two = NodePlacementStrategy([0, 0])
        steady = hw.Steady.create_group().launch(cluster, two, name="steady")
        pair = hw.Pair.create_group().launch(cluster, two, name="pair")
        taker = hw.Pair.create_group().launch(cluster, NodePlacementStrategy([0]), name="taker")
        channel = Channel.create("items")
        pids = steady.pid().wait(pace.PATIENCE_S)
        calls, messages, items = itertools.count(1), itertools.count(20, 20), itertools.count(0, 10)

        def call() -> None:
            assert steady.step().wait(pace.PATIENCE_S) == [next(calls)] * 2

        def exchange() -> None:
            assert pair.exchange(20).wait(pace.PATIENCE_S) == [next(messages)] * 2

        def hand_over() -> None:
            first = next(items)
            taken = taker.take(channel, 10)
            for item in range(first, first + 10):
                channel.put(item)
            assert taken.wait(pace.PATIENCE_S) == [list(range(first, first + 10))]

        with Load(call) as calling, Load(exchange) as exchanging, Load(hand_over) as handing:
            for number in range(restarts):
                site.restart_head()
                new = hw.Steady.create_group().launch(cluster, two, name=f"new-{number}")
                assert new.step().wait(pace.PATIENCE_S) == [1, 1]
                new.shutdown()
                for load in (calling, exchanging, handing):
                    load.goes_on()
                figures.done(number + 1, restarts, "restarts")
        assert steady.pid().wait(pace.PATIENCE_S) == pids
        status = json.loads(site.cli("status", "--json"))
        assert status["epoch"].startswith(f"{restarts + 1}-")
        figures.add("calls, messages, items", f"{2 * calling.rounds}, {40 * exchanging.rounds}, {10 * handing.rounds}")
    assert site.log().count("SIGTERM: jobs continue") == restarts


def test_children_of_workers_survive_a_head_restart(site):
    with Cluster(num_nodes=1, head=site.address, namespace="mine") as cluster:
        two = NodePlacementStrategy([0, 0])
        group = Parent.create_group().launch(cluster, two, name="p")
        one = group.execute_on(0)
        assert one.start(["fork", "spawn"]).wait(pace.PATIENCE_S) == [[None, None]]
        channel = Channel.create("items")
        for child in range(2):
            assert one.let(child, "put", "items", child).wait(pace.PATIENCE_S) == [None]
        site.restart_head()
        for child in range(2):
            assert one.let(child, "get", "items").wait(pace.PATIENCE_S) == [child]
            swap = group.execute_on(1).swap("a", "p", (0, child))
            assert one.let(child, "swap", "b", "p", 1).wait(pace.PATIENCE_S) == [["p:1", "a"]]
            assert swap.wait(pace.PATIENCE_S) == [(f"p:0:{child}", "b")]
        channel.put("again")
        assert one.let(0, "get_and_die", "items").wait(pace.PATIENCE_S) == ["it ended"]
        assert channel.get(timeout=pace.PATIENCE_S) == "again"
        group.shutdown()


def test_head_stop_ends_the_cluster_for_good(site):
    with Cluster(num_nodes=1, head=site.address) as cluster:
        group = hw.Steady.create_group().launch(cluster, NodePlacementStrategy([0]), name="steady")
        (pid,) = group.pid().wait(pace.PATIENCE_S)
        end = os.pidfd_open(pid)
        assert site.head.poll() is None
        site.cli("head", "stop", code=64)  # no head answers
        assert group.step().wait(pace.PATIENCE_S) == [1]
        assert "steady" in site.cli("head", "stop", "--yes", "--reason", "maintenance")
        lw.wait_for_end(end)
        assert site.head.wait(pace.PATIENCE_S) == 3
        with pytest.raises(NodeLostError, match="ended the cluster: maintenance"):
            cluster.runtime.io.submit(cluster.runtime.status(None)).result(pace.PATIENCE_S)
        assert site.agent.poll() is None


class Control:
    """Measures, on a thread of its own, how long the machine runs none of this process: how late 10 ms timers are."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.late = 0.0
        self._thread = threading.Thread(target=self._measure)

    def _measure(self) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            self._over.wait(0.01)
            self.late += max(0.0, time.monotonic() - begun - 0.01)

    def __enter__(self) -> Control:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()


DRIVER = """
    import sys
    sys.path.insert(0, {tests!r})
    import head_workers as hw
    from rlinf_actors import Cluster, NodePlacementStrategy
    with Cluster(num_nodes=1, head={head!r}) as cluster:
        group = hw.Steady.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="mine")
        print(*group.pid().wait(), flush=True)
        if "shutdown" in sys.stdin.readline():
            group.shutdown()
"""


@contextlib.contextmanager
def driver(site: Site) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A script with a group of two, which ends when it reads a line; and pidfds of its workers."""
    path = lw.script(site.place, lw.dedent(DRIVER).format(tests=str(lw.ROOT / "tests/live"), head=site.address))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, path], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=lw.SCRIPT_ENV
    ) as process:
        try:
            assert process.stdout is not None
            yield process, [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["end", "shutdown"])
def test_driver_can_end_while_the_head_is_dead(site, how):
    with driver(site) as (process, ends):
        site.head.kill()
        site.head.wait()
        begun = time.monotonic()
        _, said = process.communicate(f"{how}\n", timeout=pace.PATIENCE_S)
        after = time.monotonic() - begun
        for end in ends:
            lw.wait_for_end(end)
    assert process.returncode == 0
    assert "has not answered for 5 s and was not told to end group 'mine'" in said
    assert 5.0 <= after < 20.0  # 5 s of silence; the rest is the end of the interpreter


def test_workers_end_within_a_second_of_their_driver_and_the_head(site, figures: Figures):
    """Their agentd sees the driver's end and gets no answer from the head. No new head starts here."""
    with driver(site) as (process, ends), Control() as control:
        site.head.kill()
        process.kill()
        begun, late = time.monotonic(), control.late
        for end in ends:
            lw.wait_for_end(end)
        after, stall = time.monotonic() - begun, control.late - late
    figures.add(
        "workers of a driver killed with the head ended after", f"{after:.2f} s, the machine's stall {stall:.2f} s"
    )
    assert after - stall <= 1.0, f"{after:.2f} s, of which the machine stood still for {stall:.2f} s by a control timer"


def test_head_without_its_state_ends_the_cluster_and_logs_it():
    with subprocess.Popen(
        [*COMMAND, "head", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline()
        process.terminate()
        _, said = process.communicate(timeout=pace.PATIENCE_S)
    assert process.returncode == 0
    assert "SIGTERM: the cluster ends, because no other head can continue without a state directory" in said


def test_a_group_grows_and_shrinks_across_head_restarts(site):
    with Cluster(num_nodes=1, head=site.address, namespace="elastic") as cluster:
        here = NodePlacementStrategy([0])
        group = rw.Elastic.create_group().launch(cluster, here, name="e")
        assert group.add_ranks(here) == [1]
        site.restart_head()
        assert group.sizes().wait(pace.PATIENCE_S) == [(0, 2, "2"), (1, 2, "2")]
        assert group.add_ranks(here) == [2]
        site.restart_head()
        group.remove_ranks(1, 2)
        site.restart_head()
        assert WorkerGroup.from_group_name(rw.Elastic, "e").world_size == 1
        adding = group.add_ranks(NodePlacementStrategy([0, 0]), async_op=True)
        site.restart_head()  # at some point of the addition
        assert adding.wait(pace.PATIENCE_S) == [1, 2]
        assert len(group.sizes().wait(pace.PATIENCE_S)) == 3
        group.shutdown()
