"""Strangers on another machine at every socket of two nodes with keys, including workers' ports, while a job runs.

Only with ``--strangers 1000`` or more, which come to each socket, or with ``--idle-connections 1000`` or more, which
say nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import netns_kit
import pace
import pytest
from keyed_hosts import environment, joined, two_nodes
from nightly import Figures

from rlinf_actors import procfs

LIVE = Path(__file__).resolve().parents[1] / "live"
sys.path.append(str(LIVE))  # the strangers, and what they come to
import strangers  # noqa: E402
from listening import Listening, listening  # noqa: E402

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

MANY = 1000
GROWTH = 20 << 20
"""Bytes that strangers may cost a process, at any moment. One stream at a time: what comes until it is seen and closed
is more where eight share two processors with those who look, and a network that is as fast as memory."""
CALLS = 2000

DRIVER = """
    import json, sys, threading
    from rlinf_actors import Cluster, NodePlacementStrategy
    import attacked_workers, strangers

    with Cluster(num_nodes=2, timeout=30) as cluster:
        group = attacked_workers.Counter.create_group().launch(
            cluster, placement_strategy=NodePlacementStrategy([0, 1]), name="counters")
        group.hit().wait()
        print(json.dumps({"pids": group.pid().wait()}), flush=True)
        made = 1
        for line in sys.stdin:  # measure so many calls, or as many as there are until the next line
            taken = strangers.Latencies()
            next_line = threading.Event()
            if int(line) == 0:
                threading.Thread(target=lambda: (sys.stdin.readline(), next_line.set())).start()
            while not next_line.is_set() and (int(line) == 0 or len(taken) < int(line)):
                taken.of(lambda: group.hit().wait())
            made += len(taken)
            assert group.hit().wait() == [made + 1] * 2, "a call of somebody else's was run"
            made += 1
            print(json.dumps({"calls": len(taken), "p99": taken.p99}), flush=True)
        group.shutdown()
"""


class Talk:
    """A process that exchanges lines of JSON with the test."""

    def __init__(self, stack: contextlib.ExitStack, command: list[str], env: dict[str, str]) -> None:
        self._process = stack.enter_context(
            subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        stack.callback(self.end)

    def tell(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0


def many(request: pytest.FixtureRequest, option: str) -> int:
    asked: int = request.config.getoption(option)
    if asked < MANY:
        pytest.skip(f"needs {option} {MANY} or more")
    return asked


class Scene(contextlib.ExitStack):
    """A head and a node with keys, each on its own host, a job on both, and another host."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place

    def begin(self) -> None:
        self.head, self.far, self.elsewhere = self.enter_context(netns_kit.hosts(3))
        self.address = f"{self.head.ip}:6399"
        agents = two_nodes(self.head, self.far, self.place, self.address)
        for agent in agents:
            self.callback(agent.wait, 30)
            self.callback(agent.terminate)
        script = self.place / "driver.py"
        script.write_text(textwrap.dedent(DRIVER))
        env = environment(self.place, "head", RLINF_HEAD=self.address)
        self.job = Talk(self, self.head.command([sys.executable, str(script)]), env)
        self.targets = [*(agent.pid for agent in agents), *self.job.hear()["pids"]]
        self.sockets = [one for agent in agents for one in sockets_of(agent.pid)]
        self.tcp = [one for one in self.sockets if not one.path]
        assert len(self.tcp) == 3, self.tcp  # the head's and the workers'

    def strange(self, what: str, times: int, where: list[Listening]) -> Talk:
        command = [sys.executable, str(LIVE / "strangers.py"), what, str(times)]
        made = Talk(self, self.elsewhere.command(command), environment(self.place, "nobody"))
        made.tell([dataclasses.asdict(one) for one in where])
        return made

    def descriptors(self) -> dict[int, list[str]]:
        return {pid: strangers.descriptors(pid) for pid in self.targets}

    def grown(self, before: dict[int, int]) -> dict[int, int]:
        """The largest growth of each process's memory since *before*."""
        return {pid: strangers.resident(pid, "VmHWM") - before[pid] for pid in self.targets}


@pytest.fixture
def scene(place: Path) -> Iterator[Scene]:
    with Scene(place) as made:
        yield made


def test_strangers_on_another_machine_reach_no_handler(
    scene: Scene, request: pytest.FixtureRequest, figures: Figures
) -> None:
    count = many(request, "--strangers")
    scene.begin()
    job = scene.job
    scene.strange("knock", 20, scene.sockets).hear()
    job.tell(CALLS)
    quiet = [job.hear()]
    fds = pace.settled(scene.descriptors)
    plan = (
        ("knock", count, scene.sockets, GROWTH),
        ("stream", 20, scene.tcp, GROWTH),
        ("8 streams", 40, scene.tcp, 4 * GROWTH),
    )
    for what, times, where, most in plan:
        before = peaks_begin(scene.targets)
        job.tell(0)
        came = scene.strange(what, times, where).hear()
        job.tell(0)
        loud = job.hear()
        job.tell(CALLS)
        quiet.append(job.hear())
        grown = scene.grown(before)
        assert "all was taken" not in came
        assert sum(came.values()) - came.get("last", 0) == times * len(where)
        assert all(grew < most for grew in grown.values()), grown
        assert pace.again_like(scene.descriptors, fds) == fds
        figures.done(times * len(where), times * len(where), f'"{what}", 0 of which reached anything')
        figures.add(
            f'p99 of a call beside "{what}"',
            f"{loud['p99']:.2f} ms of {loud['calls']} ({quiet[-2]['p99']:.2f} before, {quiet[-1]['p99']:.2f} after)",
        )
        figures.add(
            "memory that a process grew by", f"at most {max(grown.values()) >> 10:,} KiB (limit {most >> 10:,})"
        )


def test_idle_connections_of_another_machine_do_not_keep_nodes_from_joining(
    scene: Scene, request: pytest.FixtureRequest, figures: Figures
) -> None:
    count = many(request, "--idle-connections")
    scene.begin()
    for host, name, rank in ((scene.elsewhere, "near", 2), (scene.far, "away", 3)):
        before = peaks_begin(scene.targets)
        idle = scene.strange("idle", count, scene.tcp)
        assert idle.hear() == {"idle": count * len(scene.tcp)}
        late = joined(host, scene.place, scene.address, name, rank)
        late.terminate()
        late.wait(30)
        grown = scene.grown(before)
        assert all(grew < GROWTH for grew in grown.values()), grown
        idle.end()
        figures.done((rank - 1) * count * len(scene.tcp), 2 * count * len(scene.tcp), "idle connections")
        figures.add(
            "memory that a process grew by", f"at most {max(grown.values()) >> 10:,} KiB (limit {GROWTH >> 10:,})"
        )


def sockets_of(agent: int) -> list[Listening]:
    """The listening sockets of a node, by the pid of its agentd."""
    return listening(procfs.subtree(agent), f"/proc/{agent}/net")


def peaks_begin(pids: list[int]) -> dict[int, int]:
    """What they have now."""
    for pid in pids:
        strangers.begin_peak(pid)
    return {pid: strangers.resident(pid) for pid in pids}
